"""Causal evidence that a watched signal of a run differs from its own past."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.callbacks.alarms.own_past import WINDOWS, OwnPast
from workbench.callbacks.alarms.probe_alarms import SIGNALS
from workbench.callbacks.alarms.watched import FALL, RISE, WATCHED, Watched, WatchedValues, watched_values
from workbench.callbacks.observation import OF_CONTRACT, Observation, broken_contract, changed_setting
from workbench.errors import SchemaError

if TYPE_CHECKING:
    import xarray as xr


#: Standard deviations subtracted at each step, and largest number of them that counts.
_SLACK, _LARGEST = 2.0, 8.0
#: Numbers over which mean and variance are learned, first numbers for which no sum is formed, and largest distance from
#: the mean, in standard deviations, with which a number enters mean and variance.
_MEMORY, _N_LEARNED, _FARTHEST = 200, 20, 4.0
#: Largest sum, so that a sum returns to 0 soon after the numbers are normal again.
_LARGEST_SUM = 100.0


class CumulativeSum:
    """One-sided cumulative sums of several series, each relative to its own past.

    s_t = max(0, s_{t-1} + min(z_t, 8) - 2), where z_t is the number minus the mean of its past, in standard deviations
    of its past (Page 1954, doi:10.1093/biomet/41.1-2.100); mean and variance forget over 200 numbers. The slack of two
    deviations tolerates drift and accumulates jumps: one of eight deviations adds 6 at each step. The sum has no
    p value; `Calibration` measures how often healthy runs reach a sum.
    """

    def __init__(self, least_scale: np.ndarray) -> None:
        self._least = np.maximum(np.asarray(least_scale, dtype=np.float64), 1e-30)
        n = len(self._least)
        self._mean, self._variance = np.zeros(n), np.zeros(n)
        self._n, self._n_of_spread = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Reset the sums to 0 and learn the mean again, but keep the variance of the past."""
        self._n[:] = 0
        self.value = np.zeros(len(self._least))
        self.n_since = np.zeros(len(self._least), dtype=np.int64)

    def update(self, values: np.ndarray) -> np.ndarray:
        """Process one number of each series; numbers that are not finite count as missing."""
        is_known = np.isfinite(values)
        self._n += is_known
        scale = np.maximum(np.sqrt(self._variance), self._least)
        left = np.where(is_known, values - self._mean, 0.0)
        is_begun = is_known & (self._n > _N_LEARNED)
        grown = self.value + np.minimum(left / scale, _LARGEST) - _SLACK
        self.value = np.where(is_begun, np.clip(grown, 0.0, _LARGEST_SUM), self.value)
        self.n_since = np.where(self.value > 0, self.n_since + 1, 0)
        counted = np.where(is_begun, np.clip(left, -_FARTHEST * scale, _FARTHEST * scale), left)
        fraction = np.where(is_known, 1 / np.clip(self._n, 1, _MEMORY), 0.0)
        self._mean = self._mean + fraction * counted
        # After a restart, the variance waits until the mean is known again.
        learns = is_known & (is_begun | (self._n_of_spread < _N_LEARNED))
        self._n_of_spread += learns
        fraction = np.where(learns, 1 / np.clip(self._n_of_spread, 1, _MEMORY), 0.0)
        self._variance = (1 - fraction) * (self._variance + fraction * counted**2)
        return self.value


#: Lengths of the windows, in measurements, and of the past that each is compared with.
_WINDOWS, _PAST, _LEAST_PAST = (10, 16, 25), 120, 60
#: A residual counts as at most this many deviations, by the median deviation.
_CLIP = 4.0
#: Largest correlation of successive residuals that is allowed for.
_LARGEST_CORRELATION = 0.98
#: Fraction of its level by which a loss must fall, since healthy learning is often faster than before for a while.
_LEAST_FALL = 0.25
_TINY = 1e-300


class Shift(NamedTuple):
    """How far the latest losses are from the trend before them, in deviations of the mean of a window.

    Attributes:
        rise: Largest shift up of any window; NaN if unknown yet.
        fall: Largest shift down, of windows that are below the trend by a quarter of its level; NaN if unknown yet.
        rise_window: Length of the window of the rise, in measurements.
        fall_window: Length of the window of the fall.
        level: Mean of the latest 10 losses.
    """

    rise: float = math.nan
    fall: float = math.nan
    rise_window: int = 0
    fall_window: int = 0
    level: float = math.nan


