"""Evidence: one function a group of signs, each sign a number of the run, how strongly it speaks, and a sentence."""

from __future__ import annotations

from collections.abc import Collection

from workbench.diagnosis.failed_run import Record
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.attention_symptoms import attention_signs
from workbench.diagnosis.symptoms.block_symptoms import block_signs
from workbench.diagnosis.symptoms.curve_symptoms import curve_signs
from workbench.diagnosis.symptoms.joint_symptoms import joint_signs
from workbench.diagnosis.symptoms.routing_symptoms import routing_signs
from workbench.diagnosis.symptoms.setting_symptoms import setting_signs
from workbench.diagnosis.symptoms.symptom import Sign
from workbench.diagnosis.symptoms.update_symptoms import update_signs
from workbench.schema.statuses import SymptomKind

__all__ = ["Sign", "read_signs"]

_GROUPS = (curve_signs, update_signs, block_signs, attention_signs, routing_signs, setting_signs)


def read_signs(
    record: Record, failure: Failure, *, kinds: Collection[SymptomKind] = tuple(SymptomKind)
) -> dict[str, Sign]:
    """Every sign that the run allows, by name.

    Args:
        record: Of the run.
        failure: Of it.
        kinds: What may be looked at.
    """
    found = (sign for group in _GROUPS for sign in group(record, failure))
    alone = {sign.name: sign for sign in found if sign.kind in kinds}
    # Made of what may be read, so that nothing else comes in through them.
    return alone | {sign.name: sign for sign in joint_signs(alone)}


def __dir__() -> list[str]:
    return sorted(__all__)
