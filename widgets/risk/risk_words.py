"""The risk of a planned training in large figures and sentences; HTML in JupyterLab's colours."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from workbench.formatting import fixed, percent, rounded
from workbench.koopman.measures import summarize

if TYPE_CHECKING:
    import xarray as xr

    from workbench.rates.find_rate import FoundRates
    from workbench.risk.risk import Risk

#: Styles of explanations and of a card.
MUTED = "font-size:12px;line-height:1.4;white-space:normal;color:var(--jp-ui-font-color2,#616161)"
_CARD = (
    "box-sizing:border-box;padding:10px 14px;border-radius:6px;border:1px solid var(--jp-border-color2,#bdbdbd);"
    "line-height:1.4;color:var(--jp-ui-font-color1,#222)"
)
_BIG = "font-size:28px;line-height:1.25;font-weight:600;font-variant-numeric:tabular-nums"


def cards(risk: Risk, case: xr.Dataset, pilot: FoundRates | None) -> str:
    """The figures of one planned training, side by side."""
    source = "after the pilot" if pilot is not None else "before any training, from the settings and a forward pass"
    within = f"within {risk.n_steps:,} updates at width {risk.d_model}"
    failure = [f"{within}; {source}", _parts(risk)]
    if risk.failure.low == risk.failure.low:  # it has an interval
        failure.insert(0, f"80 % interval {percent(risk.failure.low)} to {percent(risk.failure.high)}")
    edge = risk.useful_edge
    rates = [
        f"80 % interval {rounded(edge.low)} to {rounded(edge.high)}",
        f"smallest useful rate {rounded(risk.slow_edge.value)} ({rounded(risk.slow_edge.low)} to "
        f"{rounded(risk.slow_edge.high)})",
    ]
    if pilot is not None:
        rates.append(f"best rate {rounded(pilot.best_rate.value)}")
    mass = float(summarize(case[["near_unit_mass"]].isel(run=0))["near_unit_mass"].sel(statistic="mean"))
    boxes = [
        _card("risk of not learning well", percent(risk.failure.value), failure),
        _card("largest useful rate", rounded(edge.value), rates),
        _card("risk of an explosion", percent(risk.explosion.value), ["loss above 50 or gradient norm above 500"]),
        _card("RKSP's score M", fixed(mass, 2), ["of the fresh weights: the same at every learning rate"]),
    ]
    grid = "display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));margin:6px 2px"
    return f'<div class="workbench-risk" aria-live="polite" style="{grid}">{"".join(boxes)}</div>'


def warning(risk: Risk, pilot: FoundRates | None) -> str:
    """The banner over a plan whose risk is not known, perhaps not even after a pilot; empty if it is."""
    if not risk.reason:
        return ""
    return (
        '<div role="alert" style="white-space:normal;line-height:1.45;color:var(--jp-ui-font-color1,#222)">'
        '<div style="font-size:16px;font-weight:700"><span aria-hidden="true">⚠</span> The risk is unknown.</div>'
        f"{html.escape(risk.reason)}{'' if pilot else ' Run a pilot to find out.'}</div>"
    )


def _parts(risk: Risk) -> str:
    return f"rate too small {percent(risk.too_small.value)}, too large {percent(risk.too_large.value)}"


def _card(head: str, figure: str, lines: list[str]) -> str:
    rest = "".join(f'<div style="{MUTED}">{html.escape(line)}</div>' for line in lines)
    figure = f'<div style="{_BIG}">{html.escape(figure)}</div>'
    return f'<div style="{_CARD}"><div style="font-size:12px">{html.escape(head)}</div>{figure}{rest}</div>'
