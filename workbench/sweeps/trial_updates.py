"""Trial updates on a copy: the learning rates from which one update of a fresh model diverges, or one of ten."""

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

#: Coarse grid of tried rates; the interval between two of them is halved this often.
TRIED_RATES = np.geomspace(1e-5, 1e4, 28)
_N_HALVINGS = 3
#: A rise of the loss by less than this share of it counts as rounding.
_SMALLEST_RISE = 1e-4
#: Root mean square by which the logits change at the unit-change rate; nat.
_UNIT_CHANGE = 1.0
#: Updates of a pilot run.
N_PILOT_UPDATES = 10


def pilot_rate(model: nn.Module, batches: Sequence[Batch], plan: TrainingPlan, loss: Loss) -> float:
    """Find the learning rate at which a copy diverges within ten updates at that constant rate.

    Warm-up and schedule are ignored. The rate is found by bisection, assuming that every larger one diverges too.

    Args:
        model: A fresh model; it is not changed.
        batches: The first eleven batches of the run; fewer make a shorter pilot run.
        plan: Plan with the optimizer, the clipping and the limits of divergence.
        loss: Function of logits and targets.

    Returns:
        A rate between the smallest and largest of ``TRIED_RATES``; infinite: none of them diverges; NaN: the optimizer
        needs several gradients for an update, or is an existing one, which cannot be tried on a copy.
    """
    if _Copy(model, loss).optimizer(plan, 1.0) is None:
        return math.nan

    def breaks(rate: float) -> bool:
        trial = _Copy(model, loss)
        optimizer = trial.optimizer(plan, rate)
        assert optimizer is not None  # checked above
        for batch in batches:
            if plan.cause_of_divergence(*trial.measure(batch)):
                return True
            if plan.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trial.weights, plan.clip_norm)
            optimizer.step()
        return False

    low, high = -1, len(TRIED_RATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if breaks(float(TRIED_RATES[middle])) else (middle, high)
    return _refined(high, breaks)


@dataclass
class _Line:
    """The parameters after the optimizer's first update, as a function of the learning rate.

    Attributes:
        trial: The copy whose parameters are set.
        base: Its initial parameters.
        change: The change of the parameters by the first update at a learning rate of 1.
    """

    trial: _Copy
    base: list[Tensor]
    change: list[Tensor]

    def move(self, rate: float) -> None:
        with torch.no_grad():
            for weight, start, change in zip(self.trial.weights, self.base, self.change, strict=True):
                weight.copy_(start + rate * change)


def trial_update(model: nn.Module, batch: Batch, plan: TrainingPlan, loss: Loss) -> dict[str, float]:
    """Measure the initial gradient norm, and the rates from which the optimizer's first update is too large.

    ``overshoot_rate``: it makes the loss of its own batch rise; ``breaking_rate``: it counts as divergence;
    ``unit_change_rate``: it changes the logits of the batch, less their mean over classes, by a root mean square of 1.
    The rates are found on ``TRIED_RATES`` and refined by bisection; infinite: none tried was too large; NaN: the
    optimizer needs several gradients for a step, or is an existing one, which cannot be tried on a copy.
    """
    trial = _Copy(model, loss)

    def measure() -> tuple[float, float]:
        return trial.measure(batch)

    start_loss, grad_norm = measure()
    found = dict.fromkeys(("overshoot_rate", "breaking_rate", "unit_change_rate"), math.nan)
    found["initial_grad_norm"] = grad_norm
    if not math.isfinite(grad_norm):
        return found
    base = [weight.detach().clone() for weight in trial.weights]
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trial.weights, plan.clip_norm)
    optimizer = trial.optimizer(plan, 1.0)
    if optimizer is None:
        return found
    optimizer.step()
    change = [weight.detach() - start for weight, start in zip(trial.weights, base, strict=True)]
    steps = _Line(trial, base, change)
    steps.move(0.0)
    start_logits = trial.logits(batch[0])
    seen: dict[float, tuple[float, float]] = {}

    def measured_at(rate: float) -> tuple[float, float]:
        if rate not in seen:
            steps.move(rate)
            seen[rate] = measure()
        return seen[rate]

    def is_broken(rate: float) -> bool:
        return bool(plan.cause_of_divergence(*measured_at(rate)))

    def overshoots(rate: float) -> bool:
        return not measured_at(rate)[0] <= start_loss * (1 + _SMALLEST_RISE)

    def changes_much(rate: float) -> bool:
        steps.move(rate)
        return not float((trial.logits(batch[0]) - start_logits).square().mean().sqrt()) < _UNIT_CHANGE

    return found | {
        "overshoot_rate": _first_rate(overshoots),
        "breaking_rate": _first_rate(is_broken),
        "unit_change_rate": _first_rate(changes_much),
    }


