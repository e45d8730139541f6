"""Actions that alarms may trigger in a run; off by default, and each one is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from workbench.errors import OptionError, require_listed
from workbench.option_checks import NonNegativeInt, PositiveInt, above, below, checked

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm, Attribution
    from workbench.callbacks.kss import KSS

#: Kinds of action, in the order in which they are carried out.
KINDS = ("roll_back", "auxiliary_loss", "kss", "cut_rate", "stop")
#: Kinds of action for each attributed cause. A learning rate that is too high and a batch that is too small both raise
#: the ratio of rate to batch size. Bad data are skipped. Wrong arithmetic, wrong gradients and a data loader that
#: repeats batches are bugs, which smaller steps would hide: the run stops, and the alarm names what to fix. A changed
#: setting that matches no known fault is only reported.
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
#: Kinds of action for all other causes.
OTHERWISE = ("roll_back", "cut_rate")


@dataclass(frozen=True)
class Action:
    """An action that was carried out.

    Attributes:
        kind: Kind of action, one of ``KINDS``.
        step: Number of updates before it.
        message: Description as a sentence.
    """

    kind: str
    step: int
    message: str


@dataclass(frozen=True)
class ActionRequest:
    """The actions that an alarm requests from the training loop, carried out in the order of ``KINDS``.

    Attributes:
        kinds: Requested kinds of action, each one of ``KINDS``.
        alarm: Alarm that requests them.
        attribution: Attribution of the alarm; None if there is none.
        onset: Last step before the signal changed.
    """

    kinds: tuple[str, ...]
    alarm: Alarm
    attribution: Attribution | None
    onset: int


@checked
@dataclass(kw_only=True)
class Actions:
    """The actions that alarms may trigger: ``wb.train(..., recorder=, alarms=, actions=wb.Actions())``.

    The kinds of action are ``"roll_back"`` (restore the last checkpoint before the onset), ``"auxiliary_loss"``
    (switch the auxiliary loss on again), ``"kss"`` (switch KSS on or strengthen it), ``"cut_rate"`` (reduce the
    learning rate) and ``"stop"``. The actions of one request are carried out in this order.

    Attributes:
        policy: Mapping from cause to kinds of action.
        otherwise: Kinds of action for a cause that the policy does not name.
        cut_rate: Factor by which each cut multiplies the learning rate, below 1.
        lowest_rate: Smallest fraction of the planned learning rate that cuts may reach.
        kss: KSS of the run, for the action ``"kss"``; None if there is none.
        kss_factor: Factor by which the action ``"kss"`` multiplies the strength if KSS is on already.
        skip: Number of batches to skip after a roll-back, so that the data after the onset are not used again.
        wait: Steps from the first alarm to the action, in which more evidence is collected. An alarm of the loss or of
            the gradient norm, or one at ten times its threshold, does not wait.
        rest: Steps after an action in which no alarm is raised, while the run recovers.
        n_most: Maximum number of actions in a run.
        reacts_to_outcome: Whether alarms of the loss and of the gradient norm trigger actions too.
        call: Function called with each `ActionRequest` before it is carried out. The kinds of action that it returns
            replace those of the policy; if it returns None, the policy applies.
        done: Actions carried out so far.

    Raises:
        OptionError: If a kind of action is unknown or a number is out of range.

    Example:
        >>> import workbench as wb
        >>> actions = wb.Actions(policy={"large_rate": ["roll_back", "cut_rate"]}, otherwise=["stop"], cut_rate=0.5)
        >>> sorted(actions.kinds)
        ['cut_rate', 'roll_back', 'stop']

    See Also:
        `workbench.Alarms`: Raises the alarms.
        `workbench.Recorder`: Measures what the alarms observe.
        `workbench.train`: Carries out the actions.
    """

    policy: Mapping[str, str | Sequence[str]] = field(default_factory=lambda: dict(POLICY))
    otherwise: str | Sequence[str] = OTHERWISE
    cut_rate: Annotated[float, above(0), below(1)] = 0.1
    lowest_rate: Annotated[float, above(0), below(1)] = 0.01
    kss: KSS | None = None
    kss_factor: Annotated[float, above(1)] = 2.0
    skip: NonNegativeInt = 0
    wait: NonNegativeInt = 0
    rest: NonNegativeInt = 60
    n_most: PositiveInt = 5
    reacts_to_outcome: bool = True
    call: Callable[[ActionRequest], Sequence[str] | None] | None = None
    done: list[Action] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.policy = {cause: _checked_kinds("policy", kinds) for cause, kinds in self.policy.items()}
        self.otherwise = _checked_kinds("otherwise", self.otherwise)
        if "kss" in self.kinds and self.kss is None:
            raise OptionError(
                "The action 'kss' acts on the KSS of the run, but kss is None; pass Actions(kss=), the same object as "
                "in wb.train(kss=)."
            )

    @property
    def kinds(self) -> set[str]:
        """All kinds of action that the policy may request."""
        return {kind for kinds in (*self.policy.values(), self.otherwise) for kind in kinds}

    def answer(self, alarm: Alarm, attribution: Attribution | None, onset: int) -> ActionRequest | None:
        """Return the actions that an alarm requests; None if it requests none.

        Args:
            alarm: The alarm.
            attribution: Attribution of the alarm; None if there is none.
            onset: Last step before the signal changed.

        Raises:
            OptionError: If ``call`` returns an unknown kind of action.
        """
        if alarm.is_outcome and not self.reacts_to_outcome:
            return None
        cause = "" if attribution is None else attribution.cause
        kinds = tuple(self.policy.get(cause, self.otherwise))
        request = ActionRequest(kinds, alarm, attribution, onset)
        if self.call is not None and (replaced := self.call(request)) is not None:
            request = ActionRequest(_checked_kinds("call", replaced), alarm, attribution, onset)
        return request if request.kinds else None


def _checked_kinds(name: str, kinds: str | Sequence[str]) -> tuple[str, ...]:
    """Return kinds of action, of which a string is one; raise `OptionError` if one is unknown."""
    checked = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    require_listed(name, checked, KINDS)
    return checked
