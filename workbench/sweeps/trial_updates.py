"""Trial updates on a copy of an untrained model: the learning rates at which one update, or one of ten, diverges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.models.calling import call_model
from workbench.models.losses import auxiliary_loss, prediction_of, token_loss
from workbench.models.probing import family_options
from workbench.training.training_plan import DEFAULT_RATE

if TYPE_CHECKING:
    from torch import nn

    from workbench.training.training_plan import TrainingPlan

    Loss = Callable[[Tensor, Tensor], Tensor]
    Batch = tuple[Any, Tensor]

#: Coarse grid of learning rates; the interval between two of them is bisected ``_N_HALVINGS`` times.
TRIED_RATES = np.geomspace(1e-5, 1e4, 28)
_N_HALVINGS = 3
#: A relative increase of the loss below it counts as rounding.
_SMALLEST_RISE = 1e-4
#: Root mean square change of the logits at the unit-change rate; nat.
_UNIT_CHANGE = 1.0
#: Updates of a pilot run.
N_PILOT_UPDATES = 10


def pilot_rate(model: nn.Module, batches: Sequence[Batch], plan: TrainingPlan, loss: Loss) -> float:
    """Find the learning rate at which a copy diverges within ten updates at that constant learning rate.

    Warm-up and schedule are ignored. The rate is found by bisection, assuming that all larger rates diverge too.

    Args:
        model: An untrained model; it is not changed.
        batches: The first eleven batches of the run; with fewer batches the pilot run is shorter.
        plan: Plan with the optimizer, the clipping and the limits of divergence.
        loss: Function of logits and targets.

    Returns:
        A rate between the smallest and the largest of ``TRIED_RATES``; infinite if none of them diverges; NaN if the
        optimizer needs several gradients for an update, or is an existing one, which cannot be tried on a copy.
    """
    if _Copy(model, loss).optimizer(plan, 1.0) is None:
        return math.nan

    def diverges(rate: float) -> bool:
        trial = _Copy(model, loss)
        optimizer = trial.optimizer(plan, rate)
        assert optimizer is not None  # checked above
        for batch in batches:
            if plan.cause_of_divergence(*trial.measure(batch)):
                return True
            if plan.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trial.parameters, plan.clip_norm)
            optimizer.step()
        return False

    low, high = -1, len(TRIED_RATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if diverges(float(TRIED_RATES[middle])) else (middle, high)
    return _refined(high, diverges)


@dataclass
class _Line:
    """The parameters after the optimizer's first update, as a function of the learning rate.

    Attributes:
        trial: The copy whose parameters are set.
        base: Its initial parameters.
        change: The change of the parameters in the first update at a learning rate of 1.
    """

    trial: _Copy
    base: list[Tensor]
    change: list[Tensor]

    def move(self, rate: float) -> None:
        """Set the parameters to those after an update at a learning rate."""
        with torch.no_grad():
            for parameter, start, change in zip(self.trial.parameters, self.base, self.change, strict=True):
                parameter.copy_(start + rate * change)


def trial_update(model: nn.Module, batch: Batch, plan: TrainingPlan, loss: Loss) -> dict[str, float]:
    """Measure the initial gradient norm, and the learning rates from which the optimizer's first update is too large.

    From ``overshoot_rate`` on, the update increases the loss of its own batch; from ``breaking_rate`` on, it counts as
    divergence; from ``unit_change_rate`` on, it changes the logits of the batch, less their mean over classes, by a
    root mean square of 1. The rates are found on ``TRIED_RATES`` and refined by bisection. They are infinite if no rate
    of the grid is too large, and NaN if the optimizer needs several gradients for an update, or is an existing one,
    which cannot be tried on a copy.
    """
    trial = _Copy(model, loss)

    def measure() -> tuple[float, float]:
        return trial.measure(batch)

    start_loss, grad_norm = measure()
    found = dict.fromkeys(("overshoot_rate", "breaking_rate", "unit_change_rate"), math.nan)
    found["initial_grad_norm"] = grad_norm
    if not math.isfinite(grad_norm):
        return found
    base = [parameter.detach().clone() for parameter in trial.parameters]
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trial.parameters, plan.clip_norm)
    optimizer = trial.optimizer(plan, 1.0)
    if optimizer is None:
        return found
    optimizer.step()
    change = [parameter.detach() - start for parameter, start in zip(trial.parameters, base, strict=True)]
    line = _Line(trial, base, change)
    line.move(0.0)
    start_logits = trial.logits(batch[0])
    measured: dict[float, tuple[float, float]] = {}

    def measured_at(rate: float) -> tuple[float, float]:
        if rate not in measured:
            line.move(rate)
            measured[rate] = measure()
        return measured[rate]

    def diverges(rate: float) -> bool:
        return bool(plan.cause_of_divergence(*measured_at(rate)))

    def overshoots(rate: float) -> bool:
        return not measured_at(rate)[0] <= start_loss * (1 + _SMALLEST_RISE)

    def changes_much(rate: float) -> bool:
        line.move(rate)
        return not float((trial.logits(batch[0]) - start_logits).square().mean().sqrt()) < _UNIT_CHANGE

    return found | {
        "overshoot_rate": _first_rate(overshoots),
        "breaking_rate": _first_rate(diverges),
        "unit_change_rate": _first_rate(changes_much),
    }


def first_update(
    model: nn.Module, batch: Batch, others: Any, plan: TrainingPlan, loss: Loss, *, width_ratio: float = 1.0
) -> dict[str, float]:
    """Measure the initial loss and the change of the predictions by the first update at the peak learning rate.

    ``loss_over_guess`` is the loss of the batch over the loss of equal probabilities. ``function_change`` is the mean
    Kullback-Leibler divergence (nat) of the predictions after the update from those before it, on other examples. If
    the model is narrower than the planned one, the change of every matrix is multiplied by the ratio of the widths, so
    that it changes the outputs as it would at the full width: the entries of an Adam update all have about the same
    magnitude, and their contributions add up over the inputs (Yang et al., arXiv:2203.03466).

    Args:
        model: An untrained model; it is not changed.
        batch: Inputs and targets of the update.
        others: Inputs of the other examples.
        plan: Plan with the optimizer and its peak learning rate.
        loss: Function of logits and targets.
        width_ratio: Width of the planned model over the width of this one.

    Returns:
        ``loss_over_guess`` and ``function_change``; infinite where the loss or predictions are not finite. The change
        is NaN if the optimizer needs several gradients for an update, or is an existing one. Both are NaN if the loss
        is not `token_loss`.
    """
    if loss is not token_loss:  # The model need not predict classes.
        return {"loss_over_guess": math.nan, "function_change": math.nan}
    trial = _Copy(model, loss)
    start_loss, grad_norm = trial.measure(batch)
    base = [parameter.detach().clone() for parameter in trial.parameters]
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trial.parameters, plan.clip_norm)
    optimizer = trial.optimizer(plan, DEFAULT_RATE if plan.learning_rate is None else plan.learning_rate)
    before = trial.logits(others)
    guess = math.log(before.shape[-1]) if before.shape[-1] > 1 else math.nan
    found = {"loss_over_guess": start_loss / guess if math.isfinite(start_loss) else math.inf}
    if optimizer is None:
        return found | {"function_change": math.nan}
    if not math.isfinite(grad_norm):
        return found | {"function_change": math.inf}
    optimizer.step()
    tables = {id(part.weight) for part in trial.model.modules() if isinstance(part, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter, start in zip(trial.parameters, base, strict=True):
            if parameter.ndim > 1 and id(parameter) not in tables:
                parameter.copy_(start + width_ratio * (parameter - start))
    old, new = (logits.double().log_softmax(-1) for logits in (before, trial.logits(others)))
    change = float((old.exp() * (old - new)).sum(-1).mean())
    return found | {"function_change": change if math.isfinite(change) else math.inf}


def _first_rate(is_too_large: Callable[[float], bool]) -> float:
    """Return the smallest rate that is too large, found on the coarse grid from below and refined by bisection."""
    index = next((i for i, rate in enumerate(TRIED_RATES) if is_too_large(float(rate))), len(TRIED_RATES))
    return _refined(index, is_too_large)


def _refined(index: int, is_too_large: Callable[[float], bool]) -> float:
    """Return the limit between a rate of the grid that is too large and the one before it, refined by bisection."""
    if index == len(TRIED_RATES):
        return math.inf
    if index == 0:
        return float(TRIED_RATES[0])
    low, high = np.log(TRIED_RATES[index - 1 : index + 1])
    for _ in range(_N_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_large(math.exp(middle)) else (middle, high)
    return math.exp((low + high) / 2)


class _Copy:
    """A copy of a model for trial updates, in eval mode: without dropout the measurements are reproducible.

    Args:
        model: The model, which is not changed.
        loss: Function of logits and targets.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = copy.deepcopy(model).eval()
        for option in family_options(self.model):
            setattr(*option)
        self.loss = loss
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def measure(self, batch: Batch) -> tuple[float, float]:
        """Return loss and gradient norm of a batch; the gradients stay on the parameters."""
        inputs, targets = batch
        self.model.zero_grad(set_to_none=True)
        output = call_model(self.model, inputs)
        loss = self.loss(prediction_of(output), targets)
        auxiliary = auxiliary_loss(self.model, output)
        (loss if auxiliary is None else loss + auxiliary).backward()
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return float(loss.detach()), float(torch.nn.utils.get_total_norm(grads))

    @torch.no_grad()
    def logits(self, inputs: Any) -> Tensor:
        """Return the logits in single precision, less their mean over classes."""
        output = call_model(self.model, inputs)
        logits = prediction_of(output).float()
        return logits - logits.mean(-1, keepdim=True)

    def optimizer(self, plan: TrainingPlan, rate: float) -> torch.optim.Optimizer | None:
        """Create an optimizer; None if the plan's is an existing one, or needs several gradients for an update."""
        if isinstance(plan.optimizer, torch.optim.Optimizer):
            return None
        found = replace(plan, learning_rate=rate).optimizer_for(self.model)
        return None if isinstance(found, torch.optim.LBFGS) or hasattr(found, "first_step") else found
