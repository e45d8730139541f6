"""The drivers of the risk of a run, as accessible bars that fit any width."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from workbench.plots import outcome_colors as outcome_looks
from workbench.plots.drivers_figure import Bars
from workbench.widgets.risk.risk_verdict import HEAD, MUTED
from workbench.widgets.tables import TABLE

if TYPE_CHECKING:
    from workbench.widgets.risk.forecast import Forecast

#: Features with a bar of their own.
_N_BARS = 8
_NAME = "text-align:right;font-weight:400;padding:2px 8px 2px 0;width:52%;line-height:1.25"
_HALF = "display:inline-block;width:50%;vertical-align:middle;box-sizing:border-box"


def driver_bars(forecast: Forecast) -> str:
    """The largest contributions to the log-odds; nothing where the figures are withheld."""
    head = f'<div style="{HEAD}">What drives the risk</div>'
    if forecast.starts_diverged or not forecast.is_shown:
        reason = (
            "The fresh model counts as diverged: nothing else matters." if forecast.starts_diverged else "Withheld."
        )
        return f'{head}<div style="{MUTED}">{reason}</div>'
    bars = Bars.of(forecast.drivers, n=_N_BARS)
    values = bars.values[0]
    reach = np.abs(values).max() or 1.0
    rows = "".join(_row(name, value, value / reach) for name, value in zip(bars.features, values, strict=True))
    note = html.escape("; ".join(bars.note(0)))
    explained = "Log-odds against the mean recorded run: + raises the risk, − lowers it; 0.7 doubles the odds"
    return (
        f'{head}<div style="{MUTED}">{explained}.<br>{note}.</div>'
        f'<table style="{TABLE};font-size:12px;width:100%;margin-top:4px">{rows}</table>'
    )


def _row(name: str, value: float, share: float) -> str:
    color = outcome_looks.DIVERGED if value >= 0 else outcome_looks.SURVIVED
    bar = f'<span style="display:block;height:11px;background:{color};width:{100 * abs(share):.1f}%'
    left = f'{bar};margin-left:auto"></span>' if value < 0 else ""
    right = f'{bar}"></span>' if value >= 0 else ""
    middle = "border-left:1px solid var(--jp-ui-font-color2,#7a7a7a)"
    return (
        f'<tr><th scope="row" style="{_NAME}">{html.escape(name)}</th>'
        f'<td style="padding:1px 0;white-space:nowrap" aria-hidden="true"><span style="{_HALF}">{left}</span>'
        f'<span style="{_HALF};{middle};min-height:13px">{right}</span></td>'
        f'<td style="text-align:right;padding:1px 0 1px 8px;width:44px">{value:+.2f}</td></tr>'
    )
