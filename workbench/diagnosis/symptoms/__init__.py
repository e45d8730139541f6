"""Symptoms of a failed run: each a number, its strength as evidence, and a sentence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from workbench.diagnosis.failed_run import Failure, Record
from workbench.diagnosis.symptoms.run_symptoms import Symptom, in_steps, model_symptoms, training_symptoms
from workbench.schema.statuses import SymptomKind

__all__ = ["Symptom", "read_symptoms"]

#: Symptoms of which any one suffices to suspect a block, or the router, with the quantity that each measures.
_OF_BLOCKS = {
    "block_blows_up": "the amplification of its largest mode",
    "odd_weights": "the norm of its weights",
    "stream_jumps_at_a_block": "its change of the norm of the residual stream",
    "block_forgets": "the attenuation of all its modes",
}
_OF_ROUTERS = {
    "experts_die": "the number of experts without tokens",
    "auxiliary_loss_is_gone": "the low auxiliary loss",
    "auxiliary_loss_rules": "the high auxiliary loss",
    "router_is_sure_at_once": "the low routing entropy at the start",
}
#: Smallest strength of the strongest symptom at which the sentence calls it unusual.
_UNUSUAL = 0.3


def read_symptoms(
    record: Record, failure: Failure, *, kinds: Collection[str] = tuple(SymptomKind)
) -> dict[str, Symptom]:
    """Return every symptom of some kinds that can be read from the record, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # blocks without a part, such as attention, are NaN throughout
        found = [*training_symptoms(record, failure), *model_symptoms(record, failure)]
    alone = {symptom.name: symptom for symptom in found if symptom.kind in kinds}
    # Joint symptoms combine only the symptoms of the requested kinds, so that they use no other data.
    return alone | {symptom.name: symptom for symptom in _joint_symptoms(alone)}


def _joint_symptoms(symptoms: Mapping[str, Symptom]) -> Iterator[Symptom]:
    """Yield symptoms that combine the given ones; missing symptoms are ignored."""
    if (top := _strongest(symptoms, _OF_BLOCKS)) is not None:
        which = f"Block {top.layer}" if top.layer >= 0 else "A block"
        words = (
            f"{which} differs from the others, most clearly in"
            if _is_unusual(top)
            else "No block is unusual; the largest difference is in"
        )
        yield _of_several("a_block_stands_out", top, f"{words} {_OF_BLOCKS[top.name]}.")
    if (top := _strongest(symptoms, _OF_ROUTERS)) is not None:
        if "has_routers" in symptoms and symptoms["has_routers"].strength == 0:
            sentence = "No block routes tokens, so routing cannot be the cause."
        else:
            words = "unusual, most clearly in" if _is_unusual(top) else "not unusual; the largest deviation is in"
            sentence = f"The routing is {words} {_OF_ROUTERS[top.name]}."
        yield _of_several("routing_is_off", top, sentence)
    yield from _burst(symptoms)


def _strongest(symptoms: Mapping[str, Symptom], names: Iterable[str]) -> Symptom | None:
    return max(
        (symptoms[name] for name in names if name in symptoms), key=lambda symptom: symptom.strength, default=None
    )


def _of_several(name: str, top: Symptom, sentence: str) -> Symptom:
    """Return a symptom whose value is the strength of its strongest member; the members hold the measured values."""
    value = max(top.strength, 0.0)
    return replace(
        top, name=name, sentence=sentence, value=value, units="1", reference=0.0, path="", variable="", selection={}
    )


def _is_unusual(symptom: Symptom) -> bool:
    return symptom.strength >= _UNUSUAL


def _burst(symptoms: Mapping[str, Symptom]) -> Iterator[Symptom]:
    """Yield the symptom of a rise of the loss that recovered, without an earlier change of settings or gradients."""
    if "spike_recovers" not in symptoms or "abrupt" not in symptoms:
        return
    explanations = ("rate_jumps", "updates_leap", "gradients_build_up", "few_rows", "batches_shrink", "loss_noise")
    unexplained = math.prod(
        1 - min(max(symptoms[name].strength, 0.0), 1.0) for name in explanations if name in symptoms
    )
    strength = min(symptoms["abrupt"].strength, 1.0) * min(symptoms["spike_recovers"].strength, 1.0) * unexplained
    yield replace(
        symptoms["spike_recovers"],
        name="rise_out_of_nothing",
        strength=strength,
        sentence=f"The loss rose within {in_steps(max(int(symptoms['abrupt'].value), 1))} and recovered from "
        f"{100 * symptoms['spike_recovers'].value:.0f} % of the rise; learning rate, batch size "
        + ("and gradients had not changed before." if unexplained > 0.5 else "or gradients had changed before."),
    )


def __dir__() -> list[str]:
    return sorted(__all__)