class LossShift:
    """Comparison of the latest 10, 16 and 25 losses with a straight line through the 120 before the latest 25.

    Outliers of the past are clipped. The deviation of a window's mean follows from the residuals and from their
    correlation, so that losses that wander need a larger shift. A window counts by its mean or its median, whichever is
    closer to the trend, so that single spikes do not count; and the trend is the line or its last value, whichever is
    closer to the window, so that neither the end of a fall is a rise, nor a steady fall a shift. A fall must also go
    below every earlier mean of 25 losses, so that a recovery is none. Factors of the loss have no effect; offsets have
    one only through the smallest deviation, 2 % of the first losses, and the smallest fall.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Forget the losses so far, but not the scale of the first ones."""
        self._losses: deque[float] = deque(maxlen=_PAST + _WINDOWS[-1])
        self._lowest = math.inf

    def update(self, loss: float) -> Shift:
        """Process a loss; one that is not finite counts as missing."""
        if not math.isfinite(loss):
            return Shift()
        if len(self._first) < _N_FIRST:
            self._first.append(loss)
        self._losses.append(loss)
        least = _FRACTION_OF_FIRST * abs(_median(self._first))
        losses = np.array(self._losses)
        past = losses[: -_WINDOWS[-1]]
        if len(past) < _LEAST_PAST:
            return Shift()
        self._lowest = min(self._lowest, float(past[-_WINDOWS[-1] :].mean()))
        found = _shifts(past, [losses[-window:] for window in _WINDOWS], least, self._lowest)
        (rise, rise_window), (fall, fall_window) = (max(zip(of, _WINDOWS, strict=True)) for of in found)
        return Shift(rise, fall, rise_window, fall_window, float(losses[-_WINDOWS[0] :].mean()))


def _shifts(
    past: np.ndarray, windows: list[np.ndarray], least: float, lowest: float
) -> tuple[list[float], list[float]]:
    """Return the shifts up and down of each window, in deviations of its mean."""
    n = len(past)
    at = np.arange(n) - (n - 1) / 2
    clipped = past
    for is_last in (False, True):
        level, slope = float(clipped.mean()), float(at @ clipped) / float(at @ at)
        residual = past - level - slope * at
        limit = _CLIP * 1.4826 * _median(np.abs(residual - _median(residual)))
        clipped = level + slope * at + np.clip(residual, -limit, limit)
        if is_last:
            residual = np.clip(residual, -limit, limit)
    square = float(residual @ residual)
    correlation = float(residual[1:] @ residual[:-1]) / square if square else 0.0
    correlation += (2 + 4 * correlation) / n  # the trend takes away this much of it (Kendall 1954)
    correlation = min(max(correlation, 0.0), _LARGEST_CORRELATION)
    # Residuals with correlation c are worth (1 - c) / (1 + c) as many independent ones; the end of a line through n
    # points has four times the variance of their mean.
    variance = max(square / (n - 2), least**2) * (1 + correlation) / (1 - correlation)
    end = level + slope * float(at[-1])
    rises, falls = [], []
    for latest in windows:
        extrapolated = end + slope * (len(windows[-1]) - (len(latest) - 1) / 2)
        low, high = sorted((end, extrapolated))
        mean, median = float(latest.mean()), _median(latest)
        deviation = max(math.sqrt(variance * (1 / len(latest) + 4 / n)), _TINY)
        low = min(low, lowest)
        down = low - max(mean, median)
        rises.append((min(mean, median) - high) / deviation)
        falls.append(down / deviation if down >= _LEAST_FALL * abs(low) else min(down, 0.0) / deviation)
    return rises, falls


