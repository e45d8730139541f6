"""Symptoms of attention, where faults of low-precision arithmetic appear first (arXiv:2606.28116)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.formatting import short


def attention_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the part ``attention`` before the failure; at the end of a stalled run."""
    if "attention" not in record.parts:
        return
    steps = record.steps_of("attention")
    at = failure.last_row(steps)
    place: dict[str, Any] = {"path": "/attention", "step": int(steps[at])}
    if record.has("attention", "attention_logit_max"):
        logits = np.abs(record.values("attention", "attention_logit_max"))
        level = float(np.nanmax(logits[at])) if np.isfinite(logits[at]).any() else math.nan
        if math.isfinite(level):
            layer = int(np.nanargmax(np.nanmax(logits[at], axis=-1)))
            yield Symptom(
                "attention_logits",
                ramp(finite_log10(level), 1.0, 2.3, low=-0.5, high=2),
                level,
                10.0,
                f"At step {steps[at]} the largest attention logit is {level:.3g}, in block {layer}.",
                variable="attention_logit_max",
                selection={"layer": layer},
                **place,
            )
    if record.has("attention", "attention_entropy_share"):
        fractions = record.values("attention", "attention_entropy_share")[at]
        fraction = float(np.nanmin(np.nanmean(fractions, axis=-1)))
        if record.has("attention", "attention_logit_max"):
            level = float(np.nanmax(np.abs(record.values("attention", "attention_logit_max")[at])))
            mean = float(np.nanmean(fractions))
            yield Symptom(
                "logits_without_focus",
                ramp(finite_log10(level), 1.2, 2.2) * ramp(mean, 0.35, 0.65, high=1),
                level,
                10.0,
                f"At step {steps[at]} the largest attention logit is {level:.3g}, although the attention entropy is "
                f"still {100 * mean:.0f} % of its maximum.",
                variable="attention_logit_max",
                **place,
            )
        yield Symptom(
            "attention_narrows",
            ramp(fraction, 0.5, 0.05),
            fraction,
            0.5,
            f"At step {steps[at]} the attention entropy of the most focused block is {100 * fraction:.0f} % of its "
            "maximum.",
            variable="attention_entropy_share",
            **place,
        )
    yield from _of_update_spectra(record, at)


def _of_update_spectra(record: Record, at: int) -> Iterator[Symptom]:
    part = record.parts["attention"]
    if not record.has("attention", "effective_rank") or "term" not in part.coords:
        return
    terms = [str(term) for term in part["term"].values]
    steps = record.steps_of("attention")
    place: dict[str, Any] = {"path": "/attention", "step": int(steps[at])}
    if "D2" in terms:
        rank = record.values("attention", "effective_rank")[..., terms.index("D2")]
        now = rank[at].reshape(-1)
        if np.isfinite(now).any():
            found = float(np.nanmedian(now))
            yield Symptom(
                "updates_of_one_direction",
                ramp(found, 4.0, 1.3, low=-0.5),
                found,
                4.0,
                f"At step {steps[at]} the updates of queries and keys have a median effective rank of {found:.2f} "
                "over the heads.",
                variable="effective_rank",
                selection={"term": "D2"},
                **place,
            )
    if {"D2", "W"} <= set(terms) and record.has("attention", "frobenius_norm"):
        norms = record.values("attention", "frobenius_norm")
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = norms[at][..., terms.index("D2")] / norms[at][..., terms.index("W")]
        if np.isfinite(ratio).any():
            found = float(np.nanmax(ratio))
            yield Symptom(
                "queries_and_keys_move",
                ramp(finite_log10(found), -0.3, 0.5, low=-0.5),
                found,
                0.5,
                f"Within the window up to step {steps[at]}, the product of query and key weights of one head changed "
                f"by {found:.3g} times its norm.",
                variable="frobenius_norm",
                selection={"term": "D2"},
                **place,
            )
        size = norms[..., terms.index("W")].reshape(len(steps), -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.nanmax(size[at]) / np.nanmedian(size[0]) if np.isfinite(size[at]).any() else math.nan
        yield from _of_query_updates(record, terms, at)
        other = _weight_growth(record, int(steps[0]), int(steps[at]))
        if math.isfinite(growth) and growth > 0 and math.isfinite(other):
            excess = finite_log10(float(growth)) - 2 * finite_log10(other)  # a product of two matrices
            yield Symptom(
                "attention_outgrows_the_rest",
                ramp(excess, 0.3, 1.3, low=-0.5, high=2),
                10**excess,
                1.0,
                f"By step {steps[at]} the query and key weights have grown {short(10**excess)} times as much as the "
                "other weights.",
                variable="frobenius_norm",
                selection={"term": "W"},
                **place,
            )


def _of_query_updates(record: Record, terms: list[str], at: int) -> Iterator[Symptom]:
    """Yield whether the query updates spread over more directions during training, which rounding causes."""
    if "dWq" not in terms or not at:
        return
    rank = np.nanmedian(record.values("attention", "effective_rank")[..., terms.index("dWq")], axis=(1, 2))
    late = float(np.nanmedian(rank[max(1, at - 2) : at + 1]) / rank[0]) if rank[0] > 0 else math.nan
    if math.isfinite(late):
        step = int(record.steps_of("attention")[at])
        yield Symptom(
            "updates_scatter",
            ramp(late, 0.85, 1.25, low=-0.5),
            late,
            0.6,
            f"At step {step} the effective rank of the query updates is {late:.2g} times that at the start.",
            path="/attention",
            variable="effective_rank",
            step=step,
            selection={"term": "dWq"},
        )


def _weight_growth(record: Record, first: int, last: int) -> float:
    """Return the growth of the weights between two steps, median over the modules; NaN if it was not recorded."""
    if not record.has("optimizer", "module_weight_norm"):
        return math.nan
    steps = record.steps_of("optimizer")
    norm = np.nanmedian(record.values("optimizer", "module_weight_norm"), axis=1)
    return float(np.interp(last, steps, norm) / np.interp(first, steps, norm))
