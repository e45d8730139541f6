"""When and how a run failed, from its loss alone, without a healthy run for comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.diagnosis.failed_run import Record
from workbench.formatting import percent
from workbench.schema.statuses import FailureKind

#: Longest window of the running median that removes noise, in steps; for short runs a tenth of the run.
_WINDOW = 15
#: A rise counts as a spike if it exceeds this fraction of the total decrease of the loss, and the noise.
_LEAST_RISE = 0.3
#: Standard deviation of a median over that of a mean.
_OF_MEDIAN = 1.25
#: Multiple of the noise from which on a single loss has risen.
_OUTLIER = 4.0
#: A rise by less than this fraction of the loss is not a failure.
_VISIBLE = 0.05
#: A level that this fraction of the losses reached before, such as those of another kind of batch, is no rise.
_USUAL = 0.1
#: A stalled run has stopped learning once the loss has completed this fraction of its decrease.
_MOST = 0.9


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        kind: Diverged; spike, if the loss rose and remained high or recovered; or stalled, if neither, so that the run
            can only have failed by learning too little.
        step: Step at which the failure began. For a divergence or a spike, the last step at which the loss was still
            low; for a stalled run, the step at which most of the decrease of the loss was complete.
        row: Row of the monitors at that step.
        rise: Largest rise of the smoothed loss above its lowest level so far, in nat. Of a run that diverged, that of
            single losses, and 0 if noise explains it.
        smooth: Running median of the loss, shape (step,).
        noise: Robust standard deviation of the loss from step to step, from the median difference of successive losses,
            in nat.
        recovered: Fraction of the rise that was recovered by the end; 0 if the run diverged.
        has_loss: Whether any loss was recorded.
    """

    kind: FailureKind
    step: int
    row: int
    rise: float
    smooth: np.ndarray
    noise: float
    recovered: float
    has_loss: bool = True

    @property
    def floor(self) -> float:
        """Largest difference between two smoothed losses that noise explains in a run of this length, in nat."""
        return noise_floor(len(self.smooth), self.noise)

    @property
    def is_stalled(self) -> bool:
        """Whether the run only learned too little, so that there is no step at which it failed."""
        return self.kind is FailureKind.STALLED

    def last_row(self, steps: np.ndarray) -> int:
        """Return the row of the last measurement before the failure, or the first row if there is none.

        For a stalled run this is the last row.

        Args:
            steps: Steps of the measurements, in increasing order.
        """
        if self.is_stalled:
            return len(steps) - 1
        before = np.flatnonzero(steps <= self.step + 1)
        return int(before[-1]) if len(before) else 0

    @property
    def is_seen(self) -> bool:
        """Whether the loss itself shows the failure, which it never does for a stalled run."""
        if self.kind is not FailureKind.SPIKE:
            return self.kind is FailureKind.DIVERGED
        best = np.minimum.accumulate(self.smooth)
        return bool(self.rise > _VISIBLE * abs(best[np.argmax(self.smooth - best)]))

    @property
    def has_recovered(self) -> bool:
        """Whether nearly all of the rise was recovered by the end."""
        return self.recovered > 0.9

    @property
    def words(self) -> str:
        """The failure as a clause without a capital letter or a period."""
        if not self.has_loss:
            return "no loss was recorded"
        if self.kind is FailureKind.DIVERGED:
            if not self.rise:
                return f"the run diverged after step {self.step} without an earlier rise of the loss"
            return f"the loss began to rise at step {self.step} and the run diverged"
        if self.kind is FailureKind.SPIKE and self.is_seen:
            back = f", of which {percent(self.recovered)} was recovered" if self.recovered > _LEAST_RISE else ""
            return f"the loss rose by {self.rise:.3g} nat after step {self.step}{back}"
        if self.kind is FailureKind.SPIKE:
            return f"the loss did not diverge, and it rose by at most {self.rise:.2g} nat, after step {self.step}"
        return (
            f"the loss neither diverged nor rose noticeably, and most of its decrease was complete by step {self.step}"
        )


def find_failure(record: Record) -> Failure:
    """Return when and how the loss of a run failed."""
    steps, loss = record.steps, record.values("monitors", "loss")
    known = np.isfinite(loss)
    filled = np.interp(np.arange(len(loss)), np.flatnonzero(known), loss[known]) if known.any() else np.zeros(len(loss))
    window = _window(len(loss))
    smooth = running_median(filled, window)
    noise = float(np.median(np.abs(np.diff(loss[known])))) / np.sqrt(2) * 1.48 if known.sum() > 2 else 0.0
    best = np.minimum.accumulate(smooth)
    rises = smooth - best
    peak = int(np.argmax(rises))
    rise = float(rises[peak])
    if record.diverged_at is not None:
        end = int(np.searchsorted(steps, record.diverged_at))
        row = _last_good(filled, best, noise, min(end, len(loss) - 1))
        rise = float(np.max(filled[row:]) - best[row])  # of single losses, since the last ones are few
        rise = rise if rise > _OUTLIER * noise else 0.0
        return Failure(FailureKind.DIVERGED, int(steps[row]), row, rise, smooth, noise, 0.0)
    learned = float(smooth[0] - best[-1])
    is_early = int(np.argmin(smooth[: peak + 1])) < window - 1  # the low loss is a median of few, or a single one
    if rise > max(_LEAST_RISE * max(learned, 0.0), noise_floor(len(loss), noise) + 3 * noise * is_early, 1e-6):
        row = _last_good(smooth, best, noise / np.sqrt(window), peak)
        after = float(np.min(smooth[peak:]))
        recovered = float(np.clip((smooth[peak] - after) / rise, 0, 1))
        low = int(np.argmax(smooth <= smooth[peak] - rise / 2))  # first row of the time before the rise
        before = filled[low : max(row + 1 - window, 0)]  # without the rows of the rise that the median had not shown
        if np.count_nonzero(before >= smooth[peak] - noise) < max(_USUAL * len(before), 1):
            return Failure(FailureKind.SPIKE, int(steps[row]), row, rise, smooth, noise, recovered)
    row = int(np.argmax(smooth <= smooth[0] - _MOST * learned)) if learned > 0 else 0
    return Failure(FailureKind.STALLED, int(steps[row]), row, rise, smooth, noise, 0.0, bool(known.any()))


def noise_floor(n: int, noise: float) -> float:
    """Return a limit for the range of the running medians of ``n`` losses that only fluctuate, in nat.

    Args:
        n: Number of losses.
        noise: Their standard deviation from step to step, in nat.
    """
    of_median = _OF_MEDIAN * noise / np.sqrt(_window(n))
    return float(2 * of_median * (np.sqrt(2 * np.log(max(n / _window(n), 2))) + 1.5))


def _window(n: int) -> int:
    return int(np.clip(n // 10, 1, _WINDOW))


def running_median(values: np.ndarray, window: int) -> np.ndarray:
    """Return the median over the last ``window`` values (fewer at the start), with the same length."""
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def _last_good(values: np.ndarray, best: np.ndarray, noise: float, end: int) -> int:
    """Return the last row up to ``end`` at which the loss was within its noise of the lowest loss so far."""
    good = np.flatnonzero(values[: end + 1] <= best[: end + 1] + 2 * noise)
    return int(good[-1]) if len(good) else 0
