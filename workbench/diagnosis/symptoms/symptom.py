"""Symptoms: a number read from a run, its strength as evidence, and a sentence that states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.formatting import short
from workbench.schema.statuses import SymptomKind
from workbench.schema.symptoms import SYMPTOMS


@dataclass(frozen=True)
class Symptom:
    """A number read from a run, as evidence for or against causes.

    ``strength`` is 0 if the value is not unusual, about 1 if it is striking, below 0 for the opposite, and never NaN;
    ``reference`` is the usual value, NaN if there is none. ``sentence`` is shown to the user. ``path``, ``variable``
    and ``selection`` are the place of the number in the run, empty for the configuration, checkpoints or several
    symptoms; step and layer are -1 for no specific one.
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
        """Dimension -> value that selects the number in its part; empty if it has no part or no step."""
        return {"step": self.step, **self.selection} if self.path and self.step >= 0 else {}


def symptom_of(
    name: str,
    value: float,
    *,
    level: float | None = None,
    strength: float | None = None,
    place: str | None = None,
    sentence: str = "",
    reference: float | None = None,
    kind: SymptomKind | None = None,
    step: int = -1,
    layer: int = -1,
    selection: Mapping[str, Any] | None = None,
    **words: Any,
) -> Symptom:
    """Return a symptom by its rule in `SYMPTOMS`; what is passed replaces what follows from rule and value."""
    rule = SYMPTOMS[name]
    if strength is None:
        level = (finite_log10(value) if rule.is_log else value) if level is None else level
        strength = ramp(level, *rule.scale)
    sentence = sentence or rule.sentence
    for word, text in (("{short}", short), ("{fold}", fold)):
        if word in sentence:
            words[word[1:-1]] = text(value)
    part, _, variable = (rule.place if place is None else place).partition("/")
    return Symptom(
        name,
        strength,
        value,
        rule.reference if reference is None else reference,
        sentence.format(v=value, p=100 * value, step=step, **words),
        rule.units,
        kind or rule.kind,
        int(step),
        int(layer),
        f"/{part}" if part else "",
        variable,
        selection or {},
    )


def ramp(value: float, zero: float, one: float, low: float = 0.0, high: float = 1.5) -> float:
    """Return a linear function of a value that is 0 at ``zero`` and 1 at ``one``, clipped to [``low``, ``high``]."""
    if not math.isfinite(value):
        return high if value * (one - zero) > 0 else low if not math.isnan(value) else 0.0
    return float(min(max((value - zero) / (one - zero), low), high))


def fold(factor: float) -> str:
    """Return a factor as text, such as "by a factor of 12" or "by a factor of 3,380"."""
    return f"by a factor of {short(factor)}"


def in_steps(n: int) -> str:
    """Return a number of steps as text."""
    return "one step" if n == 1 else f"{n} steps"


def finite_log10(value: float, least: float = 1e-12) -> float:
    """Return log10 of a number clipped below at ``least``; NaN if it is not finite."""
    return math.log10(max(value, least)) if math.isfinite(value) else math.nan
