"""Criteria of the plan: risk and trial updates, scale, initialization, number formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, number, worst_of

if TYPE_CHECKING:
    import xarray as xr

#: A risk of not learning well above the first is at risk, above the second failing.
RISK_LIMIT, RISK_FAILING = 0.5, 0.8
#: A larger risk does not let a plan proceed.
RISK_OPEN = 0.2
#: The criteria that decide a verdict on the plan.
RISK, BROKEN_TRIALS = "failure_probability", "trials_broken"
#: A larger share means every trial.
ALL_BROKEN = 0.999
#: Half width of an 80 % interval, that of a predicted probability, in standard errors.
_Z80 = 1.2816
_START = "initialization_out_of_band"


def _risk(tree: xr.DataTree) -> CriterionReading | str:
    if "/risk" not in tree.groups:
        return "the risk was not measured"
    risk = tree["/risk"].to_dataset()
    if np.isnan(float(risk["failure"][0])):
        warning = str(risk.attrs.get("warning", "")).rstrip(".") or "nothing comparable was measured"
        return warning[:1].lower() + warning[1:]
    risk = risk.isel(run=0)
    low, high = float(risk["failure_low"]), float(risk["failure_high"])
    spread = (high - low) / (2 * _Z80) if math.isfinite(high - low) else 0.0
    return CriterionReading(float(risk["failure"]), spread, {"run": 0})


def _broken_trials(tree: xr.DataTree) -> CriterionReading | str:
    if "/rehearsal" not in tree.groups:
        return "the plan was not tried out"
    return number(tree["/rehearsal"].to_dataset(), "share_broken")


def _of_start(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    return lambda tree: number(tree["/initialization"].to_dataset(), name)


def _of_spectra(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    return lambda tree: worst_of(tree["/spectra"].to_dataset(), name, largest=True)


def _of_pilot_run(name: str, *, largest: bool) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        if "/rehearsal" not in tree.groups:
            return "the plan was not tried out"
        return worst_of(tree["/rehearsal"].to_dataset(), name, largest=largest)

    return read


def _rate_against_edge(tree: xr.DataTree) -> CriterionReading | str:
    if "/scaling" not in tree.groups:
        return "the subject was not built at other sizes"
    data = tree["/scaling"].to_dataset()
    if "rate_over_edge" not in data or not np.isfinite(float(data["rate_over_edge"])):
        return str(data.attrs.get("unsupported", "")) or "the ladder does not support a claim about the explosion edge"
    return CriterionReading(float(data["rate_over_edge"]), float(data["rate_over_edge_error"]))


PLAN = (
    Criterion(
        RISK, "unsuitable_rate", "probability of not learning well under the plan", "1", "/risk", "failure", _risk,
        "the planned rate is probably too small or too large to learn well",
        HealthyBand(
            high=RISK_LIMIT, failing_high=RISK_FAILING,
            why="half of the plans at this limit do not learn well; above a fifth a plan does not proceed, but its "
            "useful rates are to be found",
        ),
    ),
    # Measured on the plan itself, not predicted. Diverged trials are evidence against a plan; trials of the first
    # updates without divergence do not exclude one after thousands, so they acquit no plan.
    Criterion(
        BROKEN_TRIALS, "unsuitable_rate", "share of trials of the plan that broke", "1", "/rehearsal", "share_broken",
        _broken_trials, "trials of the first updates broke",
        HealthyBand(high=0.0, failing_high=ALL_BROKEN, why="no trial of a sound plan breaks, some of a bad one may"),
        acquits=False,
    ),
    Criterion(
        "rate_over_edge", "scale_dependent_divergence", "planned rate over the explosion edge at the target size", "1",
        "/scaling", "rate_over_edge", _rate_against_edge, "a rate that does not break small sizes breaks the target",
        HealthyBand(high=1.0, failing_high=2.0, why="above 1 the planned rate is beyond the edge, known to a factor 2"),
        scale="log",
    ),
    Criterion(
        "attention_entropy_share_rehearsed", "attention_degeneracy", "smallest attention entropy share on trial", "1",
        "/rehearsal", "attention_entropy_share_min", _of_pilot_run("attention_entropy_share_min", largest=False),
        "a head collapses onto one token within the first updates", scale="share", bad_side="low",
    ),
    Criterion(
        "attention_logit_rehearsed", "attention_degeneracy", "largest attention logit on trial", "1", "/rehearsal",
        "attention_logit_max", _of_pilot_run("attention_logit_max", largest=True),
        "attention logits run away within the first updates", scale="log", bad_side="high",
    ),
    Criterion(
        "routing_change_rehearsed", "routing_oscillation", "largest routing change on trial", "1", "/rehearsal",
        "routing_change", _of_pilot_run("routing_change", largest=True),
        "tokens keep changing experts from measurement to measurement", scale="share", bad_side="high",
    ),
    Criterion(
        "max_violation_rehearsed", "routing_oscillation", "largest MaxVio on trial", "1", "/rehearsal",
        "max_violation", _of_pilot_run("max_violation", largest=True), "one expert takes most of the tokens",
        bad_side="high",
    ),
    *(
        Criterion(
            name, _START, title, "1", "/initialization", name, _of_start(name), meaning, scale="log", bad_side=bad_side
        )
        for name, title, meaning, bad_side in (
            ("loss_over_guess", "initial loss over that of a guess", "the fresh model is worse than a guess", "high"),
            ("logit_std", "spread of the output logits", "the fresh model is sure of what it cannot know", "high"),
            ("stream_rms_last", "size of the stream after the last block", "the stream starts out of scale", "both"),
            ("initial_grad_norm", "initial gradient norm", "the first gradient is out of scale", "both"),
        )
    ),
    *(
        Criterion(name, _START, title, "1", "/spectra", name, _of_spectra(name), meaning, scale="log", bad_side="high")
        for name, title, meaning in (
            ("spectral_radius", "largest spectral radius", "a block stretches some direction unlike any healthy one"),
            ("energy_gain", "largest energy gain of a block", "a block adds energy unlike any healthy one"),
        )
    ),
)  # fmt: skip
