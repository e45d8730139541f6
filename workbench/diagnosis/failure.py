"""Find when and how a run failed, from its loss alone, without a healthy run to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.diagnosis.failed_run import Record
from workbench.schema.statuses import FailureKind

#: Longest window of the running median that removes noise, in steps; a tenth of short runs.
_WINDOW = 15
#: A rise counts as a failure where it undoes this share of what was learned, and exceeds this multiple of the noise.
_SHARE, _NOISES = 0.3, 4.0
#: A rise by less than this share of the loss is not a failure.
_FAR = 0.05
#: Learning has ended where the loss has come down this share of the way.
_MOST = 0.9


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        kind: Diverged; spike, if the loss rose and stayed high or recovered; or stalled, if neither: then the run can
            only have failed by learning too little.
        step: Step at which the failure began: of a divergence or a spike the last step at which the loss was as low
            as before; of a stalled run the step by which the loss had fallen most of its way.
        row: Row of the monitors at that step.
        rise: Largest rise of the smoothed loss above its lowest level so far, in nats.
        smooth: Running median of the loss, shape (step,).
        noise: Median distance of two successive losses over the root of two, in nats.
        recovered: Share of the rise that was recovered by the end; 0 where the run diverged.
    """

    kind: FailureKind
    step: int
    row: int
    rise: float
    smooth: np.ndarray
    noise: float
    recovered: float

    @property
    def is_stalled(self) -> bool:
        """Whether the run learned too little, so that there is no step at which it failed."""
        return self.kind is FailureKind.STALLED

    def last_row(self, steps: np.ndarray) -> int:
        """The last of some measurements before it, or the first; of a run that stalled the last of all.

        Args:
            steps: Of the measurements, rising.
        """
        if self.is_stalled:
            return len(steps) - 1
        before = np.flatnonzero(steps <= self.step + 1)
        return int(before[-1]) if len(before) else 0

    @property
    def is_seen(self) -> bool:
        """Whether the loss itself shows the failure; not of a stalled run, which is not compared with a healthy one."""
        if self.kind is not FailureKind.SPIKE:
            return self.kind is FailureKind.DIVERGED
        best = np.minimum.accumulate(self.smooth)
        return bool(self.rise > _FAR * abs(best[np.argmax(self.smooth - best)]))

    @property
    def words(self) -> str:
        """The failure as a clause without a capital or a full stop."""
        if self.kind is FailureKind.DIVERGED:
            return f"the loss began to rise at step {self.step} and the run diverged"
        if self.kind is FailureKind.SPIKE and self.is_seen:
            return f"the loss rose by {self.rise:.3g} nats from step {self.step} on" + (
                " and came back" if self.recovered > 0.7 else ""
            )
        if self.kind is FailureKind.SPIKE:
            return f"the loss did not diverge, and rose by no more than {self.rise:.2g} nats, from step {self.step} on"
        return f"the loss neither diverged nor rose far, and had come down most of its way by step {self.step}"


def find_failure(record: Record) -> Failure:
    """Find where and how the loss of a run failed."""
    steps, loss = record.steps, record.values("monitors", "loss")
    known = np.isfinite(loss)
    filled = np.interp(np.arange(len(loss)), np.flatnonzero(known), loss[known]) if known.any() else np.zeros(len(loss))
    window = int(np.clip(len(loss) // 10, 1, _WINDOW))
    smooth = running_median(filled, window)
    noise = float(np.median(np.abs(np.diff(filled)))) / np.sqrt(2) * 1.48 if len(filled) > 2 else 0.0
    best = np.minimum.accumulate(smooth)
    rises = smooth - best
    peak = int(np.argmax(rises))
    rise = float(rises[peak])
    if record.diverged_at is not None:
        end = int(np.searchsorted(steps, record.diverged_at))
        row = _last_good(filled, best, noise, min(end, len(loss) - 1))
        return Failure(FailureKind.DIVERGED, int(steps[row]), row, rise, smooth, noise, 0.0)
    learned = float(smooth[0] - best[-1])
    if rise > max(_SHARE * max(learned, 0.0), _NOISES * noise / np.sqrt(window), 1e-6):
        row = _last_good(smooth, best, noise / np.sqrt(window), peak)
        after = float(np.min(smooth[peak:]))
        recovered = float(np.clip((smooth[peak] - after) / rise, 0, 1))
        return Failure(FailureKind.SPIKE, int(steps[row]), row, rise, smooth, noise, recovered)
    row = int(np.argmax(smooth <= smooth[0] - _MOST * learned)) if learned > 0 else 0
    return Failure(FailureKind.STALLED, int(steps[row]), row, rise, smooth, noise, 0.0)


def running_median(values: np.ndarray, window: int) -> np.ndarray:
    """Median over the last ``window`` values (fewer at the start), same length."""
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def _last_good(values: np.ndarray, best: np.ndarray, noise: float, end: int) -> int:
    """The last row before ``end`` at which the loss was within its noise of the best so far."""
    good = np.flatnonzero(values[: end + 1] <= best[: end + 1] + 2 * noise)
    return int(good[-1]) if len(good) else 0
