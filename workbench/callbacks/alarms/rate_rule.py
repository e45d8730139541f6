"""Detection of learning rates that do not follow a schedule, from their own past alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from workbench.callbacks.alarms.setting_rules import Found, Moment

#: Rates that differ by less than this fraction of the highest rate are equal: rounding to float32 changes them by less.
_ROUNDING = 1e-7
#: Relative tolerance of comparisons between two rates.
_MARGIN = 1e-3
#: Largest rise of a ramp in one step, as a fraction of the highest rate.
_RAMP = 0.01
#: Largest rise of a ramp after the end of a fall, as a multiple of the fastest ramp so far.
_AS_FAST = 1.25
#: Largest ratio of a change to the previous one, and the larger ratios of the first rises of a curved warm-up.
_GROWTH, _FIRST_GROWTHS = 2.5, (math.inf, 8.0, 3.0)
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
    multiplied by a factor; if that factor vanishes in one step, the change back is reported.

    Attributes:
        value: The latest rate.
        highest: Highest planned rate.
    """

    reason: ClassVar[str] = "no schedule seen so far explains it"

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

    def __post_init__(self) -> None:
        if self.level < 0:
            self.value = self.level = self.highest = min(max(self.value, 0.0), _HUGE)

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the rate at a step, and return a change to report or None."""
        value = min(max(value, 0.0), _HUGE)
        before, self.value = self.value, value
        self.n_seen += 1
        if self.scale == 0:  # it had been set to 0
            is_back = value > _BACK * self.level
            if value > 0:  # the change back, or else a new warm-up
                self._end_report(value)
            return Found(before, moment.step, is_back=True) if is_back else None
        level = value / self.scale
        change = level - self.level if abs(level - self.level) > _ROUNDING * self.highest else 0.0
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
        if self.reported * change >= 0 or abs(change) <= max(_GROWTH * abs(self.change), 0.01 * self.level):
            return False
        left, undone = abs(math.log(value / self.level)) if value else math.inf, abs(math.log(self.scale))
        return left <= _NEAR * undone

    def _end_report(self, value: float) -> None:
        self.scale, self.level, self.moving, self.reported = 1.0, value, 0, 0

    def _is_planned(self, change: float, level: float, moment: Moment) -> bool:
        if change == 0 or self.highest == 0:
            return True
        if moment.is_resumed and self.n_seen > _N_KNOWN:
            return abs(change) <= max(_RAMP * self.highest, _GROWTH * abs(self.last_change))
        if change < 0:
            is_small = -change <= max(_LARGE_FALL * self.highest, _GROWTH * abs(self.last_change))
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
            growth = _FIRST_GROWTHS[self.n_rises] if self.n_rises < len(_FIRST_GROWTHS) else _GROWTH
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
