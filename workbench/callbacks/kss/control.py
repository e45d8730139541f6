"""The state of KSS that may change while a model trains, and who may change it."""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

from workbench.callbacks.kss.penalty import PenaltyShape
from workbench.callbacks.kss.trust_region import TrustRegion
from workbench.callbacks.observers import Observers
from workbench.errors import OptionError

COUPLINGS = ("gradient", "decoupled", "projection", "trust_region")
SIDES = ("both", "output", "input")


@dataclass(frozen=True)
class KSSOptions:
    """The choices behind the penalty that stay fixed over a run.

    Attributes:
        penalty: The penalty as a function of the spectrum.
        n_snapshots: Token states per layer and time. They come from as many examples of the batch as are needed, in a
            pass of their own: 512 states of 64 features are eight for each feature.
        side: States that carry the gradient. The operator maps what enters a block to what leaves it; ``"both"`` is
            the full derivative of the penalty. ``"output"`` changes what each block writes, given
            what it reads; ``"input"`` changes what the blocks before it pass to it.
        coupling: Way in which the gradient reaches the parameters. ``"gradient"`` adds strength times it to the task's,
            as adding the penalty to the loss does, except that clipping ignores it; an adaptive optimizer then
            divides both by the same running size. ``"decoupled"`` subtracts learning rate times strength times it after
            the update, as AdamW decouples weight decay. ``"projection"`` steps, after the update, to where the penalty
            would be zero if it were linear: strength times P/|grad P|^2 times its gradient (Polyak 1987), strength 1
            the whole way; only a penalty that can be zero (``unstable_term="log"``, ``beta=0``) suits it.
            ``"trust_region"`` uses no gradient: it takes back updates that throw a layer out of its band; see
            ``trust_region``.
        trust_region: The band, for that coupling.
        trigger: Spectral radius above which a layer takes part; 0: always. A run inside its band then costs only the
            forward pass.
        skip_first: Leading tokens of each sequence to leave out.
        seed: Seed of the choice of layers, examples and tokens.

    Example:
        >>> import workbench as wb
        >>> options = wb.KSSOptions(n_snapshots=256, coupling="decoupled")
        >>> wb.KSS(options=options).options.coupling
        'decoupled'
    """

    penalty: PenaltyShape = field(default_factory=PenaltyShape)
    n_snapshots: int = 512
    side: str = "both"
    coupling: str = "gradient"
    trust_region: TrustRegion = field(default_factory=TrustRegion)
    trigger: float = 0.0
    skip_first: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_snapshots < 3:
            raise OptionError(f"n_snapshots is {self.n_snapshots}, expected at least 3.")
        for name, known in (("side", SIDES), ("coupling", COUPLINGS)):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} is '{getattr(self, name)}', expected one of {', '.join(known)}.")
        if not 0 <= self.trigger < math.inf:
            raise OptionError(f"trigger is {self.trigger}, expected a spectral radius of at least 0.")
        if self.skip_first < 0:
            raise OptionError(f"skip_first is {self.skip_first}, expected at least 0.")


@dataclass(frozen=True)
class ControlValues:
    """The settings of KSS in one step; names as in `KSS`."""

    enabled: bool
    strength: float
    interval: int
    gamma: float
    layers: str | tuple[int, ...]

    def is_due(self, step: int) -> bool:
        """Whether the penalty acts in this step."""
        return self.enabled and self.strength > 0 and step % self.interval == 0

    def as_dict(self) -> dict[str, Any]:
        """As plain values, which JSON gives back."""
        return {**vars(self), "layers": self.layers if isinstance(self.layers, str) else [*self.layers]}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> ControlValues:
        """Make settings from what `as_dict` gave.

        Raises:
            OptionError: If a value is out of range.
        """
        return cls(**{name: _checked(name, value) for name, value in values.items()})


