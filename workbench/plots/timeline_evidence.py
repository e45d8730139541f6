"""The evidence of a run as the timeline draws it: the signals that were nearest to an alarm, and its axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.formatting import counted, listed
from workbench.plots.style import depth_colors

if TYPE_CHECKING:
    import xarray as xr

#: Evidence at which an alarm is raised.
ALARM = 1.0
#: Signals that are drawn.
_N_SIGNALS = 4
#: Ends of the logarithmic axis; what is beyond them is drawn at its edge.
LOWEST, FARTHEST = 0.1, 1000.0
_TOPS = (2.0, 10.0, 100.0, FARTHEST)


@dataclass(frozen=True)
class EvidenceLine:
    """The evidence of one signal.

    Attributes:
        signal: Its name.
        color: Its colour.
        step: Steps with a value, shape (row,).
        value: Evidence over that of an alarm, at least the lowest value of the axis, shape (row,).
    """

    signal: str
    color: str
    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class EvidencePanel:
    """The evidence of a run.

    Attributes:
        lines: The signals that reached an alarm first, then those nearest to one, in the order of the record.
        view: Ends of the logarithmic axis.
        note: What is not drawn as it is; empty if all is.
    """

    lines: list[EvidenceLine]
    view: tuple[float, float]
    note: str

    @classmethod
    def of(cls, run: xr.DataTree) -> EvidencePanel | None:
        """Read the evidence of a run; None if it has none. `workbench.alarms.evidence_of` computes it."""
        if "evidence" not in run.children:
            return None
        data = run.children["evidence"].to_dataset(inherit=False)
        step, names = data["step"].values.astype(np.int64), data["signal"].values.astype(str)
        values = data["evidence"].transpose("step", "signal").values.astype(float)
        is_known = ~np.isnan(values)
        known = np.flatnonzero(is_known.any(axis=0))
        if not len(known):
            return cls([], (LOWEST, _TOPS[0]), "not judged yet: the first 200 steps and a warm-up are not")
        peaks = np.nanmax(values[:, known], axis=0)
        reached = np.where(values[:, known] >= ALARM, step[:, None], np.inf).min(axis=0)
        chosen = sorted(known[np.lexsort([-peaks, reached])[:_N_SIGNALS]].tolist())
        top = np.nanmax(values[:, chosen])
        beyond = [str(names[i]) for i in chosen if np.nanmax(values[:, i]) > FARTHEST]
        lines = []
        for i, color in zip(chosen, depth_colors(len(chosen)), strict=True):
            here = is_known[:, i]
            lines.append(EvidenceLine(str(names[i]), color, step[here], np.clip(values[here, i], LOWEST, FARTHEST)))
        n_others = len(known) - len(chosen)
        notes = [
            f"{counted(n_others, 'other signal')} weaker" if n_others else "",
            f"{listed(beyond)} beyond {FARTHEST:g}" if beyond else "",
        ]
        high = next(end for end in _TOPS if top <= end or end == FARTHEST)
        return cls(lines, (LOWEST, high), "; ".join(filter(None, notes)))
