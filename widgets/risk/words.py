"""The risk of a planned training as sentences, cards with metrics, and a page; HTML in JupyterLab's colors."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr

from workbench.formatting import DASH, fixed, percent, rounded
from workbench.koopman.measures import summarize
from workbench.rates.find_rate import FoundRates
from workbench.risk.risk import Risk
from workbench.schema.statuses import CriterionState
from workbench.widgets.tables import figure_page, headline

#: Probability of not learning well from which a training may fail, and from which it is likely to fail.
_MAY_FAIL, _LIKELY_FAILS = 0.4, 0.75
#: Probability of an explosion from which the result mentions it.
_MAY_EXPLODE = 0.5
#: Rates whose probability exceeds the smallest one by at most this value count as equally safe.
_AS_SAFE = 0.01
#: Rates count as equal if the logarithm of their ratio is smaller than this.
_SAME = 0.2
CSS = Path(__file__).with_name("risk.css").read_text(encoding="utf-8")


class RiskAnswer(NamedTuple):
    """The predicted outcome, and recommendations."""

    state: CriterionState
    sentence: str
    more: str


class Card(NamedTuple):
    """One metric with its name and lines of explanation."""

    name: str
    figure: str
    lines: list[str]


def answer(risk: Risk, curve: xr.Dataset, pilot: FoundRates | None) -> RiskAnswer:
    """Return the predicted outcome of a planned training, with reasons and recommendations."""
    if risk.reason:
        reason = f"{risk.reason}{'' if pilot else ' Run a pilot to find out.'}"
        return RiskAnswer(CriterionState.NOT_MEASURED, "The risk is unknown.", reason)
    failure = risk.failure.value
    if failure < _MAY_FAIL:
        state, words = CriterionState.HEALTHY, "Likely to learn well"
    elif failure < _LIKELY_FAILS:
        state, words = CriterionState.AT_RISK, "May not learn well"
    else:
        state, words = CriterionState.FAILING, "Unlikely to learn well"
    rate = rounded(risk.learning_rate)
    sentence = f"{words} at a learning rate of {rate} (risk: {percent(failure)})."
    more = [_useful(risk, pilot)]
    if state is not CriterionState.HEALTHY:
        more.insert(0, _change(risk, curve, pilot))
    if risk.explosion.value >= _MAY_EXPLODE:
        more.insert(0, f"The risk of an explosion is {percent(risk.explosion.value)}.")
    if pilot is None:
        more.append("A pilot makes this estimate more certain.")
    return RiskAnswer(state, sentence, " ".join(more))


def cards(risk: Risk, case: xr.Dataset, pilot: FoundRates | None) -> list[Card]:
    """Return the metrics of one planned training, with a dash if unknown."""
    mass = float(summarize(case[["near_unit_mass"]].isel(run=0))["near_unit_mass"].sel(statistic="mean"))
    score = Card(
        "near-unit mass M", fixed(mass, 2), ["mean over layers at initialization; independent of the learning rate"]
    )
    names = "risk of not learning well", "largest useful learning rate", "risk of an explosion"
    limits = "loss above 50 or gradient norm above 500"
    if risk.reason:
        explosion = Card(names[2], percent(risk.explosion.value), [limits])
        return [*(Card(name, DASH, ["unknown for this training"]) for name in names[:2]), explosion, score]
    source = "from the pilot" if pilot is not None else "from the settings and a forward pass, before any training"
    failure = [
        f"within {risk.n_steps:,} updates at width {risk.d_model}; {source}",
        f"learning rate too small: {percent(risk.too_small.value)}, too large: {percent(risk.too_large.value)}",
    ]
    ends = [percent(end) for end in (risk.failure.low, risk.failure.high)]
    if ends[0] != ends[1]:
        failure.insert(0, f"80 % interval {ends[0]} to {ends[1]}")
    edge, slow = risk.useful_edge, risk.slow_edge
    rates = [
        f"80 % interval {rounded(edge.low)} to {rounded(edge.high)}",
        f"smallest useful learning rate {rounded(slow.value)} ({rounded(slow.low)} to {rounded(slow.high)})",
    ]
    if pilot is not None:
        rates.append(f"best learning rate {rounded(pilot.best_rate.value)}")
    return [
        Card(names[0], percent(risk.failure.value), failure),
        Card(names[1], rounded(edge.value), rates),
        Card(names[2], percent(risk.explosion.value), [limits]),
        score,
    ]


def as_html(boxes: list[Card]) -> str:
    """Return HTML of the cards side by side."""
    return f'<div class="workbench-risk">{"".join(map(_box, boxes))}</div>'


def _box(card: Card) -> str:
    rest = "".join(f'<div class="line">{html.escape(line)}</div>' for line in card.lines)
    return f'<div>{html.escape(card.name)}<div class="figure">{html.escape(card.figure)}</div>{rest}</div>'


def _useful(risk: Risk, pilot: FoundRates | None) -> str:
    """Return a sentence on the useful learning rates."""
    if risk.slow_edge.value >= risk.useful_edge.value:
        return "No learning rate is predicted to learn well within this number of updates."
    ends = f"{rounded(risk.slow_edge.value)} to {rounded(risk.useful_edge.value)}"
    if pilot is None:
        return f"Learning rates from {ends} are predicted to learn well."
    return f"According to the pilot, learning rates from {ends} learn well."


def _change(risk: Risk, curve: xr.Dataset, pilot: FoundRates | None) -> str:
    """Return a sentence on what is wrong with the learning rate, and which one to choose."""
    failure, rates = curve["failure"].values, curve["learning_rate"].values
    safest = rates[failure <= failure.min() + _AS_SAFE]
    best, least = math.sqrt(float(safest[0] * safest[-1])), float(failure.min())
    if pilot is not None:
        best, least = pilot.best_rate.value, math.nan
    if abs(math.log(best / risk.learning_rate)) < _SAME:
        return "No other learning rate has a smaller risk: plan more updates, or change the model."
    is_large = best < risk.learning_rate
    known = "" if math.isnan(least) else f", where the risk is smallest ({percent(least)})"
    change = f"{'lower' if is_large else 'raise'} it to about {rounded(best)}{known}"
    return f"The learning rate is probably too {'large' if is_large else 'small'}: {change}."


def page(title: str, answer: RiskAnswer, cards: list[Card], curve: Any) -> str:
    """Return an HTML page that needs no network and no other file; the curve is None if the risk is unknown."""
    words = f"<h1>{html.escape(title)}</h1>{headline(answer.state, answer.sentence, [answer.more])}{as_html(cards)}"
    return figure_page(words, curve, style=CSS)
