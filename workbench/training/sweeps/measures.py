"""What is known of a run before its first update: spectra, a forward pass, a gradient, and one trial update."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.spectral.profile import profile
from workbench.spectral.spectra import RankWarning
from workbench.subjects.anatomy import Anatomy, read_anatomy
from workbench.subjects.batches import TokenSelection
from workbench.subjects.capture import StreamWatcher
from workbench.subjects.checkpoint import Subject
from workbench.subjects.probing import call_model, on_device_of, undisturbed, watch
from workbench.sweep_schema import MEASURES, SETTINGS, dtype_of
from workbench.training.losses import accuracy_of, auxiliary_loss, token_loss
from workbench.training.plan import TrainingPlan
from workbench.training.sweeps.planned import describe_plan, plan_of
from workbench.training.tasks import as_task

if TYPE_CHECKING:
    import xarray as xr

#: Measures of the spectra that a sweep keeps.
SPECTRAL = tuple(name for name, rule in MEASURES.items() if "layer" in rule.dims and "mode" not in rule.dims)
#: Rates tried for the first update, coarsely; what lies between two of them is halved this often.
TRIED_RATES = np.geomspace(1e-5, 1e4, 28)
_N_HALVINGS = 3
#: A rise of the loss below this share of it is rounding.
_SMALLEST_RISE = 1e-4


def measure_case(
    model: nn.Module | Subject,
    task: Any,
    *,
    architecture: str = "",
    n_snapshots: int = 1024,
    stack: str | None = None,
    takes_gradients: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    **training: Any,
) -> xr.Dataset:
    """Everything that a risk model looks at, for one planned run; the model is left as it was.

    Args:
        model: The model as training would begin with it.
        task: What it would be trained on; see `workbench.tasks.as_task`. The first batch of its stream is looked at,
            and held-out inputs for the spectra.
        architecture: What tables and pictures call it; by default the name of its class.
        n_snapshots: Token states that the spectra are taken from.
        stack: Name of the block stack to read, where a model has several.
        takes_gradients: Also measure what needs a backward pass: the initial gradient norm, and the rates at which the
            optimizer's first update alone overshoots or breaks; otherwise they are NaN.
        loss: From logits and targets to a 0-dim tensor.
        **training: Fields of `TrainingPlan`: ``n_steps``, ``learning_rate``, ``warmup``, ...

    Returns:
        Dataset of one ``run`` (a sweep without outcomes; see `workbench.sweep_schema`).

    Raises:
        ThresholdError: If a setting is unknown or impossible.
        AnatomyError: If the residual stream cannot be read.
        SnapshotError: If the stream holds NaN or infinite values.
    """
    module = model.model if isinstance(model, Subject) else model
    plan = plan_of(training)
    row = measure_row(
        model, as_task(task), plan, n_snapshots=n_snapshots, stack=stack, takes_gradients=takes_gradients, loss=loss
    )
    config = getattr(module, "config", None)
    known = config.as_dict() if hasattr(config, "as_dict") else {}
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
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
) -> dict[str, Any]:
    """What `measure_case` measures, by name; per-layer measures as arrays (layer,), eigenvalues as (layer, mode)."""
    module = model.model if isinstance(model, Subject) else model
    batch = next(iter(task.stream(0)))
    inputs, targets = (on_device_of(module, part) for part in batch)
    anatomy = read_anatomy(module, inputs, stack=stack)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is in the data
        spectra = profile(
            model, task.probe(n_snapshots), n_snapshots=n_snapshots, anatomy=anatomy, n_workers=1, progress=False
        )
    row: dict[str, Any] = {name: spectra[name].values.astype(float) for name in SPECTRAL}
    row["eigenvalue"] = spectra["eigenvalue"].values
    row |= _forward(module, anatomy, inputs, targets, loss)
    gradient = {"initial_grad_norm": math.nan, "overshoot_rate": math.nan, "breaking_rate": math.nan}
    if takes_gradients:
        gradient = _trial_update(module, inputs, targets, plan, loss)
    first = inputs if isinstance(inputs, Tensor) else targets
    return (
        row
        | gradient
        | {
            "n_layers": len(anatomy.sites),
            "d_model": anatomy.width,
            "n_weights": sum(weight.numel() for weight in module.parameters()),
            "batch_size": int(first.shape[0]),
            "n_tokens": int(targets.numel()),
            "task": str(task.describe().get("task", "")),
        }
    )


def _forward(
    model: nn.Module, anatomy: Anatomy, inputs: Any, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """What one forward pass over the first batch says."""
    squares: dict[str, Tensor] = {}
    last = len(anatomy.sites) - 1

    def take(layer: int, x: Tensor, y: Tensor) -> None:
        if layer == 0:
            squares["stream_rms_first"] = x.detach().double().square().mean()
        if layer == last:
            squares["stream_rms_last"] = y.detach().double().square().mean()

    selection = TokenSelection(None)
    watcher = StreamWatcher(anatomy, selection, take, layers={0, last})
    with undisturbed(model), watch(watcher.hooks()), torch.no_grad():
        watcher.begin(inputs)
        logits = _logits(call_model(model, inputs))
    return {
        "initial_loss": float(loss(logits, targets)),
        "initial_accuracy": accuracy_of(logits, targets),
        "logit_std": float(logits.double().std(-1).mean()),
        **{name: math.sqrt(float(square)) for name, square in squares.items()},
    }


@dataclass
class _Trial:
    """A copy of a model that is moved along the optimizer's first update.

    Attributes:
        base: Its weights as they were.
        change: What the first update at a learning rate of 1 adds to them.
    """

    model: nn.Module
    base: list[Tensor]
    change: list[Tensor]

    def move(self, rate: float) -> None:
        with torch.no_grad():
            for weight, start, change in zip(_trainable(self.model), self.base, self.change, strict=True):
                weight.copy_(start + rate * change)


def _trial_update(
    model: nn.Module, inputs: Any, targets: Tensor, plan: TrainingPlan, loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """The initial gradient norm, and what learning rate the optimizer's first update bears on its own batch.

    The rates are found on ``TRIED_RATES`` and refined by halving; infinite: none tried was too large; NaN: the
    optimizer takes several gradients a step, or is a ready one, which cannot be tried on a copy.
    """
    trial = copy.deepcopy(model)
    trial.eval()

    def look() -> tuple[float, float]:
        trial.zero_grad(set_to_none=True)
        output = call_model(trial, inputs)
        own = loss(_logits(output), targets)
        extra = auxiliary_loss(trial, output)
        (own if extra is None else own + extra).backward()
        grads = [weight.grad for weight in _trainable(trial) if weight.grad is not None]
        return float(own.detach()), float(torch.nn.utils.get_total_norm(grads))

    start_loss, grad_norm = look()
    found = {"initial_grad_norm": grad_norm, "overshoot_rate": math.nan, "breaking_rate": math.nan}
    if isinstance(plan.optimizer, torch.optim.Optimizer) or not math.isfinite(grad_norm):
        return found
    base = [weight.detach().clone() for weight in _trainable(trial)]
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(_trainable(trial), plan.clip_norm)
    optimizer = replace(plan, learning_rate=1.0).optimizer_for(trial)
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "first_step"):
        return found
    optimizer.step()
    change = [weight.detach() - start for weight, start in zip(_trainable(trial), base, strict=True)]
    steps = _Trial(trial, base, change)
    seen: dict[float, tuple[float, float]] = {}

    def look_at(rate: float) -> tuple[float, float]:
        if rate not in seen:
            steps.move(rate)
            seen[rate] = look()
        return seen[rate]

    def is_broken(rate: float) -> bool:
        return bool(plan.cause_of_divergence(*look_at(rate)))

    def overshoots(rate: float) -> bool:
        return not look_at(rate)[0] <= start_loss * (1 + _SMALLEST_RISE)

    return found | {"overshoot_rate": _first_rate(overshoots), "breaking_rate": _first_rate(is_broken)}


def _first_rate(is_too_large: Callable[[float], bool]) -> float:
    """The smallest rate that is too large: first on the coarse rates, then halved in their logarithm."""
    index = next((i for i, rate in enumerate(TRIED_RATES) if is_too_large(float(rate))), None)
    if index is None:
        return math.inf
    if index == 0:
        return float(TRIED_RATES[0])
    low, high = np.log(TRIED_RATES[index - 1 : index + 1])
    for _ in range(_N_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_large(math.exp(middle)) else (middle, high)
    return math.exp((low + high) / 2)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def as_cases(rows: list[dict[str, Any]]) -> xr.Dataset:
    """Rows as one dataset; layers and modes that a run lacks are NaN."""
    import xarray as xr

    data = {}
    for name, rule in {**SETTINGS, **MEASURES}.items():
        values = [np.asarray(row[name], dtype=dtype_of(name, rule.kind)) for row in rows]
        data[name] = (rule.dims, padded(values), rule.attrs)
    return xr.Dataset(data).set_coords(list(SETTINGS))


def padded(values: list[np.ndarray]) -> np.ndarray:
    """Arrays of different extents as one, NaN where one has no entry."""
    if values[0].ndim == 0:
        return np.array(values)
    shape = tuple(max(value.shape[axis] for value in values) for axis in range(values[0].ndim))
    result = np.full((len(values), *shape), np.nan, dtype=values[0].dtype)
    for i, value in enumerate(values):
        result[(i, *(slice(n) for n in value.shape))] = value
    return result
