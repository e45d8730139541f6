"""Actions that alarms may trigger in a run; off by default, and each one is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from workbench.errors import OptionError, require_listed
from workbench.option_checks import NonNegativeInt, PositiveInt, above, below, checked

if TYPE_CHECKING:
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


@checked
@dataclass(kw_only=True)
class Actions:
    """The actions that alarms may trigger: ``wb.train(..., recorder=, alarms=, actions=wb.Actions())``.

    The kinds of action are ``"roll_back"`` (restore the last checkpoint before the onset), ``"auxiliary_loss"``
    (switch the auxiliary loss on again), ``"kss"`` (switch KSS on, or double its strength), ``"cut_rate"`` (reduce the
    learning rate, at most to 1 % of the planned one) and ``"stop"``. They are carried out in this order.

    Attributes:
        policy: Mapping from cause to kinds of action.
        otherwise: Kinds of action for a cause that the policy does not name.
        cut_rate: Factor by which each cut multiplies the learning rate, below 1.
        kss: KSS of the run, for the action ``"kss"``; None if there is none.
        rest: Steps after an action in which no alarm is raised, while the run recovers.
        n_most: Maximum number of actions in a run.
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
    kss: KSS | None = None
    rest: NonNegativeInt = 60
    n_most: PositiveInt = 5
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


def _checked_kinds(name: str, kinds: str | Sequence[str]) -> tuple[str, ...]:
    """Return kinds of action, of which a string is one; raise `OptionError` if one is unknown."""
    checked = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    require_listed(name, checked, KINDS)
    return checked
