"""Rules that detect unplanned changes of one setting: of constants, batch sizes and terms of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

#: Numbers with a smaller relative difference are equal: one of them may have been stored in float32.
_ROUNDING = 1e-6
#: Largest change of a scheduled number in one step, as a multiple of its largest recent change, and factor by which
#: that largest change decays at each step.
_GROWTH, _FORGETTING = 3.5, 0.99
#: Tolerated expected number of coincidental sequences of batches of another size in a run.
_COINCIDENCES = 0.01
#: Number of batches after which the usual size is considered known.
_KNOWN = 20
#: Number of recent values of a loss, smallest sufficient number of them, and ratio of their mean to their standard
#: deviation above which they are far from 0.
_N_RECENT, _N_LEAST, _FAR_FROM_ZERO = 50, 10, 5.0


class Moment(NamedTuple):
    """Circumstances in which a setting is observed.

    Attributes:
        step: Updates done before.
        is_resumed: Whether the run was resumed since the last observation.
        noted: Learning rates that the scheduler has stored in the optimizer's group.
    """

    step: int
    is_resumed: bool = False
    noted: Sequence[float] = ()


class Found(NamedTuple):
    """An unplanned change that has not been reported yet.

    Attributes:
        before: Value before the change.
        since: First step with the new value.
        is_back: Whether the setting has returned to its value before an earlier change.
    """

    before: Any
    since: int
    is_back: bool = False


@dataclass
class ConstantRule:
    """Rule for constants: every change is reported, unless a schedule has moved the number since the first step.

    A number that changes at both its second and its third observation is scheduled, like the momentum of a one-cycle
    schedule. Only changes larger than 3.5 times its largest recent change are then reported. A number that changes at
    only one of the two is reported one observation late.

    Attributes:
        value: The latest value: a number, a string, a bool or a list of them.
    """

    reason: ClassVar[str] = ""

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
class GrowingRule:
    """Rule for numbers of trained parameters: a fall is reported, a rise counts as intended, as when layers thaw.

    Attributes:
        value: The latest number.
    """

    reason: ClassVar[str] = ""

    value: float

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the number at a step, and return a change to report or None."""
        before, self.value = self.value, value
        return None if value == before else Found(before, moment.step, is_back=value > before)


@dataclass
class TensorRule:
    """Rule for lists of tensors with which something is wrong, as text: the first one is reported, and its end "none".

    Attributes:
        value: The latest list.
    """

    reason: ClassVar[str] = (
        "they require a gradient, and other tensors learn: look for detach(), and for checkpointing of inputs that "
        "require no gradient"
    )

    value: Any

    def update(self, value: Any, moment: Moment) -> Found | None:
        """Process the list at a step, and return a change to report or None."""
        before, self.value = self.value, value
        is_new = "none" in (before, value) and value != before
        return Found(before, moment.step, is_back=value == "none") if is_new else None


class UnchangedRule(TensorRule):
    """The rule for tensors that have gradients but are not changed by updates."""

    reason: ClassVar[str] = (
        "they have a gradient, and other tensors learn: look whether the number format rounds their updates away, and "
        "whether the optimizer holds them"
    )


@dataclass
class PlannedRule:
    """Rule for numbers with a plan: every departure from the plan is reported, and every return to it.

    Attributes:
        ratio: The latest ratio of the number to its plan.
        first: The first ratio of the run.
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
        """Whether the number follows its plan, by the first ratio, or by 1 after a resume in the middle of a change."""
        return _is_same(self.ratio, self.first) or _is_same(self.ratio, 1.0)

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the ratio at a step, and return a change to report or None."""
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

    Attributes:
        usual: The usual size.
    """

    reason: ClassVar[str] = "it has stayed at this value"

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
        """Process the size at a step, and return a change to report or None."""
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

    Attributes:
        value: The latest value; 0 if the term is missing.
        recent: The latest values.
        is_lost: Whether the disappearance of the term has been reported.
    """

    reason: ClassVar[str] = "it was far from 0 in the steps before"

    value: float
    recent: list[float] = field(default_factory=list)
    is_lost: bool = False

    def update(self, value: float, moment: Moment) -> Found | None:
        """Process the value at a step, and return a change to report or None."""
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
