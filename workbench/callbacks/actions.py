"""What an alarm may trigger in a run: off unless asked for, every one recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from workbench.errors import OptionError

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm, Attribution
    from workbench.callbacks.kss import KSS

#: In the order in which they are carried out.
KINDS = ("roll_back", "auxiliary_loss", "kss", "cut_rate", "stop")
#: What to do against what the alarm is put down to. A rate that is too high and a batch that is too small are the same
#: ratio; data are left behind; what is wrong in the arithmetic does less harm in smaller steps.
POLICY: Mapping[str, tuple[str, ...]] = {
    "large_rate": ("roll_back", "cut_rate"),
    "small_batch": ("cut_rate",),
    "no_auxiliary_loss": ("auxiliary_loss",),
    "corrupted_data": ("roll_back",),
    "low_precision_attention": ("roll_back", "cut_rate"),
}
#: Against everything else.
OTHERWISE = ("roll_back", "cut_rate")


@dataclass(frozen=True)
class Action:
    """One thing that was done.

    Attributes:
        kind: One of ``KINDS``.
        step: Updates done when it was done.
        message: In plain words.
    """

    kind: str
    step: int
    message: str


@dataclass(frozen=True)
class ActionRequest:
    """What an alarm asks the loop for; several kinds at a time, carried out in the order of ``KINDS``.

    Attributes:
        kinds: Some of ``KINDS``.
        alarm: The alarm that asked.
        attribution: What it was put down to; None where nothing can be said.
        onset: The last step before the signal changed, as far as it is known.
    """

    kinds: tuple[str, ...]
    alarm: Alarm
    attribution: Attribution | None
    onset: int


@dataclass(kw_only=True)
class Actions:
    """What alarms may trigger; ``train(..., recorder=, alarms=, actions=Actions())``.

    Attributes:
        policy: Cause -> kinds of action, of ``KINDS``; what it does not name gets ``otherwise``.
        otherwise: Against a cause that the policy does not name.
        cut_rate: Factor on the learning rate of each cut, below 1.
        lowest_rate: Share of the planned rate below which no cut goes.
        kss: For ``"kss"``: switched on, or made stronger where it is on. It must be the run's own.
        kss_factor: By which its strength grows where it is on.
        skip: Batches left out after a roll-back, so that the data of the bad stretch are not met again.
        wait: Steps from the first alarm to the action, so that it is clearer what is wrong; an alarm of the loss or
            the gradients, or one at ten times its threshold, does not wait.
        rest: Steps after an action in which no alarm sounds, while the run finds its way.
        n_most: Actions on alarms after which there are no more.
        reacts_to_outcome: Whether alarms of loss and gradient norm trigger too.
        call: Called with each `ActionRequest` first; the kinds of action that it returns replace the policy's; None
            keeps those.

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
        """Every kind of action that may be asked for."""
        return {kind for kinds in (*self.policy.values(), self.otherwise) for kind in kinds}

    def answer(self, alarm: Alarm, attribution: Attribution | None, onset: int) -> ActionRequest | None:
        """What to do about an alarm; None: nothing.

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
