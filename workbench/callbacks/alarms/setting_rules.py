"""Rules that detect unplanned changes of one setting: of constants, batch sizes and terms of the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Numbers with a smaller relative difference are equal: one of them may have been stored in float32.
_ROUNDING = 1e-6
#: Largest change of a scheduled number in one step, as a multiple of its largest recent change, and factor by which
#: that largest change decays at each step.
_GROWTH, _FORGETTING = 3.5, 0.99
#: Tolerated expected number of coincidental sequences of batches of another size in a run.
_COINCIDENCES = 0.01
#: Number of batches after which the usual size is considered known.
_KNOWN = 20
#: Most updates between two observations whose changes are divided among them.
_LONGEST_GAP = 1000
#: Number of recent values of a loss, smallest sufficient number of them, and ratio of their mean to their standard
#: deviation above which they are far from 0.
_N_RECENT, _N_LEAST, _FAR_FROM_ZERO = 50, 10, 5.0


class Moment(NamedTuple):
    """Circumstances in which a setting is observed."""

    step: int
    is_resumed: bool = False
    noted: Sequence[float] = ()


class Found(NamedTuple):
    """An unplanned change that has not been reported yet."""

    before: Any
    since: int
    is_back: bool = False


@dataclass
class ConstantRule:
    """Rule for constants: every change is reported, unless a schedule has moved the number since the first step.

    A number that changes at both its second and its third observation is scheduled, like the momentum of a one-cycle
    schedule. Only changes larger than 3.5 times its largest recent change are then reported. A number that changes at
    only one of the two is reported one observation late.
    """

    value: Any
    n_seen: int = 1
    #: Value before and step of a first change, which may begin a schedule.
    moved_from: Any = None
    moved_at: int = -1
    #: Largest recent change of a scheduled number; 0 if it is not scheduled.
    largest: float = 0.0
    is_moving: bool = False

    def update(self, value: Any, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        if value == self.value and self.n_seen > 3 and not self.is_moving:
            return None
        before, size = self.value, _distance(self.value, value)
        self.n_seen += 1
        if self.largest:
            self.value = value
            return self._report(size > _GROWTH * self.largest, before, size, moment)
        if self.n_seen == 2 and 0 < size < math.inf:
            self.value, self.moved_from, self.moved_at = value, before, moment.step
            return None
        if self.n_seen == 3 and self.moved_at >= 0:
            self.value, first = value, self.moved_from
            if 0 < size < math.inf:
                self.largest = max(size, _distance(first, before))
                return None
            return None if _is_same(first, value) else Found(first, self.moved_at)
        if _is_same(before, value):
            self.is_moving = False
            return None
        self.value = value
        return self._report(True, before, size, moment)

    def _report(self, is_change: bool, before: Any, size: float, moment: Moment) -> Found | None:
        """Return the change if it is one and does not continue a reported change."""
        is_new = is_change and not self.is_moving
        self.is_moving = is_change
        if self.largest and not is_change:
            self.largest = max(_FORGETTING * self.largest, size)
        return Found(before, moment.step) if is_new else None


@dataclass
class OneWayRule:
    """Rule for values that may change in one direction, which counts as intended, such as when layers thaw.

    Numbers of trained parameters may rise. Lists of tensors with which something is wrong, as text, may end ("none"),
    and only their begin is reported.
    """

    value: Any

    def update(self, value: Any, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        before, self.value = self.value, value
        if value == before or (isinstance(value, str) and "none" not in (before, value)):
            return None
        return Found(before, moment.step, is_back=value == "none" if isinstance(value, str) else value > before)


@dataclass
class PlannedRule:
    """Rule for numbers with a plan, by their ratio to it: every departure and every return is reported."""

    ratio: float
    #: The first ratio of the run.
    first: float = math.nan
    is_moving: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.first):
            self.first = self.ratio

    @property
    def is_back(self) -> bool:
        """Whether the number follows its plan, by the first ratio, or by 1 after a resume in the middle of a change."""
        return _is_same(self.ratio, self.first) or _is_same(self.ratio, 1.0)

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        before, is_new = self.ratio, not self.is_moving
        self.is_moving = not _is_same(before, value)
        if not self.is_moving:
            return None
        self.ratio = value
        # A change that continues is reported once, but its end is always reported.
        return Found(before, moment.step, self.is_back) if is_new or self.is_back else None


@dataclass
class BatchRule:
    """Rule for batch sizes: a new size is reported if it persists, but not single batches of another size.

    The last batch of an epoch, for example, is often smaller. The first 20 batches are not evaluated. If all earlier
    sizes were equal, a new size persists once it has occurred twice in a row. Otherwise it must occur so often in a row
    that only 0.01 such sequences are expected by chance in the run, given the fraction of batches of another size so
    far: 5 times if epochs of 20 batches end with a smaller one. If half of all batches have another size, as with
    packed sequences, there is no usual size and nothing is reported. A batch size that grows by a plan needs that plan.
    """

    usual: float
    n_seen: int = 1
    n_odd: int = 0
    #: Number of batches of the usual size minus that of other sizes (the majority vote of Boyer and Moore).
    lead: int = 1
    #: The latest other size, how often it has occurred in a row, and the first step of that sequence.
    odd: float = -1.0
    n_in_a_row: int = 0
    since: int = -1

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        self.n_seen += 1
        if _is_same(value, self.usual):
            self.lead += 1
            self.n_in_a_row = 0
            return None
        self.lead -= 1
        self.n_odd += 1
        if not (self.n_in_a_row and _is_same(value, self.odd)):
            self.odd, self.n_in_a_row, self.since = value, 0, moment.step
        self.n_in_a_row += 1
        if self.n_in_a_row >= self._n_needed():
            before, since = self.usual, self.since
            self.n_seen = self.lead = max(_KNOWN, self.n_in_a_row)  # a change back is reported after two batches, too
            self.usual, self.n_odd, self.n_in_a_row = value, 0, 0
            return Found(before, since)
        if self.lead < 0:
            self.usual, self.lead, self.n_in_a_row = value, 1, 0
        return None

    def _n_needed(self) -> float:
        """Return how often another size must occur in a row to be reported."""
        n_before, n_odd = self.n_seen - self.n_in_a_row, self.n_odd - self.n_in_a_row
        if n_before < _KNOWN:
            return math.inf
        if n_odd == 0:
            return 2
        fraction = (n_odd + 2 * math.sqrt(n_odd) + 1) / (n_before + 1)  # an upper estimate
        if fraction >= 0.5:
            return math.inf
        return max(2, math.ceil(math.log(_COINCIDENCES / n_before) / math.log(fraction)))


@dataclass
class LossTermRule:
    """Rule for terms of the loss: reports immediately when a term that was far from 0 vanishes, and when it returns.

    Terms that approach 0 by themselves, such as a penalty on values above a limit, and terms that are added only at
    some steps are not evaluated: the mean of the last 10 to 50 values must exceed 5 of their standard deviations.
    """

    #: The latest value; 0 if the term is missing.
    value: float
    recent: list[float] = field(default_factory=list)
    #: Whether the disappearance of the term has been reported.
    is_lost: bool = False

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        before, self.value = self.value, value
        if self.is_lost:
            self.is_lost = value == 0
            return None if self.is_lost else Found(0.0, moment.step, is_back=True)
        self.recent = [*self.recent[1 - _N_RECENT :], before]
        if value != 0 or len(self.recent) < _N_LEAST:
            return None
        mean = math.fsum(self.recent) / len(self.recent)
        variance = math.fsum((each - mean) ** 2 for each in self.recent) / len(self.recent)
        ratio = abs(mean) / math.sqrt(variance) if variance else math.inf if mean else 0.0
        if not ratio > _FAR_FROM_ZERO:
            return None
        self.recent, self.is_lost = [], True
        return Found(before, moment.step)


def _is_same(before: Any, value: Any) -> bool:
    if before == value:
        return True
    if isinstance(before, list) and isinstance(value, list) and len(before) == len(value):
        return all(map(_is_same, before, value))
    if not (_is_number(before) and _is_number(value)) or (isinstance(before, int) and isinstance(value, int)):
        return False
    return math.isclose(before, value, rel_tol=_ROUNDING)


def _distance(before: Any, value: Any) -> float:
    """Return the largest difference between numbers; infinite for values that are not real numbers of one shape."""
    if before == value:
        return 0.0
    if isinstance(before, list) and isinstance(value, list) and len(before) == len(value):
        return max(map(_distance, before, value))
    if not (_is_number(before) and _is_number(value)) or (isinstance(before, int) and isinstance(value, int)):
        return math.inf
    return abs(before - value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


#: Rates that differ by less than this fraction of the highest rate are equal: rounding to float32 changes them by less.
_SAME_RATE = 1e-7
#: Relative tolerance of comparisons between two rates.
_MARGIN = 1e-3
#: Largest rise of a ramp in one step, as a fraction of the highest rate.
_RAMP = 0.01
#: Largest rise of a ramp after the end of a fall, as a multiple of the fastest ramp so far.
_AS_FAST = 1.25
#: Largest ratio of a change to the previous one, and the larger ratios of the first rises of a curved warm-up.
_GROWTH_OF_RATE, _FIRST_GROWTHS = 2.5, (math.inf, 8.0, 3.0)
#: Largest rise right after a fall, as a multiple of that fall.
_TURN = 5.0
#: A fall has slowed down if it is below this fraction of the steepest one, both relative to the rate.
_SLOW = 0.1
#: Observations without a rise that end a warm-up; if it has paused before, twice the longest pause.
_PAUSE = 10
#: Largest factor by which a schedule falls in one step, and fraction of the highest rate above which a fall is a large
#: one.
_DROP, _LARGE_FALL = 20.0, 0.1
#: Relative tolerance within which two steps belong to one straight line.
_STRAIGHT = 0.01
#: A change back ends within this fraction of the change from the schedule, both as logarithms.
_NEAR = 0.25
#: A rate that was set to 0 is back if it exceeds this fraction of the rate before.
_BACK = 0.5
#: Larger rates, also infinite ones, are replaced by this one, and negative ones by 0.
_HUGE = 1e30
#: Observations of the earlier run from which on a resumed run is compared with it.
_N_KNOWN = 10


@dataclass
class RateRule:
    """Rule for one learning rate without a known plan: reports changes that no schedule makes.

    The following changes count as planned:

    - a warm-up: rises from the first observation on, each at most 2.5 times the previous one, until the rate falls or
      pauses for longer than before;
    - every fall in small steps, and a fall in one step by a factor of up to 20, as in step and plateau schedules;
    - a rise in one step to the highest rate so far (a restart), or to a rate that the scheduler has stored in the
      optimizer's group; until that stored rate is reached, any rise up to it after a pause (a warm-up by epochs);
    - below the highest rate: a rise that undoes the last change; a step as large as the fastest ramp so far, or half as
      large; a rise of at most 5 times the fall before it; and, after a fall in small steps that has slowed down or
      stopped, a ramp of at most 1 % of the highest rate per step (once it has stopped, also one as fast as before).

    Every other change is reported at its step; after a resume, also any of these that occurs in one step. A change that
    continues in the same direction is reported once. After a reported change, the schedule is assumed to continue,
    multiplied by a factor; if that factor vanishes in one step, the change back is reported. Where updates were left
    out between two observations, a change is planned as well if it is planned in equal steps over these updates.
    """

    value: float
    #: Factor by which reported changes have multiplied the schedule, and the latest rate without that factor.
    scale: float = 1.0
    level: float = -1.0
    highest: float = -1.0
    n_seen: int = 1
    #: The latest change, and the latest one that was not 0.
    change: float = 0.0
    last_change: float = 0.0
    # Warm-up
    is_warming: bool = True
    n_rises: int = 0
    pause: int = 0
    longest_pause: int = 0
    #: Whether the rate that the scheduler stored has been reached.
    has_reached: bool = False
    # Cycles: largest rise and fall that occurred twice in a row, steepest fall since the last rise (relative to the
    # rate), and whether the latest fall followed another one.
    fastest_rise: float = 0.0
    fastest_fall: float = 0.0
    steepest_fall: float = 0.0
    is_smooth_fall: bool = False
    #: Direction of a reported change that still continues, and of one that has not been undone; 0 if there is none.
    moving: int = 0
    reported: int = 0
    #: Step of the latest observation; -1 if unknown.
    step: int = -1

    def __post_init__(self) -> None:
        if self.level < 0:
            self.value = self.level = self.highest = min(max(self.value, 0.0), _HUGE)

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
        gap, before = moment.step - self.step if self.step >= 0 else 1, copy.copy(self)
        found = self._update(value, moment)
        if found is not None and 1 < gap <= _LONGEST_GAP and not moment.is_resumed:
            values = [before.value + (value - before.value) * i / gap for i in range(1, gap + 1)]
            if all(before._update(each, moment) is None for each in values):
                vars(self).update(vars(before))
                found = None
        self.step = moment.step
        return found

    def _update(self, value: float, moment: Moment) -> Found | None:
        value = min(max(value, 0.0), _HUGE)
        before, self.value = self.value, value
        self.n_seen += 1
        if self.scale == 0:  # it had been set to 0
            is_back = value > _BACK * self.level
            if value > 0:  # the change back, or else a new warm-up
                self._end_report(value)
            return Found(before, moment.step, is_back=True) if is_back else None
        level = value / self.scale
        change = level - self.level if abs(level - self.level) > _SAME_RATE * self.highest else 0.0
        direction = (change > 0) - (change < 0)
        self.is_warming &= self.pause <= max(_PAUSE, 2 * self.longest_pause)
        self.has_reached |= self.highest >= 0.9 * max(moment.noted, default=0.0)
        if self._is_change_back(change, value):
            self._end_report(value)
            return Found(before, moment.step, is_back=True)
        if self._is_planned(change, level, moment):
            self._remember(change, level, max(moment.noted, default=0.0))
            self.moving = direction if direction == self.moving else 0
            return None
        is_new = direction != self.moving
        if is_new and change > 0 and self.reported and self._is_restart(value):
            self._end_report(value)  # a restart of the schedule itself: the change had ended unnoticed
            return None
        expected = self.level + self.change if is_new else self.level
        if self.reported and level > self.highest:
            expected = self.highest
        if expected > 0:  # the schedule is assumed to continue, multiplied by a factor
            self.scale, self.level = value / expected, expected
        else:
            self.level = level
        self.moving = self.reported = direction
        return Found(before, moment.step) if is_new else None

    def _is_change_back(self, change: float, value: float) -> bool:
        """Return whether the rate returns in one step to the schedule from before a reported change."""
        if self.reported * change >= 0 or abs(change) <= max(_GROWTH_OF_RATE * abs(self.change), 0.01 * self.level):
            return False
        left, undone = abs(math.log(value / self.level)) if value else math.inf, abs(math.log(self.scale))
        return left <= _NEAR * undone

    def _end_report(self, value: float) -> None:
        self.scale, self.level, self.moving, self.reported = 1.0, value, 0, 0

    def _is_planned(self, change: float, level: float, moment: Moment) -> bool:
        if change == 0 or self.highest == 0:
            return True
        if moment.is_resumed and self.n_seen > _N_KNOWN:
            return abs(change) <= max(_RAMP * self.highest, _GROWTH_OF_RATE * abs(self.last_change))
        if change < 0:
            is_small = -change <= max(_LARGE_FALL * self.highest, _GROWTH_OF_RATE * abs(self.last_change))
            return is_small or self.level <= _DROP * level * (1 + _MARGIN)
        if any(abs(level - noted) <= _MARGIN * noted for noted in moment.noted):
            return True
        if not self.has_reached and level <= max(moment.noted, default=0.0) and self.change <= 0:
            return True
        if level <= self.highest * (1 + _MARGIN):
            return self._is_restart(level) or change <= self._largest_ramp() or self._is_known_step(change)
        if self.is_warming:
            if self.n_rises == 0:  # a warm-up starts at the beginning of the run
                return self.n_seen <= 3
            growth = _FIRST_GROWTHS[self.n_rises] if self.n_rises < len(_FIRST_GROWTHS) else _GROWTH_OF_RATE
            return change <= growth * self.last_change
        # The peak of a cycle may lie between two steps.
        return self.moving == 0 and level <= self.highest * (1 + _MARGIN) + max(0.0, self.change)

    def _is_restart(self, level: float) -> bool:
        # The first step of a cycle may lie slightly after its peak.
        return abs(level - self.highest) <= _MARGIN * self.highest + self.fastest_fall

    def _largest_ramp(self) -> float:
        """Return the largest planned step of a ramp below the highest rate."""
        if self.last_change > 0:
            return max(_RAMP * self.highest, _FIRST_GROWTHS[-1] * self.last_change)
        is_at_end = self.change == 0 or self.level <= _RAMP * self.highest
        if not is_at_end and -self.change > _SLOW * self.steepest_fall * self.level:
            return -_TURN * self.change * (1 + _MARGIN)
        if not self.is_smooth_fall:
            return 0.0
        return max(_RAMP * self.highest, _AS_FAST * self.fastest_rise if is_at_end else 0.0)

    def _is_known_step(self, rise: float) -> bool:
        known = (abs(self.last_change), self.fastest_rise, self.fastest_rise / 2)
        return any(abs(rise - size) <= _STRAIGHT * rise for size in known)

    def _remember(self, change: float, level: float, noted: float) -> None:
        """Update the state with a planned change."""
        if change > 0:
            self.longest_pause = max(self.longest_pause, self.pause)
            self.pause, self.n_rises, self.steepest_fall = 0, self.n_rises + 1, 0.0
            self.has_reached |= self.change < 0
            self.fastest_rise = max(self.fastest_rise, min(change, self.change))
        else:
            self.pause += 1
        if change < 0:
            self.is_warming = False
            self.steepest_fall = max(self.steepest_fall, -change / self.level)
            self.is_smooth_fall = self.change < 0
            if self.is_smooth_fall:
                self.fastest_fall = max(self.fastest_fall, min(-change, -self.change))
        if self.is_warming or self.highest == 0 or level <= noted * (1 + _MARGIN):
            self.highest = max(self.highest, level)
        self.level, self.change, self.last_change = level, change, change or self.last_change
