"""Evidence of a run in the timeline: the signals that were nearest to an alarm, and the axis."""

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
#: Number of signals that are drawn.
_N_SIGNALS = 4
#: Ends of the logarithmic axis; values beyond them are drawn at its ends.
LOWEST, FARTHEST = 0.1, 1000.0
_TOPS = (2.0, 10.0, 100.0, FARTHEST)


@dataclass(frozen=True)
class EvidenceLine:
    """Evidence of one signal.

    Attributes:
        signal: Name of the signal.
        color: Color of the line.
        step: Steps with a value, shape (row,).
        value: Evidence relative to that of an alarm, clipped to the axis, shape (row,).
    """

    signal: str
    color: str
    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class EvidencePanel:
    """Evidence of a run.

    Attributes:
        lines: The signals that reached an alarm first, then those nearest to one, in recorded order.
        view: Ends of the logarithmic axis.
        note: Remark on values that are omitted or clipped; empty if there are none.
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
            return cls(
                [], (LOWEST, _TOPS[0]), "no evaluated step yet: the first 200 steps and the warm-up are excluded"
            )
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
            f"{counted(n_others, 'weaker signal')} not shown" if n_others else "",
            f"{listed(beyond)} above {FARTHEST:g}" if beyond else "",
        ]
        high = next(end for end in _TOPS if top <= end or end == FARTHEST)
        return cls(lines, (LOWEST, high), "; ".join(filter(None, notes)))