def _median(values: np.ndarray | list[float]) -> float:
    """Return the median of a few finite numbers, several times faster than NumPy does."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


#: First step that is evaluated.
_FIRST_EVALUATED = 200
#: A step is evaluated if the learning rate is at most _RISE times its smallest value of the last _N_RATES steps, and
#: above _LOW times its largest: the signals follow a rising rate, and the very end of a schedule. Losses and other
#: metrics of random batches follow a slow rise only a little: up to _RISE_OF_NOISE, the rise of a linear warm-up from
#: step 200 on, they are evaluated with their evidence divided by _LESS_EVIDENCE.
_N_RATES, _RISE, _RISE_OF_NOISE, _LOW = 100, 1.05, 2.0, 0.02
_LESS_EVIDENCE = 1.5
#: A loss falls with its learning rate: falls are not evaluated while the rate rises, nor after it fell by this fraction
#: of its largest value within the last _N_RATES steps.
_LARGE_DECAY = 0.3
#: Number of first losses, and fraction of their median that is the smallest scale of later ones.
_N_FIRST, _FRACTION_OF_FIRST = 20, 0.02
#: Number of consecutive finite values after which NaN in a metric of the update means that it is broken; a loop that
#: logs it only at some steps does not reach it.
_LEAST_LOGGED = 10
#: Number of intervals between measurements that show another cadence, if all are this many times longer or shorter.
_N_GAPS, _OTHER_CADENCE = 3, 1.5


@dataclass(frozen=True)
class Reading:
    """The evidence of a signal in its latest measurement, at its worst layer and head.

    Attributes:
        watched: The signal.
        step: Step of the measurement.
        evidence: -log10 of the p value of a change for the worse, times the number of layers, heads and windows; for
            signals that accumulate, the `CumulativeSum` if that is larger; of a `LossShift` the number of deviations;
            NaN if unknown yet.
        opposite: Evidence of a change in the opposite direction.
        is_evaluated: Whether the step is evaluated, so that the signal may raise an alarm; not while the learning rate
            rises, for example.
        is_broken: Whether the signal was finite in earlier measurements and has no finite value now.
        value: Value of the signal there, in its own unit.
        is_rise: Whether the value rose.
        layer: Layer with the worst value; -1 if the signal has no layers or lies outside the blocks.
        head: Head with the worst value; -1 if the signal has no heads.
        onset: Last step before the change, by the window with the strongest evidence.
    """

    watched: Watched
    step: int
    evidence: float
    opposite: float
    is_evaluated: bool
    is_broken: bool
    value: float
    is_rise: bool
    layer: int
    head: int
    onset: int


class RunEvidence:
    """Evidence of every watched signal, updated with each measurement."""

    def __init__(self, first_step: int = 0) -> None:
        self.latest: dict[str, Reading] = {}
        self._first_step = first_step
        self._groups: dict[str, list[_Group]] = {}
        self._rates: deque[tuple[int, float]] = deque()  # of the last steps
        self._shift = LossShift()
        self._highest = self._rate = math.nan

    def restart(self) -> None:
        """Forget the latest values but not their spread, after an intended change."""
        self._shift.restart()
        for groups in self._groups.values():
            for group in groups:
                group.restart()

    def update(self, observation: Observation) -> list[Reading]:
        """Process an observation of any part."""
        found = list(watched_values(observation))
        if observation.part == "monitors":
            rate = float(observation.values.get("learning_rate", math.nan))
            if math.isfinite(rate):
                self._rate = rate
                self._highest = np.fmax(self._highest, rate)
                self._rates.append((observation.step, rate))
                while self._rates[0][0] <= observation.step - _N_RATES:
                    self._rates.popleft()
            if observation.values.get("is_skipped", 0) >= 1:  # an overflow in float16: there was no update
                return []
        if not found:
            return []
        groups = self._groups.setdefault(observation.part, [])
        known = {name for group in groups for name in group.names}
        new = [each for each in found if each.watched.name not in known]
        for is_apart in (True, False):  # what may be measured more or less often than the rest of its part
            if together := [each for each in new if each.watched.is_apart is is_apart]:
                groups.append(_Group(together))
        measured = {each.watched.name for each in found}
        readings = []
        for group in groups:
            if not measured & group.names:
                continue
            group.update(observation.step, found, math.log(self._rate) if self._rate > 0 else 0.0)
            readings += [self._with_rate(group.reading(name, observation.step)) for name in group._places]
        if observation.part == "monitors" and "loss" in observation.values:
            readings += [self._with_rate(reading) for reading in self._shifts(observation)]
        self.latest |= {reading.watched.name: reading for reading in readings}
        return readings

    def _shifts(self, observation: Observation) -> list[Reading]:
        """Return the readings of the shifts of the loss."""
        found, step = self._shift.update(float(observation.values["loss"])), observation.step
        return [
            Reading(watched, step, evidence, math.nan, is_evaluated=False, is_broken=False, value=found.level,
                is_rise=watched is RISE, layer=-1, head=-1, onset=max(step - window, 0))
            for watched, evidence, window in (
                (RISE, found.rise, found.rise_window), (FALL, found.fall, found.fall_window)
            )
        ]  # fmt: skip

    def _with_rate(self, reading: Reading) -> Reading:
        """Return a reading adjusted to the current learning rate."""
        if reading.step - self._first_step < _FIRST_EVALUATED:
            return reading
        if rates := [rate for _, rate in self._rates]:
            if self._rate <= _LOW * self._highest:
                return reading
            rise = self._rate / min(rates) if min(rates) > 0 else math.inf
            if reading.watched is FALL and (rise > _RISE or max(rates) - self._rate > _LARGE_DECAY * self._highest):
                return reading
            if rise > _RISE:
                is_evaluated = reading.watched.is_noise and rise <= _RISE_OF_NOISE
                return replace(reading, is_evaluated=is_evaluated, evidence=reading.evidence / _LESS_EVIDENCE)
        return replace(reading, is_evaluated=True)


class _Group:
    """Signals that are measured together, stored as one array of series."""

    def __init__(self, signals: Sequence[WatchedValues]) -> None:
        self.names = {each.watched.name for each in signals}
        self._signals = {each.watched.name: each for each in signals}
        ends = np.cumsum([each.values.size for each in signals]).tolist()
        self._places = {
            each.watched.name: slice(end - each.values.size, end) for each, end in zip(signals, ends, strict=True)
        }
        of_series = [each.watched for each in signals for _ in range(each.values.size)]
        self._least_scale = np.array([watched.least_scale for watched in of_series])
        self._is_noise = np.array([watched.is_noise for watched in of_series])
        self._accumulates = np.array([watched.accumulates for watched in of_series])
        self._gap, self._gaps = 0.0, deque[int](maxlen=_N_GAPS)
        self._begin()
        self._steps: deque[int] = deque(maxlen=int(WINDOWS[-1]) + 1)
        self._first_losses: list[np.ndarray] = []
        self._losses = np.array([watched.is_noise and watched.is_outcome for watched in of_series])
        self._n_finite: dict[str, int] = {}  # in a row
        self._measured: set[str] = set()

    def _begin(self) -> None:
        self._past = OwnPast(self._least_scale, is_noise=self._is_noise)
        self._sums = CumulativeSum(self._past.least_scale[self._accumulates])

    def restart(self) -> None:
        self._past.restart()
        self._sums.restart()

    def _note_cadence(self, step: int) -> None:
        """Learn the past again if the cadence has changed: trends and spreads per measurement are other ones then."""
        if self._steps:
            self._gaps.append(step - self._steps[-1])
            self._gap = self._gap or self._gaps[-1]
        if len(self._gaps) == _N_GAPS and (
            min(self._gaps) > _OTHER_CADENCE * self._gap or _OTHER_CADENCE * max(self._gaps) < self._gap
        ):
            self._gap = sorted(self._gaps)[_N_GAPS // 2]
            self._begin()

    def update(self, step: int, signals: Sequence[WatchedValues], log_rate: float) -> None:
        """Process one measurement."""
        self._signals |= {each.watched.name: each for each in signals if each.watched.name in self.names}
        self._measured = {each.watched.name for each in signals}
        values = np.full(len(self._losses), np.nan)
        for name, place in self._places.items():
            each = self._signals[name]
            if name in self._measured and each.values.size == place.stop - place.start:
                values[place] = each.watched.badness(each.values).ravel() - log_rate * each.watched.follows_rate
        self._note_cadence(step)
        self._note_first_losses(values)
        self._steps.append(step)
        self._values = values
        self._found = self._past.update(values)
        if not self._accumulates.any():
            return
        # The evidence of a rise is replaced by the cumulative sum where that is larger.
        found, here = self._found, self._accumulates
        sums = self._sums.update(values[here])
        is_more = sums > found.rise[here]
        found.rise[here] = np.where(is_more, sums, found.rise[here])
        window = np.clip(self._sums.n_since, 1, WINDOWS[-1])
        found.rise_window[here] = np.where(is_more, window, found.rise_window[here])

    def _note_first_losses(self, values: np.ndarray) -> None:
        """Set the smallest scale of losses from the first ones, since fluctuations of a loss near 0 are irrelevant."""
        if not self._losses.any() or len(self._first_losses) >= _N_FIRST:
            return
        self._first_losses.append(values[self._losses])
        first = np.array(self._first_losses)
        known = np.isfinite(first).any(axis=0)
        middle = np.nanmedian(np.where(known, first, 0.0), axis=0)
        least = np.where(known, _FRACTION_OF_FIRST * np.abs(middle), 0.0)
        self._least_scale[self._losses] = np.maximum(self._least_scale[self._losses], least)
        self._past.least_scale[self._losses] = self._least_scale[self._losses]

    def reading(self, name: str, step: int) -> Reading:
        """Return the reading of a signal of the group, not yet adjusted to the learning rate."""
        each, place, found = self._signals[name], self._places[name], self._found
        watched, n = each.watched, place.stop - place.start
        of_rise, of_fall = found.rise[place] - math.log10(n), found.fall[place] - math.log10(n)
        windows = found.rise_window[place], found.fall_window[place]
        is_worse = np.ones(n, dtype=bool)
        if watched.is_bad_both_ways:
            is_worse = ~(of_fall > of_rise)
            of_rise = np.fmax(of_rise, of_fall) - math.log10(2)
        is_finite = np.isfinite(each.values)
        is_broken = False
        if name in self._measured:
            n_finite, self._n_finite[name] = self._n_finite.get(name, 0), 0
            if is_finite.any():
                self._n_finite[name] = n_finite + 1
            else:
                least = _LEAST_LOGGED if watched.part == "monitors" else 1
                is_broken = n_finite >= least and not watched.may_be_missing
        worst = 0 if np.isnan(of_rise).all() else int(np.nanargmax(of_rise))
        where = np.unravel_index(worst, each.values.shape) if each.values.ndim else ()
        layer = -1 if not where else (int(where[0]) if each.layers is None else int(each.layers[where[0]]))
        window = int((windows[0] if is_worse[worst] else windows[1])[worst])
        return Reading(
            watched=watched,
            step=step,
            evidence=float(of_rise[worst]),
            opposite=math.nan if np.isnan(of_fall).all() else float(np.nanmax(of_fall)),
            is_evaluated=False,
            is_broken=is_broken,
            value=float(each.values.ravel()[worst]),
            is_rise=bool(is_worse[worst]) != watched.is_bad_low,
            layer=layer,
            head=int(where[1]) if len(where) > 1 else -1,
            onset=self._steps[max(0, len(self._steps) - 1 - window)],
        )


#: Parts in the order in which a recorder publishes the observations of one step: the metrics of the update come last.
_PARTS = tuple(dict.fromkeys([*(w.part for w in WATCHED if w.part != "monitors"), *SIGNALS, "monitors"]))


def observations(run: xr.DataTree) -> Iterator[Observation]:
    """Yield the observations of a recorded run that alarms receive, in their order.

    Args:
        run: Run from `workbench.open_run`.

    Raises:
        SchemaError: If the run has no monitors.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> first = next(wb.alarms.observations(run))
        >>> first.step, first.part
        (0, 'monitors')

    See Also:
        `workbench.alarms.replay`: Passes all observations of a run to alarms.
        `workbench.alarms.Observation`: One observation.
    """
    if "monitors" not in run.children:
        raise SchemaError("The run has no monitors to replay; record it with wb.train() or a wb.Recorder.")
    measured = []
    for place, name in enumerate(_PARTS):
        if name not in run.children:
            continue
        part = run.children[name].to_dataset(inherit=False).load()
        coords = {str(key): np.asarray(v.values) for key, v in part.coords.items() if "step" not in v.dims}
        values = {str(key): v.values for key, v in part.data_vars.items() if v.dims[:1] == ("step",)}
        measured += [(int(step), place, row, name, values, coords) for row, step in enumerate(part["step"].values)]
    measured.sort(key=lambda found: found[:2])
    settings = _of_events(run)
    for step, place, row, name, values, coords in measured:
        if name != "monitors" or values.get("examined", np.ones(len(measured)))[row] != 0:
            yield Observation(step, name, {key: value[row] for key, value in values.items()}, coords)
        while place == len(_PARTS) - 1 and settings and settings[0].step <= step:
            yield settings.pop(0)


def _of_events(run: xr.DataTree) -> list[Observation]:
    """Return changes of settings and broken contracts, which a run stores as events, by their steps."""
    if "events" not in run.children or "source" not in run.children["events"]:
        return []
    events = run.children["events"].to_dataset()
    rows = zip(*(events[name].values.tolist() for name in ("kind", "step", "source", "score", "message")), strict=True)
    found = []
    for kind, step, source, score, message in rows:
        if kind == "setting":
            found.append(changed_setting(step, source, score, message))
        elif kind == "alarm" and source.startswith(OF_CONTRACT):
            found.append(broken_contract(step, source.removeprefix(OF_CONTRACT), message))
    return sorted(found, key=lambda each: each.step)
