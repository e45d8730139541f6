"""Options of KSS that are fixed over a run, and controls that may change while a model trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from workbench.callbacks.kss.penalty import PenaltyShape
from workbench.callbacks.kss.trust_region import TrustRegion
from workbench.callbacks.observation import Observers
from workbench.errors import require_known
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, at_least, at_most, one_of

COUPLINGS = ("gradient", "decoupled", "projection", "trust_region")
#: ``"half"``, ``"all"``, or numbers of layers.
LayerNumbers = (
    Annotated[str, one_of(("half", "all"))] | Annotated[Collection[NonNegativeInt], Range("with at least one", len)]
)


@checked
@dataclass(frozen=True)
class KSSOptions:
    """Options of KSS that are fixed over a run.

    Let P be the penalty, g = grad P its gradient, and eta the learning rate.

    Attributes:
        penalty: The penalty as a function of the spectrum.
        n_snapshots: Token states per layer and application. They are taken in a separate forward pass over as many
            examples of the batch as needed. For 64 features, 512 states are eight per feature.
        coupling: How the penalty acts on the parameters. ``"gradient"`` adds strength g to the gradient of the task, as
            if the penalty were a term of the loss, except that it is not clipped; an adaptive optimizer then
            normalizes both gradients together. ``"decoupled"`` subtracts eta strength g after the update, as AdamW
            does with weight decay. ``"projection"`` subtracts strength P g / |g|^2 after the update (Polyak 1987); at
            strength 1 this is the step to the zero of the linearized penalty. It is meaningful only for a penalty
            that can be zero (``unstable_term="log"``, ``beta=0``). ``"trust_region"`` uses no gradient: it undoes
            updates that move a layer out of its band; see ``trust_region``.
        trust_region: The band and the update rule of ``coupling="trust_region"``.
        seed: Seed of the random choice of layers, examples and tokens.

    Example:
        >>> import workbench as wb
        >>> options = wb.KSSOptions(n_snapshots=256, coupling="decoupled")
        >>> wb.KSS(options=options).options.coupling
        'decoupled'

    See Also:
        `workbench.KSS`: Takes the options.
    """

    penalty: PenaltyShape = field(default_factory=PenaltyShape)
    n_snapshots: Annotated[int, at_least(3)] = 512
    coupling: Annotated[str, one_of(COUPLINGS)] = "gradient"
    trust_region: TrustRegion = field(default_factory=TrustRegion)
    seed: int = 0


@checked
@dataclass(frozen=True)
class ControlValues:
    """Values of the controls of KSS in one step; names as in `KSS`."""

    enabled: bool
    strength: NonNegativeFloat
    interval: PositiveInt
    gamma: Annotated[float, at_least(0), at_most(1)]
    layers: LayerNumbers

    def __post_init__(self) -> None:
        layers = self.layers if isinstance(self.layers, str) else tuple(sorted({int(each) for each in self.layers}))
        vars(self).update(strength=float(self.strength), gamma=float(self.gamma), layers=layers)

    def is_due(self, step: int) -> bool:
        """Return whether KSS acts in a step."""
        return self.enabled and self.strength > 0 and step % self.interval == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the values as JSON-compatible data."""
        return {**vars(self), "layers": self.layers if isinstance(self.layers, str) else [*self.layers]}


def _control(name: str, doc: str) -> Any:
    """Return a property that reads one control and sets it."""

    def read(kss: KSSControls) -> Any:
        return getattr(kss.control, name)

    def write(kss: KSSControls, value: Any) -> None:
        kss.set(**{name: value})

    return property(read, write, doc=doc)


class KSSControls:
    """Controls of KSS that may change during training; the base class of `KSS`, with the same arguments."""

    #: The controls, in the order in which they are recorded.
    CONTROLS = tuple(item.name for item in fields(ControlValues))

    def __init__(
        self,
        *,
        strength: NonNegativeFloat = 0.15,
        interval: PositiveInt = 10,
        enabled: bool = True,
        gamma: Annotated[float, at_least(0), at_most(1)] = 0.4,
        layers: LayerNumbers = "half",
        options: KSSOptions | None = None,
    ) -> None:
        self.options = options or KSSOptions()
        self._lock = threading.RLock()
        self._observers = Observers()
        self._control = ControlValues(enabled, strength, interval, gamma, layers)

    enabled = _control("enabled", "Whether KSS acts.")
    strength = _control("strength", "Weight alpha of the penalty.")
    interval = _control("interval", "Optimizer steps between two applications.")
    gamma = _control("gamma", "Target near-unit mass, in [0, 1].")
    layers = _control("layers", "Layers to act on: ``half``, ``all``, or their numbers in increasing order.")

    @property
    def control(self) -> ControlValues:
        """Current values of all controls."""
        return self._control

    def set(self, **controls: Any) -> None:
        """Change several controls at once, so that no step sees only some of the changes.

        Args:
            **controls: New values by the names of the controls.

        Raises:
            OptionError: If a name is unknown or a value is out of range; nothing is changed then.
        """
        require_known("KSS", controls, self.CONTROLS, word="control")
        with self._lock:
            before, after = self._control, replace(self._control, **controls)
            self._control = after
            changes = [(n, getattr(before, n), getattr(after, n)) for n in controls]
            changes = [change for change in changes if change[1] != change[2]]
        for change in changes:
            self._observers.call(*change)

    def observe(self, observer: Callable[[str, Any, Any], None]) -> Callable[[], None]:
        """Call ``observer(name, before, after)`` after each change of a control, in the thread of the change.

        Returns:
            A function that removes the observer.
        """
        return self._observers.add(observer)

    def describe(self) -> dict[str, Any]:
        """Return the options that are fixed over a run, as plain values."""
        fixed = self.options
        # Options of earlier versions, which are part of their checkpoints.
        penalty = {**vars(fixed.penalty), "has_basis_gradient": False}
        options = vars(fixed) | {"penalty": penalty, "trust_region": dict(vars(fixed.trust_region))}
        return options | {"controller": None, "side": "both", "trigger": 0.0, "skip_first": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the controls for a checkpoint."""
        return self._control.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the controls to values that `state_dict` returned."""
        self.set(**state)

    def __setattr__(self, name: str, value: Any) -> None:
        # Otherwise a misspelled control would become a new attribute without any effect.
        if not name.startswith("_") and "_control" in vars(self) and not hasattr(self, name):
            require_known("KSS", {name: value}, self.CONTROLS, word="control")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}("
            + ", ".join(f"{name}={value!r}" for name, value in vars(self._control).items())
            + ")"
        )
