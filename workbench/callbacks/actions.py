"""Actions that an alarm may trigger in a run: off by default, and each one recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from workbench.errors import OptionError

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm, Attribution
    from workbench.callbacks.kss import KSS

#: Kinds of action, in the order in which they are carried out.
KINDS = ("roll_back", "auxiliary_loss", "kss", "cut_rate", "stop")
#: Kinds of action for each attributed cause. A rate that is too high and a batch that is too small are the same
#: ratio; bad data are skipped. Wrong arithmetic, wrong gradients and a loader that repeats itself are bugs, which
#: smaller steps would hide: the run stops, and the alarm says what to mend. A changed setting that is no known fault
#: is reported only.
POLICY: Mapping[str, tuple[str, ...]] = {
    "large_rate": ("roll_back", "cut_rate"),
    "small_batch": ("cut_rate",),
    "no_auxiliary_loss": ("auxiliary_loss",),
    "corrupted_data": ("roll_back",),
    "low_precision_attention": ("stop",),
    "arithmetic": ("stop",),
    "low_precision_reduction": ("stop",),
    "stale_reduction": ("stop",),
    "dropped_bucket": ("stop",),
    "repeated_data": ("stop",),
    "changed_setting": (),
}
#: Kinds of action for every other cause.
OTHERWISE = ("roll_back", "cut_rate")


@dataclass(frozen=True)
class Action:
    """An action that was carried out.

    Attributes:
        kind: Kind of action, one of ``KINDS``.
        step: Updates done before it.
        message: Description in plain words.
    """

    kind: str
    step: int
    message: str


@dataclass(frozen=True)
class ActionRequest:
    """The request of an alarm to the training loop; several kinds at a time, carried out in the order of ``KINDS``.

    Attributes:
        kinds: Requested kinds of action, of ``KINDS``.
        alarm: Alarm that made the request.
        attribution: Its attribution; None if there is none.
        onset: Last step before the signal changed; None: not known.
    """

    kinds: tuple[str, ...]
    alarm: Alarm
    attribution: Attribution | None
    onset: int


@dataclass(kw_only=True)
class Actions:
    """The actions that alarms may trigger; ``train(..., recorder=, alarms=, actions=Actions())``.

    Attributes:
        policy: Cause -> kinds of action, of ``KINDS``; causes that it does not name get ``otherwise``.
        otherwise: Kinds of action for a cause that the policy does not name.
        cut_rate: Factor on the learning rate of each cut, below 1.
        lowest_rate: Smallest share of the planned rate that cuts may reach.
        kss: The run's own KSS, for ``"kss"``, which switches it on, or makes it stronger if it is on.
        kss_factor: Factor on its strength if it is on.
        skip: Batches left out after a roll-back, so that the data of the bad stretch are not used again.
        wait: Steps from the first alarm to the action, so that there is more evidence; an alarm of the loss or
            the gradients, or one at ten times its threshold, does not wait.
        rest: Steps after an action in which no alarm is raised, while the run recovers.
        n_most: Largest number of actions in a run.
        reacts_to_outcome: Whether alarms of loss and gradient norm trigger actions too.
        call: Function called with each `ActionRequest` first; the kinds of action that it returns replace the policy's;
            None keeps those.

    Raises:
        OptionError: If a kind is unknown or a number out of range.

    Example:
        >>> import workbench as wb
        >>> actions = wb.Actions(policy={"large_rate": ["roll_back", "cut_rate"]}, otherwise=["stop"], cut_rate=0.5)
        >>> sorted(actions.kinds)
        ['cut_rate', 'roll_back', 'stop']
    """

    policy: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(POLICY))
    otherwise: Sequence[str] = OTHERWISE
    cut_rate: float = 0.1
    lowest_rate: float = 0.01
    kss: KSS | None = None
    kss_factor: float = 2.0
    skip: int = 0
    wait: int = 0
    rest: int = 60
    n_most: int = 5
    reacts_to_outcome: bool = True
    call: Callable[[ActionRequest], Sequence[str] | None] | None = None
    done: list[Action] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.policy = dict(self.policy)
        for kinds in (*self.policy.values(), self.otherwise):
            _check_kinds(kinds)
        for name in ("cut_rate", "lowest_rate"):
            if not 0 < getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected a factor above 0 and below 1.")
        if not isinstance(self.kss_factor, Real) or self.kss_factor <= 1:
            raise OptionError(f"kss_factor is {self.kss_factor}, expected more than 1.")
        for name, least in (("skip", 0), ("wait", 0), ("rest", 0), ("n_most", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}, expected at least {least}.")
        if "kss" in self.kinds and self.kss is None:
            raise OptionError("The action 'kss' needs to know which KSS; pass kss=, the one that the run has.")

    @property
    def kinds(self) -> set[str]:
        """Every kind of action that may be requested."""
        return {kind for kinds in (*self.policy.values(), self.otherwise) for kind in kinds}

    def answer(self, alarm: Alarm, attribution: Attribution | None, onset: int) -> ActionRequest | None:
        """The kinds of action for an alarm; None: nothing.

        Raises:
            OptionError: If ``call`` returns an unknown kind.
        """
        if alarm.is_outcome and not self.reacts_to_outcome:
            return None
        cause = "" if attribution is None else attribution.cause
        kinds = tuple(self.policy.get(cause, self.otherwise))
        request = ActionRequest(kinds, alarm, attribution, onset)
        if self.call is not None and (own := self.call(request)) is not None:
            _check_kinds(own)
            request = ActionRequest(tuple(own), alarm, attribution, onset)
        return request if request.kinds else None


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in KINDS:
            raise OptionError(f"There is no action '{kind}', expected some of {', '.join(KINDS)}.")
