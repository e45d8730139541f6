"""Whether one setting of a run has changed: rules for what never changes, for batch sizes and for terms of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

#: Numbers that differ by less than this share are the same: one may have been kept in float32.
_ROUNDING = 1e-6
#: A scheduled number changes from one step to the next by at most this multiple of its largest recent change, which is
#: forgotten at this rate.
_GROWTH, _FORGETTING = 3.5, 0.99
#: Tolerated number of coincidences of odd batches that follow each other.
_COINCIDENCES = 0.01
#: Batches after which a usual size may be known.
_KNOWN = 20
#: Latest values of a loss, at least so many, whose mean is this multiple of their standard deviation: it is far from 0.
_N_RECENT, _N_LEAST, _FAR_FROM_ZERO = 50, 10, 5.0


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
        is_back: Whether the setting is what it was before an earlier change.
    """

    before: Any
    since: int
    is_back: bool = False


@dataclass
class ConstantRule:
    """Any change is reported, unless it is a schedule that has moved a number since the first step.

    A number that moves at the first two observations after its first is scheduled, as the momentum of a one-cycle
    schedule is. Then only what exceeds 3.5 times its largest recent change is reported. A number that moves only once
    there is reported one observation late.

    Attributes:
        value: The latest value: a number, a text, a truth value or a list of them.
    """

    reason: ClassVar[str] = ""

    value: Any
    n_seen: int = 1
    #: Value and step of a first move, which may begin a schedule.
    moved_from: Any = None
    moved_at: int = -1
    #: Largest recent change of a scheduled number; 0: it is not scheduled.
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
        return self._judged(True, before, size, moment)

    def _judged(self, is_change: bool, before: Any, size: float, moment: Moment) -> Found | None:
        is_new = is_change and not self.is_moving
        self.is_moving = is_change
        if self.largest and not is_change:
            self.largest = max(_FORGETTING * self.largest, size)
        return Found(before, moment.step) if is_new else None


@dataclass
class PlannedRule:
    """Any departure of a number from its plan is reported, and its return.

    Attributes:
        ratio: The latest ratio of the number to its plan.
        first: The ratio that the run began with.
    """

    reason: ClassVar[str] = ""

    ratio: float
    first: float = math.nan
    is_moving: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.first):
            self.first = self.ratio

    @property
    def is_back(self) -> bool:
        """Whether the number follows its plan; a run resumed in the middle of a change may begin without it."""
        return _is_same(self.ratio, self.first) or _is_same(self.ratio, 1.0)

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the ratio at a step."""
        before, is_new = self.ratio, not self.is_moving
        self.is_moving = not _is_same(before, value)
        if not self.is_moving:
            return None
        self.ratio = value
        # A change that goes on is reported once, but its end in any case.
        return Found(before, moment.step, self.is_back) if is_new or self.is_back else None


@dataclass
class BatchRule:
    """A size of batches that lasts is reported; an odd batch now and then, as at the end of an epoch, is none.

    The first 20 batches are not judged. Where all sizes before were equal, a new one lasts once it has come twice.
    Else it must come so often in a row that chance, at the share of odd batches so far, makes that 100 times less
    likely than once in the run: 5 times, where epochs of 20 batches end with a smaller one. Where odd batches are
    half of all, as with packed sequences, there is no usual size and nothing to report. The rule knows nothing of
    the sizes to come: a batch that grows by a plan needs that plan.

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
    odd: float = -1.0
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
            self.n_seen = self.lead = max(_KNOWN, self.n_in_a_row)  # the way back counts when it comes twice, too
            self.usual, self.n_odd, self.n_in_a_row = value, 0, 0
            return Found(before, since)
        if self.lead < 0:
            self.usual, self.lead, self.n_in_a_row = value, 1, 0
        return None

    def _n_needed(self) -> float:
        """How often an odd size must come in a row."""
        n_before, n_odd = self.n_seen - self.n_in_a_row, self.n_odd - self.n_in_a_row
        if n_before < _KNOWN:
            return math.inf
        if n_odd == 0:
            return 2
        share = (n_odd + 2 * math.sqrt(n_odd) + 1) / (n_before + 1)  # a little more than it was
        if share >= 0.5:
            return math.inf
        return max(2, math.ceil(math.log(_COINCIDENCES / n_before) / math.log(share)))


@dataclass
class LossTermRule:
    """A term of the loss that is 0 or missing, after its values were far from 0, is reported at once; so is its return.

    Terms that come near 0 by themselves, such as a penalty of what exceeds a limit, and terms that are added at some
    steps only, are not judged: of the last 50 values, and of at least 10, the mean must be 5 standard deviations.

    Attributes:
        value: The latest value; 0: it is missing.
        recent: The latest values.
        is_lost: Whether its loss has been reported.
    """

    reason: ClassVar[str] = "it was far from 0 in the steps before"

    value: float
    recent: list[float] = field(default_factory=list)
    is_lost: bool = False

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step."""
        before, self.value = self.value, value
        if self.is_lost:
            self.is_lost = value == 0
            return None if self.is_lost else Found(0.0, moment.step, is_back=True)
        self.recent = [*self.recent[1 - _N_RECENT :], before]
        is_far = len(self.recent) >= _N_LEAST and _mean_over_deviation(self.recent) > _FAR_FROM_ZERO
        if value != 0 or not is_far:
            return None
        self.recent, self.is_lost = [], True
        return Found(before, moment.step)


def _mean_over_deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return abs(mean) / math.sqrt(variance) if variance else math.inf if mean else 0.0


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
