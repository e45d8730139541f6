"""One symptom: a number read from a run, its strength as evidence, and a sentence that states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.formatting import short
from workbench.schema.statuses import SymptomKind


@dataclass(frozen=True)
class Symptom:
    """One number read from a run, as evidence.

    Attributes:
        name: Its id, also the name of the feature that the ranking reads.
        strength: Strength of the evidence: 0 for nothing unusual, about 1 where it is striking; below 0 for the
            contrary. Never NaN: a symptom that cannot be read is left out.
        value: The measured value.
        reference: The usual value; NaN: none in particular.
        sentence: The sentence shown to the user, with the numbers.
        units: Units of value and reference.
        kind: What it was read from.
        step: Step of the run; -1: none in particular.
        layer: Block; -1: none in particular.
        path: Part of the run that holds the number, such as ``"/monitors"``; empty: the configuration, checkpoints
            or several other symptoms.
        variable: Name of the variable in that part.
        selection: Dimension -> value that selects the number there, besides the step.
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
    """A factor as text, such as "12-fold" or "3,380-fold"."""
    return f"{short(factor)}-fold"


def in_steps(n: int) -> str:
    """A number of steps as text."""
    return "one step" if n == 1 else f"{n} steps"