def first_update(
    model: nn.Module, batch: Batch, others: Any, plan: TrainingPlan, loss: Loss, *, width_ratio: float = 1.0
) -> dict[str, float]:
    """Measure the initial loss, and by how much the first update at the plan's peak rate changes the predictions.

    ``loss_over_guess``: the loss of the batch over that of equal probabilities. ``function_change``: the mean
    Kullback-Leibler divergence (nat) of the predictions of other examples after the update from those before it; of a
    model that is thinner than the planned one, the change of every matrix is multiplied by the ratio of the widths, so
    that it changes outputs as it would at the full width: entries of an update of Adam have one size, and add up over
    the inputs (Yang et al., arXiv:2203.03466).

    Args:
        model: A fresh model; it is not changed.
        batch: Inputs and targets that the update is made from.
        others: Inputs of the other examples.
        plan: Plan with the optimizer and its peak rate.
        loss: Function of logits and targets.
        width_ratio: Width of the planned model over that of this one.

    Returns:
        Both; infinite where predictions are not finite. The change is NaN if the optimizer needs several gradients for
        an update, or is an existing one; both are if the loss is not `token_loss`.
    """
    if loss is not token_loss:  # the model need not predict classes
        return {"loss_over_guess": math.nan, "function_change": math.nan}
    trial = _Copy(model, loss)
    start_loss, grad_norm = trial.measure(batch)
    base = [weight.detach().clone() for weight in trial.weights]
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trial.weights, plan.clip_norm)
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
        for weight, start in zip(trial.weights, base, strict=True):
            if weight.ndim > 1 and id(weight) not in tables:
                weight.copy_(start + width_ratio * (weight - start))
    old, new = (logits.double().log_softmax(-1) for logits in (before, trial.logits(others)))
    change = float((old.exp() * (old - new)).sum(-1).mean())
    return found | {"function_change": change if math.isfinite(change) else math.inf}


def _first_rate(is_too_large: Callable[[float], bool]) -> float:
    """The smallest rate that is too large: first on the coarse rates, from small to large, then by bisection."""
    index = next((i for i, rate in enumerate(TRIED_RATES) if is_too_large(float(rate))), len(TRIED_RATES))
    return _refined(index, is_too_large)


def _refined(index: int, is_too_large: Callable[[float], bool]) -> float:
    """The limit between a tried rate that is too large and the one before it, refined by bisection."""
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
    """A copy of a model to try updates on, in eval mode: without dropout, every measurement is the same.

    Args:
        model: The model, which is not changed.
        loss: Function of logits and targets.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = copy.deepcopy(model).eval()
        for option in family_options(self.model):
            setattr(*option)
        self.loss = loss
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]

    def measure(self, batch: Batch) -> tuple[float, float]:
        """Loss of a batch and norm of all gradients together, which stay on the parameters."""
        inputs, targets = batch
        self.model.zero_grad(set_to_none=True)
        output = call_model(self.model, inputs)
        own = self.loss(prediction_of(output), targets)
        extra = auxiliary_loss(self.model, output)
        (own if extra is None else own + extra).backward()
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        return float(own.detach()), float(torch.nn.utils.get_total_norm(grads))

    @torch.no_grad()
    def logits(self, inputs: Any) -> Tensor:
        """Logits in single precision, less their mean over classes."""
        output = call_model(self.model, inputs)
        logits = prediction_of(output).float()
        return logits - logits.mean(-1, keepdim=True)

    def optimizer(self, plan: TrainingPlan, rate: float) -> torch.optim.Optimizer | None:
        """A fresh optimizer at a rate; None if the plan's already exists, or needs several gradients for an update."""
        if isinstance(plan.optimizer, torch.optim.Optimizer):
            return None
        found = replace(plan, learning_rate=rate).optimizer_for(self.model)
        return None if isinstance(found, torch.optim.LBFGS) or hasattr(found, "first_step") else found
