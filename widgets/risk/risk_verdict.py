"""The prediction of the risk model as large figures and text; HTML in JupyterLab's colours."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from workbench.formatting import fixed, percent, rounded
from workbench.koopman.measures import summarize
from workbench.schema.statuses import Verdict
from workbench.widgets.risk.forecast import HIGH, LOW

if TYPE_CHECKING:
    import xarray as xr

    from workbench.widgets.risk.forecast import Forecast

LIKELY_TO_DIVERGE = "likely to diverge"
#: Verdict -> sign and colour; dark enough for the white words on them. "likely to diverge" is about the risk alone; the
#: others are those of an assessment.
_LOOKS: dict[str, tuple[str, str]] = {
    Verdict.PROCEED: ("✓", "#0b7a56"),
    Verdict.CANNOT_SAY: ("?", "#5f5f5f"),
    Verdict.AT_RISK: ("!", "#8a6100"),
    LIKELY_TO_DIVERGE: ("✕", "#b8420a"),
}
#: Styles of a heading inside the widget, and of explanations.
HEAD = "font-weight:700;font-size:15px;line-height:1.4;color:var(--jp-ui-font-color1,#222)"
MUTED = "font-size:12px;line-height:1.4;white-space:normal;color:var(--jp-ui-font-color2,#616161)"
_CARD = (
    "box-sizing:border-box;padding:10px 14px;border-radius:6px;"
    "border:1px solid var(--jp-border-color2,#bdbdbd);line-height:1.4;color:var(--jp-ui-font-color1,#222)"
)
_BIG = "font-size:30px;line-height:1.25;font-weight:600;font-variant-numeric:tabular-nums"


def verdict_of(probability: float) -> str:
    """The words for a probability of divergence; NaN: none was given."""
    if np.isnan(probability):
        return Verdict.CANNOT_SAY
    if probability < LOW:
        return Verdict.PROCEED
    return LIKELY_TO_DIVERGE if probability > HIGH else Verdict.AT_RISK


def cards(forecast: Forecast) -> str:
    """The figures of one planned run, side by side."""
    boxes = [_risk(forecast), _edge(forecast), _distance(forecast), _mass(forecast.case)]
    grid = "display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr))"
    return (
        f'<div class="workbench-risk" aria-live="polite" style="{grid};margin:6px 2px;white-space:normal">'
        f"{''.join(boxes)}</div>"
    )


def warning(forecast: Forecast) -> str:
    """The banner over a case that is unlike what the model has seen; empty if it is not."""
    if forecast.is_familiar:
        return ""
    is_broken = forecast.starts_diverged
    head = "The fresh model counts as diverged already." if is_broken else "No figure is given."
    sentence = str(forecast.prediction.attrs["warning"]).rsplit(";", 1)[0]
    return (
        '<div role="alert" style="white-space:normal;line-height:1.45;color:var(--jp-ui-font-color1,#222)">'
        f'<div style="font-size:16px;font-weight:700"><span aria-hidden="true">⚠</span> {head}</div>'
        f"{html.escape(sentence)}.</div>"
    )


def _risk(forecast: Forecast) -> str:
    probability, low, high = (float(forecast.prediction[name].values[0]) for name in ("probability", "low", "high"))
    verdict = verdict_of(probability)
    sign, color = _LOOKS[verdict]
    pill = (
        f'<span style="display:inline-block;padding:1px 10px;border-radius:11px;background:{color};color:#fff;'
        f'font-weight:600"><span aria-hidden="true">{sign}</span> {verdict}</span>'
    )
    interval = "withheld: unlike anything recorded"
    if np.isfinite([low, high]).all():
        ends = " to ".join(dict.fromkeys((percent(low), percent(high))))
        interval = f"{percent(forecast.prediction.attrs['level'])} interval {ends}"
    elif np.isfinite(probability):
        interval = "no interval: the model has no bootstrap"
    notes = [interval, str(forecast.prediction.attrs.get("note", "")), _beyond(forecast)]
    return _card("probability of divergence", percent(probability), [pill, *map(html.escape, filter(None, notes))])


def _beyond(forecast: Forecast) -> str:
    """A note if the planned run is longer than the recorded ones; else empty."""
    fewest, most = forecast.recorded_steps
    if int(forecast.case["n_steps"].values[0]) <= most:
        return ""
    return f"recorded runs had {f'{fewest} to ' if fewest < most else ''}{most} steps: nothing is known of later ones"


def _edge(forecast: Forecast) -> str:
    names = ("largest_stable_rate", "low", "high", "expected_stable_rate", "expected_low", "expected_high")
    rate, low, high, expected, *around = (float(forecast.stable[name].values[0]) for name in names)
    lines = []
    if np.isfinite([low, high]).all():
        lines.append(f"{percent(forecast.stable.attrs['level'])} interval {rounded(low)} to {rounded(high)}")
    if np.isfinite(rate):
        lines.append(f"the planned rate is {rounded(forecast.rate / rate)} times that")
    if np.isfinite(expected):
        spread = f"{percent(forecast.stable.attrs['level'])}: {' to '.join(map(rounded, around))}"
        lines.append(f"half of such models are stable up to {rounded(expected)} ({spread})")
    if not lines:
        reason = str(forecast.stable.attrs.get("warning", "")) if forecast.is_familiar else "withheld"
        lines.append(html.escape(reason))
    return _card(f"largest rate under {percent(LOW)} risk", rounded(rate), lines)


def _distance(forecast: Forecast) -> str:
    distance = float(forecast.prediction["distance"].values[0])
    words = "familiar" if distance <= 1 else "not familiar"
    feature = html.escape(long_name(str(forecast.prediction["farthest_feature"].values[0])))
    return _card(
        "distance to recorded runs",
        fixed(distance, 2),
        [f"<b>{words}</b>; 1 is the edge", f"farthest in: {feature}"],
    )


def _mass(case: xr.Dataset) -> str:
    mass = float(summarize(case[["near_unit_mass"]].isel(run=0))["near_unit_mass"].sel(statistic="mean"))
    blind = "Taken from the fresh weights alone: it cannot see rate, warm-up, steps, clipping or optimizer."
    return _card("the paper's score M", fixed(mass, 2), ["above .5: high risk, says the paper", blind])


def _card(head: str, figure: str, lines: list[str]) -> str:
    rest = "".join(f'<div style="{MUTED}">{line}</div>' for line in lines)
    figure = f'<div style="{_BIG}">{html.escape(figure)}</div>'
    return f'<div style="{_CARD}"><div style="font-size:12px">{head}</div>{figure}{rest}</div>'


def long_name(feature: str) -> str:
    """The title of a feature."""
    from workbench.risk.features import FEATURES

    return FEATURES[feature].long_name if feature in FEATURES else feature.replace("_", " ")
