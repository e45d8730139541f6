"""The events of a run, as stored in its part ``events``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened at a step; the columns are those of ``schema.EVENTS``.

    Attributes:
        step: Updates before it.
        kind: Kind of event: ``"fault"``, ``"alarm"``, ``"action"``, ``"gap"``, ``"divergence"``, ...
        source: Signal of an alarm, name of a fault.
        score: Value that showed it; for an alarm, in multiples of the threshold. NaN: none.
        message: One sentence for people.
        layer: That it is about; -1: none.
        head: That it is about; -1: none.

    Example:
        >>> import workbench as wb
        >>> event = wb.schema.Event(step=120, kind="alarm", source="effective_rank D2", layer=1, head=2)
        >>> event.place
        'layer 1, head 2'
    """

    step: int
    kind: str
    source: str = ""
    score: float = math.nan
    message: str = ""
    layer: int = -1
    head: int = -1

    @property
    def place(self) -> str:
        """Layer and head in words; empty if there are none."""
        return ", ".join(f"{name} {at}" for name, at in (("layer", self.layer), ("head", self.head)) if at >= 0)

    def as_row(self) -> dict[str, Any]:
        """Every column but the step."""
        row = asdict(self)
        del row["step"]
        return row
