"""How to train: every setting of a run that is not the model or the data, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.tasks.task import require_whole
from workbench.training.muon import muon_for
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

DEFAULT_RATE = 1e-3
#: The default of arguments that are mappings.
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
SCHEDULES = ("constant", "cosine", "linear", "wsd")
#: Share of a "wsd" run in which the rate falls.
_DECAY_SHARE = 0.2
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training run: arguments of `workbench.train`, documented there.

    Example:
        >>> import workbench as wb
        >>> plan = wb.TrainingPlan(n_steps=100, learning_rate=1e-3, warmup=10, schedule="cosine")
        >>> [round(plan.rate_factor(step), 2) for step in (0, 9, 55, 99)]
        [0.1, 1.0, 0.5, 0.0]
    """

    n_steps: int
    learning_rate: float | None = None
    warmup: int = 0
    schedule: str | Callable[[int], float] = "constant"
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "AdamW"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    precision: str = "float32"
    seed: int = 0
    loss_limit: float = 50.0
    grad_norm_limit: float = 500.0
    stops_at_divergence: bool = True

    def __post_init__(self) -> None:
        require_whole(1, n_steps=self.n_steps)
        require_whole(0, warmup=self.warmup)
        for name in ("learning_rate", "clip_norm", "loss_limit", "grad_norm_limit"):
            value = getattr(self, name)
            may_be_none, may_be_infinite = name in ("learning_rate", "clip_norm"), name.endswith("_limit")
            if value is None and may_be_none:
                continue
            is_number = isinstance(value, Real | torch.Tensor) and not isinstance(value, bool)
            if not (is_number and value > 0 and (may_be_infinite or math.isfinite(value))):
                shown = repr(value) if isinstance(value, str) else value
                raise OptionError(f"{name} is {shown}, expected a positive number.")
        if not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise OptionError(f"schedule is '{self.schedule}', expected one of {', '.join(SCHEDULES)} or a function.")
        if self.precision not in PRECISIONS:
            raise OptionError(f"precision is '{self.precision}', expected one of {', '.join(PRECISIONS)}.")
        if isinstance(self.optimizer, str):
            _optimizer_class(self.optimizer)
        elif self.optimizer_options:
            raise OptionError("optimizer_options belong to an optimizer given by name; build them into yours.")
        if isinstance(self.optimizer, torch.optim.Optimizer) and self.learning_rate is not None:
            raise OptionError("A ready optimizer has a rate of its own; leave out learning_rate.")

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, for a JSON text; functions and optimizers by their names and defaults."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        settings["optimizer_options"] = {k: _plain(v) for k, v in self.optimizer_options.items()}
        if isinstance(self.optimizer, torch.optim.Optimizer):
            settings["optimizer"] = type(self.optimizer).__name__
            settings["optimizer_options"] = {k: _plain(v) for k, v in self.optimizer.defaults.items()}
        return {name: getattr(v, "__qualname__", None) or str(v) if callable(v) else v for name, v in settings.items()}

    def rate_factor(self, step: int) -> float:
        """Share of the peak learning rate at a step, counted from 0; unit 1."""
        factor = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if callable(self.schedule):
            return factor * self.schedule(step)
        if self.schedule == "constant":
            return factor
        if self.schedule == "wsd":
            n_falling = self.n_steps - max(self.warmup, (1 - _DECAY_SHARE) * self.n_steps)
            return factor * min(1.0, max(0.0, (self.n_steps - step) / max(1.0, n_falling)))
        progress = min(1.0, max(0, step - self.warmup) / max(1, self.n_steps - self.warmup))
        return factor * (0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress)

    def optimizer_for(self, model: Subject | nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer over the model's trainable parameters, or the ready one.

        Raises:
            OptionError: If nothing is trainable, a ready optimizer holds other parameters, or a named one does not
                take these options.
        """
        weights = [parameter for parameter in module_of(model).parameters() if parameter.requires_grad]
        if not weights:
            raise OptionError("The model has no trainable weights; set requires_grad on some of them.")
        rate = DEFAULT_RATE if self.learning_rate is None else self.learning_rate
        if isinstance(self.optimizer, str):
            cls = _optimizer_class(self.optimizer)
            try:
                if cls is torch.optim.Muon:
                    return muon_for(module_of(model), **{"lr": rate, **self.optimizer_options})
                return cls(weights, **{"lr": rate, **self.optimizer_options})
            except (TypeError, ValueError) as error:
                raise OptionError(f"{cls.__name__} does not take {dict(self.optimizer_options)}: {error}.") from error
        ready = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else self.optimizer(weights)
        own = {id(weight) for weight in weights}
        if any(id(weight) not in own for group in ready.param_groups for weight in group["params"]):
            raise OptionError("The optimizer holds weights that are not the model's; build it from this very model.")
        if self.learning_rate is not None:
            highest = max(float(group["lr"]) for group in ready.param_groups)
            for group in ready.param_groups:  # rates may differ between groups, and keep their ratio
                share = float(group["lr"]) / highest
                group["lr"] = self.learning_rate * share
        return ready

    def cause_of_divergence(self, loss: float, grad_norm: float) -> str:
        """The reason why a step counts as diverged (RKSP's label); empty if it does not.

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


def departures(**settings: Any) -> dict[str, Any]:
    """The settings that differ from the defaults of `TrainingPlan`."""
    defaults = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(TrainingPlan)
    }
    return {name: value for name, value in settings.items() if value != defaults[name]}


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise OptionError(
            f"optimizer is '{name}', expected one of {', '.join(sorted(c.__name__ for c in known.values()))}; "
            "pass any other as optimizer=your_optimizer."
        )
    return known[name.lower()]


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
