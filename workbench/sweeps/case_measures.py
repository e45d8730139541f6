"""Measurements of a planned run before its first update: spectra, forward passes, a gradient, updates on a copy."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.koopman.spectra import RankWarning
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import TokenSelection
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import call_model, on_device_of
from workbench.models.capture import StreamWatcher
from workbench.models.losses import accuracy_of, auxiliary_loss, prediction_of, token_loss
from workbench.models.probing import family_options, undisturbed
from workbench.models.profile import profile
from workbench.models.residual_check import require_residuals
from workbench.models.subject import Subject
from workbench.option_kinds import PositiveInt
from workbench.schema.sweeps import MEASURES, SETTINGS, dtype_of
from workbench.sweeps.run_settings import describe_plan
from workbench.tasks import as_task
from workbench.training.training_plan import DEFAULT_RATE, TrainingOptions, TrainingPlan, takes_settings

if TYPE_CHECKING:
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
    """Return the constant rate from which a copy diverges within ten updates; NaN where no copy can be tried."""
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

    return _first_rate(diverges, in_order=True)


def trial_update(model: nn.Module, batch: Batch, plan: TrainingPlan, loss: Loss) -> dict[str, float]:
    """Measure the initial gradient norm, and the learning rates from which the optimizer's first update is too large.

    From ``overshoot_rate`` on, the update increases the loss of its own batch; from ``breaking_rate`` on, it counts as
    divergence; from ``unit_change_rate`` on, it changes the logits of the batch, less their mean over classes, by a
    root mean square of 1. The rates are found on ``TRIED_RATES`` and refined by bisection. They are infinite if no rate
    of the grid is too large, and NaN if the optimizer needs several gradients for an update, or is an existing one,
    which cannot be tried on a copy.
    """
    trial = _Copy(model, loss)
    start_loss, grad_norm = trial.measure(batch)
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

    @torch.no_grad()
    def move(rate: float) -> None:
        """Set the parameters to those after an update at a learning rate."""
        for parameter, start, by in zip(trial.parameters, base, change, strict=True):
            parameter.copy_(start + rate * by)

    move(0.0)
    start_logits = trial.logits(batch[0])
    measured: dict[float, tuple[float, float]] = {}

    def measured_at(rate: float) -> tuple[float, float]:
        if rate not in measured:
            move(rate)
            measured[rate] = trial.measure(batch)
        return measured[rate]

    def diverges(rate: float) -> bool:
        return bool(plan.cause_of_divergence(*measured_at(rate)))

    def overshoots(rate: float) -> bool:
        return not measured_at(rate)[0] <= start_loss * (1 + _SMALLEST_RISE)

    def changes_much(rate: float) -> bool:
        move(rate)
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

    Both are infinite where the loss or predictions are not finite, and NaN if the loss is not `token_loss`. The change
    is also NaN if the optimizer needs several gradients for an update, or is an existing one.
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


def _first_rate(is_too_large: Callable[[float], bool], *, in_order: bool = False) -> float:
    """Return the limit above which rates are too large: infinite above the grid, at least its first rate."""
    low, high = -1, len(TRIED_RATES)
    while in_order and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_too_large(float(TRIED_RATES[middle])) else (middle, high)
    if not in_order:
        high = next((i for i, rate in enumerate(TRIED_RATES) if is_too_large(float(rate))), high)
    if high in (0, len(TRIED_RATES)):
        return math.inf if high else float(TRIED_RATES[0])
    below, above = np.log(TRIED_RATES[high - 1 : high + 1])
    for _ in range(_N_HALVINGS):
        between = (below + above) / 2
        below, above = (below, between) if is_too_large(math.exp(between)) else (between, above)
    return math.exp((below + above) / 2)


class _Copy:
    """A copy of a model for trial updates, in eval mode: without dropout the measurements are reproducible."""

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


#: Measurements that need gradients.
_OF_UPDATES = ("initial_grad_norm", "overshoot_rate", "breaking_rate", "unit_change_rate", "rehearsed_rate")
#: Spectral quantities that a sweep records.
SPECTRAL = tuple(name for name, rule in MEASURES.items() if "layer" in rule.dims and "mode" not in rule.dims)


@takes_settings()
def measure_case(
    model: nn.Module | Subject,
    task: Any,
    *,
    n_steps: PositiveInt,
    architecture: str = "",
    n_snapshots: PositiveInt = 1024,
    stack: str | None = None,
    takes_gradients: bool = True,
    runs_pilot: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    **settings: Unpack[TrainingOptions],
) -> xr.Dataset:
    """Measure the features of a risk model for one planned run, without changing the model.

    Args:
        model: The model in its initial state.
        task: The task of the planned run; see `workbench.tasks.as_task`. Spectra are measured on held-out inputs,
            everything else on the first batches of the task's stream.
        n_steps: Planned number of updates.
        architecture: Name of the model in tables and figures; by default the name of its class.
        n_snapshots: Number of token states from which the spectra are computed.
        stack: Name of the block stack to measure, if the model has several.
        takes_gradients: Also measure with a backward pass: the initial gradient norm, and the learning rates at which
            the optimizer's first update alone overshoots or diverges; otherwise they are NaN.
        runs_pilot: Also measure the learning rate at which a copy diverges within ten updates, which costs about a
            hundred updates in total; it is NaN otherwise, and without gradients.
        loss: Function of logits and targets that returns a 0-dim tensor.
        **settings: Settings of the planned training, as in `workbench.train`.

    Returns:
        Dataset with one ``run``: a sweep without outcomes; see `workbench.schema.sweeps`.

    Raises:
        OptionError: If a setting is invalid.
        AnatomyError: If the residual stream cannot be read.
        SnapshotError: If the stream contains NaN or infinite values.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> task = wb.tasks.associative_recall(length=8, n_pairs=2, batch_size=4)
        >>> case = wb.sweeps.measure_case(model, task, n_steps=100, n_snapshots=64, runs_pilot=False)
        >>> case["learning_rate"].values, dict(case.sizes)
        (array([0.001]), {'run': 1, 'layer': 2, 'mode': 16})

    See Also:
        `workbench.risk.predict`: Predicts the risk of a measured case.
        `workbench.sweeps.replan`: Changes the settings of a case without measuring it again.
    """
    module = model.model if isinstance(model, Subject) else model
    plan = TrainingPlan(n_steps=n_steps, **settings)
    row = measure_row(
        model, as_task(task), plan, n_snapshots=n_snapshots, stack=stack,
        takes_gradients=takes_gradients, runs_pilot=runs_pilot, loss=loss,
    )  # fmt: skip
    config = getattr(module, "config", None)
    known = config.as_dict() if config is not None and hasattr(config, "as_dict") else {}
    row |= describe_plan(plan, known) | {"architecture": architecture or type(module).__name__}
    row |= {"study": "", "configuration": "", "cell": "", "settings": json.dumps(plan.as_dict(), default=str)}
    return as_cases([row]).assign_attrs(subject=architecture or type(module).__name__)


def measure_row(
    model: nn.Module | Subject,
    task: Any,
    plan: TrainingPlan,
    *,
    n_snapshots: int,
    stack: str | None = None,
    takes_gradients: bool = True,
    runs_pilot: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
) -> dict[str, Any]:
    """Return the measurements of `measure_case` by name, (layer,) or (layer, mode); ``n_snapshots=0``: no spectra."""
    module = model.model if isinstance(model, Subject) else model
    n_batches = N_PILOT_UPDATES + 1 if takes_gradients and runs_pilot else 1
    batches = [
        tuple(on_device_of(module, part) for part in batch) for batch in itertools.islice(task.stream(0), n_batches)
    ]
    inputs, targets = batches[0]
    anatomy = read_anatomy(module, inputs, stack=stack)
    if stack is None:
        require_residuals(module, inputs, anatomy.stack, anatomy.sites)
    row = _spectra(model, task, anatomy, n_snapshots)
    row |= _forward(module, anatomy, inputs, targets, loss)
    gradient = dict.fromkeys(_OF_UPDATES, math.nan)
    if takes_gradients:
        gradient |= trial_update(module, (inputs, targets), plan, loss)
    if takes_gradients and runs_pilot:
        gradient["rehearsed_rate"] = pilot_rate(module, batches, plan, loss)
    first = inputs if isinstance(inputs, Tensor) else targets
    return (
        row
        | gradient
        | {
            "n_layers": len(anatomy.sites),
            "d_model": anatomy.width,
            "n_weights": sum(parameter.numel() for parameter in module.parameters()),
            "batch_size": int(first.shape[0]),
            "n_tokens": int(targets.numel()),
            "task": str(task.describe().get("task", "")),
        }
    )


def _spectra(model: nn.Module | Subject, task: Any, anatomy: Anatomy, n_snapshots: int) -> dict[str, Any]:
    """Return the spectral quantities; NaN without snapshots."""
    if not n_snapshots:
        missing: dict[str, Any] = dict.fromkeys(SPECTRAL, np.full(len(anatomy.sites), math.nan))
        return missing | {"eigenvalue": np.full((len(anatomy.sites), 1), complex(math.nan, math.nan))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
        spectra = profile(
            model, task.probe(n_snapshots), n_snapshots=n_snapshots, anatomy=anatomy, n_workers=1, progress=False
        )
    row: dict[str, Any] = {name: spectra[name].values.astype(float) for name in SPECTRAL}
    return row | {"eigenvalue": spectra["eigenvalue"].values}


def _forward(
    model: nn.Module, anatomy: Anatomy, inputs: Any, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """Measure two forward passes over the first batch: unmodified, and with the residual stream doubled."""
    logits, rms = _forward_pass(model, anatomy, inputs, factor=1.0)
    doubled, doubled_rms = _forward_pass(model, anatomy, inputs, factor=2.0)
    spread, doubled_spread = (float(each.double().std(-1).mean()) for each in (logits, doubled))
    # Where the initial output is zero, the residual stream shows whether a later normalization removes the factor.
    before, after = (spread, doubled_spread) if spread > 0 else (rms["last"], doubled_rms["last"])
    ratio = after / before if before > 0 else math.nan
    return {
        "initial_loss": float(loss(logits, targets)),
        "initial_accuracy": accuracy_of(logits, targets),
        "logit_std": spread,
        "scale_response": math.log2(ratio) if 0 < ratio < math.inf else math.nan,
        "stream_rms_first": rms["first"],
        "stream_rms_last": rms["last"],
    }


def _forward_pass(model: nn.Module, anatomy: Anatomy, inputs: Any, *, factor: float) -> tuple[Tensor, dict[str, float]]:
    """Return logits of a forward pass, and the RMS of the residual stream before the first and after the last block."""
    last = len(anatomy.sites) - 1
    rms: dict[str, float] = {}

    def scale(call: BlockCall) -> Tensor | None:
        return None if factor == 1 else call.state_in * factor

    def measure(layer: int, x: Tensor, y: Tensor) -> None:
        for name, index, state in (("first", 0, x), ("last", last, y)):
            if layer == index:
                rms[name] = math.sqrt(float(state.detach().double().square().mean()))

    watcher = StreamWatcher(anatomy, TokenSelection(None, layout=anatomy.layout), measure, layers={0, last})
    with undisturbed(model), BlockHooks(anatomy.sites[:1], scale), watcher:
        watcher.begin(inputs)
        output = call_model(model, inputs)
        return (output if isinstance(output, Tensor) else output.logits), rms


def as_cases(rows: list[dict[str, Any]]) -> xr.Dataset:
    """Combine rows into one dataset; missing layers and modes are NaN."""
    data = {}
    for name, rule in {**SETTINGS, **MEASURES}.items():
        values: list[np.ndarray] = [np.asarray(row[name], dtype=dtype_of(name, rule.kind)) for row in rows]
        data[name] = (rule.dims, padded(values), rule.attrs)
    return xr.Dataset(data).set_coords(list(SETTINGS))


def padded(values: list[np.ndarray]) -> np.ndarray:
    """Stack arrays of different sizes along a new first axis, padded with NaN."""
    if values[0].ndim == 0:
        return np.array(values)
    shape = tuple(max(value.shape[axis] for value in values) for axis in range(values[0].ndim))
    result: np.ndarray = np.full((len(values), *shape), np.nan, dtype=values[0].dtype)
    for i, value in enumerate(values):
        result[i][tuple(slice(n) for n in value.shape)] = value
    return result
