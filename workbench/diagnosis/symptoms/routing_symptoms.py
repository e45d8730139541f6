"""Symptoms of the routing in a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.formatting import counted
from workbench.schema.statuses import SymptomKind

#: Number of last measurements whose loads are used to infer the number of choices of the probe, the minimum and maximum
#: of that number, and the tolerance for counts to be integers.
_LOADS_READ, _FEWEST_CHOICES, _MOST_CHOICES, _WHOLE = 20, 64, 4097, 1e-3


def routing_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the part ``router`` and of the magnitude of the auxiliary loss."""
    auxiliary = record.monitor("auxiliary_loss")
    if auxiliary is not None:
        loss = record.values("monitors", "loss")
        ratio = float(np.nanmedian(auxiliary) / np.nanmedian(loss))
        n_zero = float(np.mean(auxiliary[np.isfinite(auxiliary)] == 0))
        place: dict[str, Any] = {"path": "/monitors", "variable": "auxiliary_loss", "kind": SymptomKind.LOG}
        yield Symptom(
            "auxiliary_loss_rules",
            ramp(finite_log10(ratio), -0.7, 0.7, high=2) if ratio > 0 else 0.0,
            ratio,
            0.02,
            f"The auxiliary loss is {ratio:.3g} times the loss of the task.",
            **place,
        )
        is_gone = n_zero > 0.1 or ratio < 0
        yield Symptom(
            "auxiliary_loss_is_gone",
            1.0 if is_gone else 0.0,
            ratio if ratio < 0 else n_zero,
            0.0,
            "The auxiliary loss is negative, which rewards imbalance."
            if ratio < 0
            else f"The auxiliary loss was zero in {100 * n_zero:.0f} % of the steps.",
            **place,
        )
    if "router" not in record.parts:
        if "optimizer" in record.parts or "activations" in record.parts:  # the model was measured and has no router
            yield Symptom("has_routers", 0.0, 0.0, 0.0, "No block routes tokens to experts.", units="block")
            yield Symptom("experts_die", 0.0, 0.0, 0.0, "The model has no experts.")
        return
    steps = record.steps_of("router")
    # Before a spike the state of the router may show the cause; afterwards it may be a consequence.
    before = np.flatnonzero(steps <= failure.step + 1) if not failure.is_stalled else np.arange(len(steps))
    seen = (
        np.flatnonzero(np.isfinite(record.values("router", "dead_experts")).any(axis=1))
        if record.has("router", "dead_experts")
        else before
    )
    before = np.intersect1d(before, seen)
    at = int(before[-1]) if len(before) else int(seen[0]) if len(seen) else 0
    place = {"path": "/router", "step": int(steps[at])}
    yield Symptom(
        "has_routers",
        1.0,
        float(record.parts["router"].sizes["layer"]),
        0.0,
        f"Tokens are routed to experts in {counted(record.parts['router'].sizes['layer'], 'block')}.",
        units="block",
    )
    n_experts = record.parts["router"].sizes.get("expert", 0)
    if record.has("router", "dead_experts") and n_experts:
        dead = record.values("router", "dead_experts")[at]
        layer, fraction = int(np.nanargmax(dead)), float(np.nanmax(dead) / n_experts)
        by_chance = _unused_by_chance(record, n_experts)
        yield Symptom(
            "experts_die",
            ramp((fraction - by_chance) / (1 - by_chance), 0.1, 0.5, low=0, high=2),
            fraction,
            0.0,
            f"At step {steps[at]}, {100 * fraction:.0f} % of the experts of block {layer} receive no tokens.",
            layer=_layer_of(record, layer) if fraction > 0.1 else -1,
            variable="dead_experts",
            **place,
        )
    if record.has("router", "max_violation") and n_experts > 1:
        violation = float(np.nanmax(record.values("router", "max_violation")[at]))
        yield Symptom(
            "load_is_uneven",
            ramp(violation / (n_experts - 1), 0.4, 1.0),
            violation,
            0.5,
            f"At step {steps[at]} MaxVio, the relative excess load of the most loaded expert, is {violation:.3g}.",
            variable="max_violation",
            **place,
        )
    if record.has("router", "routing_entropy_share"):
        entropy = record.values("router", "routing_entropy_share")
        first, now = float(np.nanmin(entropy[0])), float(np.nanmin(entropy[at]))
        yield Symptom(
            "router_is_sure_at_once",
            ramp(first, 0.8, 0.2, high=1.3),
            first,
            0.95,
            f"At step {steps[0]} the smallest routing entropy of a block is {100 * first:.0f} % of its maximum.",
            variable="routing_entropy_share",
            path="/router",
            step=int(steps[0]),
        )
        yield Symptom(
            "router_is_sure",
            ramp(now, 0.6, 0.1),
            now,
            0.7,
            f"At step {steps[at]} the smallest routing entropy of a block is {100 * now:.0f} % of its maximum.",
            variable="routing_entropy_share",
            **place,
        )
    if record.has("router", "router_similarity"):
        alike = float(np.nanmax(record.values("router", "router_similarity")[at]))
        yield Symptom(
            "router_rows_are_alike",
            ramp(alike, 0.3, 0.9),
            alike,
            0.0,
            f"At step {steps[at]} the router rows of two experts have a mean cosine of up to {alike:.2f}.",
            variable="router_similarity",
            **place,
        )
    if record.has("router", "routing_change"):
        change = (
            float(np.nanmedian(record.values("router", "routing_change")[max(1, at - 5) : at + 1])) if at else math.nan
        )
        if math.isfinite(change):
            yield Symptom(
                "routing_keeps_changing",
                ramp(change, 0.15, 0.6),
                change,
                0.1,
                f"Up to step {steps[at]}, {100 * change:.0f} % of the tokens changed their expert between two "
                "measurements.",
                variable="routing_change",
                **place,
            )


def _layer_of(record: Record, place: int) -> int:
    part = record.parts["router"]
    return int(part["layer"].values[place]) if "layer" in part.coords else place


def _unused_by_chance(record: Record, n_experts: int) -> float:
    """Return the expected fraction of experts without a probe token under uniform routing.

    It is not negligible because the probe has few tokens. The number of choices is inferred from the loads: the
    smallest plausible number n for which all loads are integer multiples of 1 / n.
    """
    if not record.has("router", "expert_load"):
        return 0.0
    loads = record.values("router", "expert_load")[-_LOADS_READ:]
    loads = np.unique(loads[np.isfinite(loads) & (loads > 0)])
    for n_choices in range(_FEWEST_CHOICES, _MOST_CHOICES):
        counts = n_choices * loads
        if np.abs(counts - counts.round()).max(initial=0) < _WHOLE:
            return float((1 - 1 / n_experts) ** n_choices) if len(loads) else 0.0
    return 0.0