class KSSControls:
    """The controls of KSS, which may change during training; base of `KSS`.

    The controls are plain attributes. They are read once per step, so a script, a schedule, an alarm or a button may
    set them at any time, from any thread, and every change is recorded with the run. Arguments as for `KSS`.
    """

    #: The controls, in the order in which they are recorded.
    CONTROLS = tuple(item.name for item in fields(ControlValues))

    def __init__(
        self,
        *,
        strength: float = 0.15,
        interval: int = 10,
        enabled: bool = True,
        gamma: float = 0.4,
        layers: str | Collection[int] = "half",
        options: KSSOptions | None = None,
        controller: BandController | None = None,
    ) -> None:
        self.options = options or KSSOptions()
        self.controller = controller
        self._lock = threading.RLock()
        self._observers = Observers()
        given = {
            "enabled": enabled,
            "strength": strength,
            "interval": interval,
            "gamma": gamma,
            "layers": layers,
        }
        self._control = ControlValues(**{name: _checked(name, value) for name, value in given.items()})

    @property
    def enabled(self) -> bool:
        """Whether it acts."""
        return self._control.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.set(enabled=value)

    @property
    def strength(self) -> float:
        """alpha, the weight of the penalty."""
        return self._control.strength

    @strength.setter
    def strength(self, value: float) -> None:
        self.set(strength=value)

    @property
    def interval(self) -> int:
        """Optimizer steps between two applications."""
        return self._control.interval

    @interval.setter
    def interval(self, value: int) -> None:
        self.set(interval=value)

    @property
    def gamma(self) -> float:
        """Near-unit mass to aim at, in [0, 1]."""
        return self._control.gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self.set(gamma=value)

    @property
    def layers(self) -> str | tuple[int, ...]:
        """``"half"``, ``"all"``, or the numbers of the layers, rising."""
        return self._control.layers

    @layers.setter
    def layers(self, value: str | Collection[int]) -> None:
        self.set(layers=value)

    @property
    def control(self) -> ControlValues:
        """All controls as they are at this moment."""
        return self._control

    def set(self, **controls: Any) -> None:
        """Change several controls at once, between two steps.

        Raises:
            OptionError: If a name is unknown or a value is out of range; nothing is changed then.
        """
        unknown = [name for name in controls if name not in self.CONTROLS]
        if unknown:
            raise _no_control(unknown[0])
        checked = {name: _checked(name, value) for name, value in controls.items()}
        with self._lock:
            before = self._control
            self._control = ControlValues(**{**vars(before), **checked})
            changes = [(n, getattr(before, n), v) for n, v in checked.items() if getattr(before, n) != v]
        for change in changes:
            self._observers.call(*change)

    def observe(self, observer: Callable[[str, Any, Any], None]) -> Callable[[], None]:
        """Call ``observer(name, before, after)`` after each change of a control, in the thread that made it.

        Returns:
            A function that unsubscribes it.
        """
        return self._observers.add(observer)

    def describe(self) -> dict[str, Any]:
        """What stays fixed over a run, as plain values."""
        own = self.options
        options = vars(own) | {"penalty": dict(vars(own.penalty)), "trust_region": dict(vars(own.trust_region))}
        return options | {"controller": None if self.controller is None else dict(vars(self.controller))}

    def state_dict(self) -> dict[str, Any]:
        """The controls, as plain values, for a checkpoint."""
        return self._control.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load controls that `state_dict` gave."""
        self.set(**state)

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelled control would otherwise be one more attribute, and change nothing.
        if not name.startswith("_") and "_control" in vars(self) and not hasattr(self, name):
            raise _no_control(name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}("
            + ", ".join(f"{name}={value!r}" for name, value in vars(self._control).items())
            + ")"
        )


@dataclass(frozen=True)
class BandController:
    """Holds a measure of the spectrum in a band by adjusting the strength of KSS.

    After each application the strength is multiplied by ``factor`` if the measure lies above the band, divided by it
    if it lies below, and unchanged within: an integral controller in the logarithm of the strength, which needs no
    model of how the measure responds.

    Attributes:
        quantity: Measure to control: ``"spectral_radius"``, the largest of the layers measured, or
            ``"near_unit_mass"``, their mean.
        low: Lower edge of the band.
        high: Upper edge of the band.
        factor: Factor of one change of the strength, above 1.
        weakest: Smallest strength; above 0, so that it can rise again.
        strongest: Largest strength.
    """

    quantity: str = "spectral_radius"
    low: float = 1.05
    high: float = 2.0
    factor: float = 1.25
    weakest: float = 1e-3
    strongest: float = 1e3

    def __post_init__(self) -> None:
        if self.quantity not in ("spectral_radius", "near_unit_mass"):
            raise OptionError(f"quantity is '{self.quantity}', expected 'spectral_radius' or 'near_unit_mass'.")
        if not 0 <= self.low <= self.high < math.inf:
            raise OptionError(f"The band is {self.low} to {self.high}, expected 0 <= low <= high.")
        if not 1 < self.factor < math.inf:
            raise OptionError(f"factor is {self.factor}, expected more than 1.")
        if not 0 < self.weakest <= self.strongest < math.inf:
            raise OptionError(
                f"The strength may run from {self.weakest} to {self.strongest}, expected 0 < weakest <= strongest."
            )

    def adjusted(self, strength: float, measure: float) -> float:
        """The strength for the next step; unchanged if there is no measure (NaN)."""
        if measure > self.high:
            strength *= self.factor
        elif measure < self.low:
            strength /= self.factor
        else:
            return strength
        return min(max(strength, self.weakest), self.strongest)


def _no_control(name: str) -> OptionError:
    """That KSS has no control of this name, with the one that is spelled most alike."""
    near = difflib.get_close_matches(name, KSSControls.CONTROLS, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return OptionError(f"KSS has no control '{name}'{hint}; choose from {', '.join(KSSControls.CONTROLS)}.")


def _checked(name: str, value: Any) -> Any:
    """A control's value in its own type.

    Raises:
        OptionError: If it is no valid value.
    """
    if name == "enabled":
        return bool(value)
    if name == "layers":
        return _checked_layers(value)
    if name == "interval":
        if not _is_whole(value, lowest=1):
            raise OptionError(f"interval is {value}, expected a whole number of steps, at least 1.")
        return int(value)
    highest = 1.0 if name == "gamma" else math.inf
    if isinstance(value, Real) and math.isfinite(value) and 0 <= float(value) <= highest:
        return float(value)
    expected = "a number of at least 0" if name == "strength" else "a share between 0 and 1"
    raise OptionError(f"{name} is {value}, expected {expected}.")


def _checked_layers(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value in ("half", "all"):
        return value
    is_many = isinstance(value, Collection) and not isinstance(value, str | bytes) and len(value) > 0
    if not (is_many and all(_is_whole(i, lowest=0) for i in value)):
        raise OptionError(f"layers is {value!r}, expected 'half', 'all', or numbers of layers counted from 0.")
    return tuple(sorted({int(i) for i in value}))


def _is_whole(value: Any, *, lowest: int) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return float(value).is_integer() and float(value) >= lowest
