"""Whether one setting of a run has changed: rules for what never changes, for batch sizes and for terms of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from workbench.formatting import listed

#: Numbers that differ by less than this share are the same: one may have been kept in float32.
_ROUNDING = 1e-6
#: A scheduled option changes from one step to the next by at most this multiple of its largest change so far.
_GROWTH = 3.5
#: Tolerated number of coincidences, in the whole run, of odd batches that follow each other.
_COINCIDENCES = 0.05
#: What a change of a batch is taken to have lasted: changing back counts as soon as it has been seen twice.
_TRUSTED = 20
#: Latest values of a loss, at least so many, of which none is below this share of the largest: it does not come near 0.
_N_RECENT, _N_LEAST, _FAR_FROM_ZERO = 50, 10, 0.1


class Moment(NamedTuple):
    """When a setting is observed.

    Attributes:
        step: Updates done before.
        is_resumed: Whether the run was resumed since the last observation.
        noted: Rates that the scheduler has noted in the optimizer's group.
    """

    step: int
    is_resumed: bool = False
    noted: Sequence[float] = ()


class Found(NamedTuple):
    """An unplanned change that has not been reported yet.

    Attributes:
        before: Value before it.
        since: First step with the new value.
    """

    before: Any
    since: int


@dataclass
class ConstantRule:
    """Any change is reported, unless it is a schedule that has moved a number since the first step.

    A number that moves at the first two observations after its first is scheduled, as the momentum of a one-cycle
    schedule is. Then a change is what exceeds its largest change so far by more than 3.5 times. A number that moves
    only once there is reported one observation late.

    Attributes:
        value: The latest value: a number, a text, a truth value or a list of them.
        can_be_scheduled: Whether it may move at all.
    """

    reason: ClassVar[str] = ""

    value: Any
    can_be_scheduled: bool = True
    n_seen: int = 1
    #: Value and step of a first move, which may begin a schedule.
    moved_from: Any = None
    moved_at: int = -1
    #: Largest change of a scheduled number; 0: it is not scheduled.
    largest: float = 0.0
    is_moving: bool = False

    def update(self, value: Any, moment: Moment) -> Found | None:
        """Process the value at a step."""
        if value == self.value and self.n_seen > 3 and not self.is_moving:
            return None
        before, size = self.value, _distance(self.value, value)
        self.n_seen += 1
        if self.largest:
            self.value = value
            return self._judged(size > _GROWTH * self.largest, before, size, moment)
        if self.n_seen == 2 and self.can_be_scheduled and 0 < size < math.inf:
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
        return self._judged(True, before, size, moment)

    def _judged(self, is_change: bool, before: Any, size: float, moment: Moment) -> Found | None:
        is_new = is_change and not self.is_moving
        self.is_moving = is_change
        if self.largest and not is_change:
            self.largest = max(self.largest, size)
        return Found(before, moment.step) if is_new else None


@dataclass
class BatchRule:
    """A size of batches that lasts is reported; an odd batch now and then, as at the end of an epoch, is none.

    A new size lasts once it has come so often in a row that chance, at the share of odd batches so far, would bring
    that about fewer than 0.05 times in the whole run: twice, where the last 20 batches and all before were equal; 3 or
    4 times, where each epoch of 20 batches ends with a smaller one. Where odd batches are half of all, as with packed
    sequences, there is no usual size and nothing to report. It knows nothing of the sizes to come, so a growth of
    the batch by plan needs that plan.

    Attributes:
        usual: The usual size.
    """

    reason: ClassVar[str] = "it has stayed there"

    usual: float
    n_seen: int = 1
    n_odd: int = 0
    #: By how much usual sizes outnumber odd ones (the majority vote of Boyer and Moore).
    lead: int = 1
    #: The latest odd size, how often it has come in a row, and since which step.
    odd: float = math.inf
    n_in_a_row: int = 0
    since: int = -1

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the size at a step."""
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
            self._begin(value, n_seen=max(_TRUSTED, self.n_in_a_row))
            return Found(before, since)
        if self.lead < 0:
            self._begin(value, n_seen=1)
        return None

    def _n_needed(self) -> float:
        """How often an odd size must come in a row."""
        n_before = self.n_seen - self.n_in_a_row
        share = (self.n_odd - self.n_in_a_row + 1) / (n_before + 1)
        if share >= 0.5:
            return math.inf
        return max(2, math.ceil(math.log(_COINCIDENCES / n_before) / math.log(share)))

    def _begin(self, value: float, *, n_seen: int) -> None:
        self.usual, self.n_seen, self.lead, self.n_odd, self.n_in_a_row = value, n_seen, n_seen, 0, 0


@dataclass
class LossTermRule:
    """A term of the loss that is 0 or missing, after its values were far from 0, is reported at once; so is its return.

    Terms that come near 0 by themselves, such as a penalty of what exceeds a limit, and terms that are added at some
    steps only, are not judged: of the last 50 values, and of at least 10, none may be below a tenth of the largest.

    Attributes:
        recent: The latest values; 0 where it was missing.
        lost: Its usual value, if its loss has been reported; 0 otherwise.
    """

    reason: ClassVar[str] = "it was far from 0 in every step before"

    recent: list[float] = field(default_factory=list)
    lost: float = 0.0

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step; NaN: it is missing."""
        size = 0.0 if math.isnan(value) else abs(value)
        if self.lost:
            if size == 0:
                return None
            self.lost, self.recent = 0.0, [size]
            return Found(0.0, moment.step)
        is_far = len(self.recent) >= _N_LEAST and min(self.recent) >= _FAR_FROM_ZERO * max(self.recent) > 0
        if size == 0 and is_far:
            self.lost = self.recent[-1]
            return Found(self.lost, moment.step)
        self.recent = [*self.recent[1 - _N_RECENT :], size]
        return None


def _is_same(before: Any, value: Any) -> bool:
    if before == value:
        return True
    if isinstance(before, list) and isinstance(value, list) and len(before) == len(value):
        return all(map(_is_same, before, value))
    if not (_is_number(before) and _is_number(value)) or (isinstance(before, int) and isinstance(value, int)):
        return False
    return math.isclose(before, value, rel_tol=_ROUNDING)


def _distance(before: Any, value: Any) -> float:
    """By how much numbers differ, the largest where they are several; infinite where it is no question of size."""
    if before == value:
        return 0.0
    if isinstance(before, list) and isinstance(value, list) and len(before) == len(value):
        return max(map(_distance, before, value))
    if not (_is_number(before) and _is_number(value)) or (isinstance(before, int) and isinstance(value, int)):
        return math.inf
    return abs(before - value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
