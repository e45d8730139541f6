"""Symptoms of a failed run: each a number, its strength as evidence, and a sentence; one function for each group."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from workbench.diagnosis.failed_run import Record
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.attention_symptoms import attention_symptoms
from workbench.diagnosis.symptoms.block_symptoms import block_symptoms
from workbench.diagnosis.symptoms.curvature_symptoms import curvature_symptoms
from workbench.diagnosis.symptoms.curve_symptoms import curve_symptoms
from workbench.diagnosis.symptoms.joint_symptoms import joint_symptoms
from workbench.diagnosis.symptoms.routing_symptoms import routing_symptoms
from workbench.diagnosis.symptoms.setting_symptoms import setting_symptoms
from workbench.diagnosis.symptoms.symptom import Symptom
from workbench.diagnosis.symptoms.update_symptoms import update_symptoms
from workbench.schema.statuses import SymptomKind

__all__ = ["Symptom", "read_symptoms"]

_GROUPS = (
    curve_symptoms, update_symptoms, curvature_symptoms, block_symptoms, attention_symptoms, routing_symptoms,
    setting_symptoms,
)  # fmt: skip


def read_symptoms(
    record: Record, failure: Failure, *, kinds: Collection[str] = tuple(SymptomKind)
) -> dict[str, Symptom]:
    """Return every symptom that can be read from the record, by name.

    Args:
        record: Record of the run.
        failure: Failure of the run.
        kinds: Kinds of symptoms to read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # blocks without a part, such as attention, are NaN throughout
        found = [symptom for group in _GROUPS for symptom in group(record, failure)]
    alone = {symptom.name: symptom for symptom in found if symptom.kind in kinds}
    # Joint symptoms combine only the symptoms of the requested kinds, so that they use no other data.
    return alone | {symptom.name: symptom for symptom in joint_symptoms(alone)}


def __dir__() -> list[str]:
    return sorted(__all__)
