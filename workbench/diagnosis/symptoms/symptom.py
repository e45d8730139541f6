"""One symptom: a number read from a run, how strongly it speaks, and the sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.formatting import short
from workbench.schema.statuses import SymptomKind


@dataclass(frozen=True)
class Symptom:
    """What one reading of a run found.

    Attributes:
        name: Its id, also the name of the feature that the ranking reads.
        strength: How strongly it speaks: 0 for nothing unusual, about 1 where an engineer would point at it; below 0
            for the contrary. Never NaN: a symptom that cannot be read is not there.
        value: What was measured.
        reference: What runs usually have; NaN: nothing in particular.
        sentence: For people, with the numbers.
        units: Of value and reference.
        kind: What it was read from.
        step: Of the run; -1: none in particular.
        layer: Block; -1: none in particular.
        path: Part of the run that holds the number, such as ``"/monitors"``; empty: the configuration, checkpoints
            or several other symptoms.
        variable: In that part.
        selection: Dimension -> value at which the number stands there, beside the step.
    """

    name: str
    strength: float
    value: float
    reference: float
    sentence: str
    units: str = "1"
    kind: SymptomKind = SymptomKind.MECHANISM
    step: int = -1
    layer: int = -1
    path: str = ""
    variable: str = ""
    selection: Mapping[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> dict[str, Any]:
        """Dimension -> value at which the number stands in its part; empty where it is of no part, or of no step."""
        return {"step": self.step, **self.selection} if self.path and self.step >= 0 else {}


def ramp(value: float, zero: float, one: float, *, low: float = 0.0, high: float = 1.5) -> float:
    """0 where a value is at ``zero``, 1 at ``one``, linear between and beyond, cut at ``low`` and ``high``."""
    if not math.isfinite(value):
        return high if value * (one - zero) > 0 else low if not math.isnan(value) else 0.0
    return float(min(max((value - zero) / (one - zero), low), high))


def fold(factor: float) -> str:
    """A factor in words, such as "12-fold" or "3,380-fold"."""
    return f"{short(factor)}-fold"


def in_steps(n: int) -> str:
    """A number of steps in words."""
    return "one step" if n == 1 else f"{n} steps"
