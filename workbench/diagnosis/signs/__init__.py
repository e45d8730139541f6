"""Evidence: one function a group of signs, each sign a number of the run, how strongly it speaks, and a sentence."""

from __future__ import annotations

from collections.abc import Collection

from workbench.diagnosis.failure import Failure
from workbench.diagnosis.record import Record
from workbench.diagnosis.signs.attention import attention_signs
from workbench.diagnosis.signs.blocks import block_signs
from workbench.diagnosis.signs.curve import curve_signs
from workbench.diagnosis.signs.routing import routing_signs
from workbench.diagnosis.signs.settings import setting_signs
from workbench.diagnosis.signs.sign import KINDS, Sign
from workbench.diagnosis.signs.together import joint_signs
from workbench.diagnosis.signs.updates import update_signs

__all__ = ["KINDS", "Sign", "read_signs"]

_GROUPS = (curve_signs, update_signs, block_signs, attention_signs, routing_signs, setting_signs)


def read_signs(record: Record, failure: Failure, *, kinds: Collection[str] = KINDS) -> dict[str, Sign]:
    """Every sign that the run allows, by name.

    Args:
        record: Of the run.
        failure: Of it.
        kinds: Some of `KINDS`: what may be looked at.
    """
    found = (sign for group in _GROUPS for sign in group(record, failure))
    alone = {sign.name: sign for sign in found if sign.kind in kinds}
    # Made of what may be read, so that nothing else comes in through them.
    return alone | {sign.name: sign for sign in joint_signs(alone)}
