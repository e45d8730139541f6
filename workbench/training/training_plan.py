"""Plan of a training run: all settings except the model and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, TypeVar

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.models.subject import Subject
from workbench.option_checks import checked, unpacking
from workbench.option_kinds import Bound, Measured, NonNegativeInt, PositiveFloat, PositiveInt, one_of
from workbench.training.muon import muon_for
from workbench.zoo.module_of import module_of

DEFAULT_RATE = 1e-3
#: The default of arguments that are mappings.
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
SCHEDULES = ("constant", "cosine", "linear", "wsd")
#: Fraction of a "wsd" run in which the learning rate decays.
_DECAY_FRACTION = 0.2
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@checked
@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training run; the attributes are arguments of `workbench.train`, documented there.

    Example:
        >>> import workbench as wb
        >>> plan = wb.TrainingPlan(n_steps=100, learning_rate=1e-3, warmup=10, schedule="cosine")
        >>> [round(plan.rate_factor(step), 2) for step in (0, 9, 55, 99)]
        [0.1, 1.0, 0.5, 0.0]

    See Also:
        `workbench.train`: Documents the settings.
        `workbench.assess`: Assesses a plan before training.
    """

    n_steps: PositiveInt
    learning_rate: PositiveFloat | None = None
    warmup: NonNegativeInt = 0
    schedule: str | Callable[[int], float] = "constant"
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "AdamW"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: PositiveFloat | None = None
    precision: Annotated[str, one_of(PRECISIONS)] = "float32"
    seed: int = 0
    loss_limit: Bound = 50.0
    grad_norm_limit: Bound = 500.0
    stops_at_divergence: bool = True

    def __post_init__(self) -> None:
        if not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise OptionError.of("schedule", self.schedule, SCHEDULES, remedy="or pass a function")
        if isinstance(self.optimizer, str):
            _optimizer_class(self.optimizer)
        elif self.optimizer_options:
            raise OptionError("optimizer_options need the name of an optimizer; pass them to your optimizer instead.")
        if isinstance(self.optimizer, torch.optim.Optimizer) and self.learning_rate is not None:
            raise OptionError("An optimizer object has its own learning rate; omit learning_rate.")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON; functions and optimizers by their names and defaults."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        settings["optimizer_options"] = {k: _plain(v) for k, v in self.optimizer_options.items()}
        if isinstance(self.optimizer, torch.optim.Optimizer):
            settings["optimizer"] = type(self.optimizer).__name__
            settings["optimizer_options"] = {k: _plain(v) for k, v in self.optimizer.defaults.items()}
        return {name: getattr(v, "__qualname__", None) or str(v) if callable(v) else v for name, v in settings.items()}

    def rate_factor(self, step: NonNegativeInt) -> float:
        """Return the learning rate at a step as a fraction of its peak.

        Args:
            step: Step, counted from 0.
        """
        factor = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if callable(self.schedule):
            return factor * self.schedule(step)
        if self.schedule == "constant":
            return factor
        if self.schedule == "wsd":
            n_decay = self.n_steps - max(self.warmup, (1 - _DECAY_FRACTION) * self.n_steps)
            return factor * min(1.0, max(0.0, (self.n_steps - step) / max(1.0, n_decay)))
        progress = min(1.0, max(0, step - self.warmup) / max(1, self.n_steps - self.warmup))
        return factor * (0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress)

    def optimizer_for(self, model: Subject | nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the plan: a new one over the trainable parameters of a model, or the given object.

        Args:
            model: Model or subject.

        Raises:
            OptionError: If the model has no trainable parameters, an optimizer object holds other parameters, or a
                named optimizer does not accept the options.
        """
        parameters = [parameter for parameter in module_of(model).parameters() if parameter.requires_grad]
        if not parameters:
            raise OptionError("The model has no trainable parameters; set requires_grad on some of them.")
        rate = DEFAULT_RATE if self.learning_rate is None else self.learning_rate
        if isinstance(self.optimizer, str):
            cls = _optimizer_class(self.optimizer)
            try:
                if cls is torch.optim.Muon:
                    return muon_for(module_of(model), **{"lr": rate, **self.optimizer_options})
                return cls(parameters, **{"lr": rate, **self.optimizer_options})
            except (TypeError, ValueError) as error:
                options = dict(self.optimizer_options)
                raise OptionError(f"{cls.__name__} does not accept {options} ({error}); pass other options.") from error
        optimizer = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else self.optimizer(parameters)
        own = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise OptionError("The optimizer holds parameters that the model does not have; create it from this model.")
        if self.learning_rate is not None:
            highest = max(float(group["lr"]) for group in optimizer.param_groups)
            for group in optimizer.param_groups:  # rates may differ between groups, and keep their ratio
                ratio = float(group["lr"]) / highest
                group["lr"] = self.learning_rate * ratio
        return optimizer

    def cause_of_divergence(self, loss: Measured, grad_norm: Measured) -> str:
        """Return the reason why a step has diverged (RKSP's label); empty if it has not.

        Args:
            loss: Loss of the step.
            grad_norm: Norm of all gradients together, before clipping.

        Returns:
            ``"non-finite"``, ``"loss"``, ``"grad_norm"`` or ``""``.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "non-finite"
        if loss > self.loss_limit:
            return "loss"
        return "grad_norm" if grad_norm > self.grad_norm_limit else ""


class TrainingOptions(TypedDict, total=False):
    """Fields of `TrainingPlan` but ``n_steps``, as arguments of functions that train; see `takes_settings`."""

    learning_rate: PositiveFloat | None
    warmup: NonNegativeInt
    schedule: str | Callable[[int], float]
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    optimizer_options: Mapping[str, Any]
    clip_norm: PositiveFloat | None
    precision: str
    seed: int
    loss_limit: Bound
    grad_norm_limit: Bound
    stops_at_divergence: bool


Trains = TypeVar("Trains", bound=Callable[..., Any])


def takes_settings(*, without: Collection[str] = (), default: str = "") -> Callable[[Trains], Trains]:
    """Return a decorator that shows fields of `TrainingPlan` in place of ``**settings``, ``default`` if omitted."""
    kinds = {name: each.__forward_arg__ for name, each in TrainingOptions.__annotations__.items()}
    values = {each.name: NO_OPTIONS if each.default is MISSING else each.default for each in fields(TrainingPlan)}
    return unpacking({name: (kinds[name], default or values[name]) for name in kinds if name not in without})


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        names = tuple(sorted(cls.__name__ for cls in known.values()))
        raise OptionError.of("optimizer", name, names, remedy="pass any other optimizer as an object")
    return known[name.lower()]


def _plain(value: Any) -> Any:
    """Convert a value to plain values of JSON."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
