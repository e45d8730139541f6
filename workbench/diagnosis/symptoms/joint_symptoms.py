"""Symptoms that combine several others, where a sum of separate evidence would not be enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from workbench.diagnosis.symptoms.symptom import Symptom, in_steps

#: Any one of these is enough to suspect a block, or the router, with the quantity that each measures.
_OF_BLOCKS = {
    "block_blows_up": "how far it stretches its strongest mode",
    "odd_weights": "the size of its weights",
    "stream_jumps_at_a_block": "how it changes the size of the stream",
    "block_forgets": "how little of the stream it keeps",
}
_OF_ROUTERS = {
    "experts_die": "how many experts get no tokens",
    "auxiliary_loss_is_gone": "how small the auxiliary loss is",
    "auxiliary_loss_rules": "how large the auxiliary loss is",
    "router_is_sure_at_once": "how sure the router is from the start",
}
#: Smallest strength of the strongest of them at which the sentence calls it unusual.
_UNUSUAL = 0.3


def joint_symptoms(symptoms: Mapping[str, Symptom]) -> Iterator[Symptom]:
    """Combine the symptoms read so far; missing ones are ignored."""
    if (top := _strongest(symptoms, _OF_BLOCKS)) is not None:
        which = f"Block {top.layer}" if top.layer >= 0 else "A block"
        said = (
            f"{which} stands out from the others, most of all" if _is_unusual(top) else "No block stands out, not even"
        )
        yield _of_several("a_block_stands_out", top, f"{said} by {_OF_BLOCKS[top.name]}.")
    if (top := _strongest(symptoms, _OF_ROUTERS)) is not None:
        if "has_routers" in symptoms and symptoms["has_routers"].strength == 0:
            sentence = "Nothing is routed, so that no routing can be off."
        else:
            said = "unusual, most of all" if _is_unusual(top) else "as usual; what differs most is"
            sentence = f"The routing is {said} {_OF_ROUTERS[top.name]}."
        yield _of_several("routing_is_off", top, sentence)
    yield from _burst(symptoms)


def _strongest(symptoms: Mapping[str, Symptom], names: Iterable[str]) -> Symptom | None:
    return max(
        (symptoms[name] for name in names if name in symptoms), key=lambda symptom: symptom.strength, default=None
    )


def _of_several(name: str, top: Symptom, sentence: str) -> Symptom:
    """A symptom whose value is the strength of its strongest member; the members hold the measured values."""
    value = max(top.strength, 0.0)
    return replace(
        top, name=name, sentence=sentence, value=value, units="1", reference=0.0, path="", variable="", selection={}
    )


def _is_unusual(symptom: Symptom) -> bool:
    return symptom.strength >= _UNUSUAL


def _burst(symptoms: Mapping[str, Symptom]) -> Iterator[Symptom]:
    """A rise of the loss that is recovered, while neither rate nor batch size nor gradients had changed before."""
    if "spike_recovers" not in symptoms or "abrupt" not in symptoms:
        return
    excuses = ("rate_jumps", "updates_leap", "gradients_build_up", "few_rows", "batches_shrink", "loss_noise")
    innocence = math.prod(1 - min(max(symptoms[name].strength, 0.0), 1.0) for name in excuses if name in symptoms)
    strength = min(symptoms["abrupt"].strength, 1.0) * min(symptoms["spike_recovers"].strength, 1.0) * innocence
    yield replace(
        symptoms["spike_recovers"],
        name="rise_out_of_nothing",
        strength=strength,
        sentence=f"The loss rose within {in_steps(max(int(symptoms['abrupt'].value), 1))} and "
        f"{100 * symptoms['spike_recovers'].value:.0f} % of it was recovered, "
        + (
            "while rate, batch size and gradients before it were unchanged."
            if innocence > 0.5
            else "but rate, batch size or gradients had changed before."
        ),
    )
