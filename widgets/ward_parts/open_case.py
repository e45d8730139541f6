"""A case that is being played: its patient, what was done, and the lines of Python that do the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import xarray as xr

    from workbench.course import Patient


@dataclass
class OpenCase:
    """A case that is being played.

    Attributes:
        patient: The patient.
        measured: Measurement -> its values.
        replays: Cause -> the losses of the run and of its replay with the change.
        causes: The causes that are marked.
        cure: The cause whose change is chosen; empty for no change.
        lines: The lines of Python after those that open the case.
    """

    patient: Patient
    measured: dict[str, xr.Dataset] = field(default_factory=dict)
    replays: dict[str, xr.Dataset] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    cure: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Level and number of the case."""
        return f"Level {self.patient.level}, case {self.patient.seed}"

    @property
    def python(self) -> str:
        """The lines of Python that do the same."""
        patient = f"patient = wb.course.patient({self.patient.seed}, level={self.patient.level})"
        return "\n".join(["import workbench as wb", "", patient, "print(patient.complaint)", *self.lines])

    def measure(self, name: str) -> None:
        """Measure a quantity once."""
        if name not in self.measured:
            self.measured[name] = self.patient.measure(name)
            self.lines.append(f'patient.measure("{name}")')

    def note_replay(self, cause: str, replay: xr.Dataset) -> None:
        """Keep a replay that was made."""
        if cause not in self.replays:
            self.lines.append(f'patient.try_cure("{cause}")')
        self.replays[cause] = replay

    def finish(self, causes: Sequence[str], cure: str | None, progress: Callable[[str], None]) -> None:
        """End the case with an answer, unless it has ended."""
        if self.patient.score is None:
            self.patient.finish(causes, cure, progress=progress)
            self.causes, self.cure = list(causes), cure or ""
            answer = ", ".join(map(repr, [list(causes), *filter(None, [cure])])).replace("'", '"')
            self.lines += [f"score = patient.finish({answer})", "print(score.sentence)", "score.parts"]
