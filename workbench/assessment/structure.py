"""Structure of a design at initialization, independent of the scale of its states, and a standard initialization."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.errors import AnatomyError, SnapshotError, WorkbenchError
from workbench.flow.block_chain import chain_sizes
from workbench.flow.flow_measurement import measure
from workbench.flow.gains import eager_options
from workbench.flow.norm_eps import eps_fractions
from workbench.models.calling import config_options, on_device_of
from workbench.models.losses import token_loss
from workbench.sweeps.case_measures import first_update
from workbench.training.training_plan import NO_OPTIONS, TrainingPlan

#: Smallest depth that is used to normalize the growth of the residual stream.
SHALLOW = 8


def gains(flow: xr.Dataset) -> np.ndarray:
    """Return the scale-free gradient gain at every boundary, |g_l| |h_l| / (|g_L| |h_L|), shape (boundary,).

    The gradient with respect to a state scales with the inverse norm of the state. The product is therefore near 1
    wherever signal and gradient pass unchanged, independent of the growth of the residual stream.
    """
    with np.errstate(all="ignore"):
        product = flow["state_rms"].values.astype(float) * flow["gradient_norm"].values.astype(float)
        return product / product[-1]


def _gain_by_depth(flow: xr.Dataset) -> float:
    """Return the largest deviation of the gain from 1 after the first block, as a factor per square root of depth."""
    values = gains(flow)[1:]
    if len(values) < 2 or np.isnan(values).all():
        return math.nan
    return _per_root(np.where(np.isnan(values), np.inf, values), len(values) - 1)


def _growth_by_depth(flow: xr.Dataset) -> float:
    """Return the largest change of the stream's norm after the first block, as a factor per square root of depth."""
    sizes = flow["state_rms"].values.astype(float)[1:]
    with np.errstate(all="ignore"):
        return _per_root(sizes / sizes[0], max(len(sizes) - 1, SHALLOW)) if len(sizes) > 1 else math.nan


def _per_root(factors: np.ndarray, depth: int) -> float:
    """Return the largest factor, up or down, per square root of the depth."""
    with np.errstate(all="ignore"):
        largest = float(np.abs(np.log(factors)).max())
    return math.exp(min(largest / math.sqrt(depth), 700.0)) if math.isfinite(largest) else math.inf


def _over(name: str, worst: Callable[[Any], Any]) -> Callable[[xr.Dataset], float]:
    def over(flow: xr.Dataset) -> float:
        values = flow[name].values.astype(float) if name in flow else np.array(math.nan)
        return float(worst(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan

    return over


def _by_layer(values: xr.DataArray, worst: Callable[..., Any]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # layers without attention are NaN throughout
        return np.asarray(worst(values.values.astype(float), axis=-1))


def _worst(values: np.ndarray, first: int = 0) -> int:
    """Return the block of the largest value; -1 if no value is finite."""
    return int(np.nanargmax(values)) + first if np.isfinite(values).any() else -1


def _largest_step(values: np.ndarray) -> int:
    """Return the block after the first that changes a positive quantity by the largest factor."""
    return _worst(np.abs(np.diff(np.log(values[1:]))), first=1)


#: Measurement -> its title, its scale ("log" or "share"), and the function of a flow that computes it. Logits below 1
#: do not single out any token, and count as 1.
NUMBERS: dict[str, tuple[str, str, Callable[[xr.Dataset], float]]] = {
    "gain_by_depth": ("scale-free gradient gain per square root of depth", "log", _gain_by_depth),
    "growth_by_depth": ("growth of the residual stream per square root of depth", "log", _growth_by_depth),
    "attention_entropy_share": (
        "smallest attention entropy fraction", "share", _over("attention_entropy_share", np.min)),
    "attention_logit_max": (
        "largest attention logit, at least 1", "log", _over("attention_logit_max", lambda x: max(1.0, np.max(x)))),
    "routing_entropy_share": ("smallest routing entropy fraction", "share", _over("routing_entropy_share", np.min)),
}  # fmt: skip
#: Number -> the block where it is worst.
WORST_BLOCK: dict[str, Callable[[xr.Dataset], int]] = {
    "gain_by_depth": lambda flow: _largest_step(gains(flow)),
    "growth_by_depth": lambda flow: _largest_step(flow["state_rms"].values.astype(float)),
    "attention_entropy_share": lambda flow: _worst(-_by_layer(flow["attention_entropy_share"], np.nanmin)),
    "attention_logit_max": lambda flow: _worst(_by_layer(flow["attention_logit_max"], np.nanmax)),
    "routing_entropy_share": lambda flow: _worst(-flow["routing_entropy_share"].values.astype(float)),
}
#: Measurement of the predictions -> its title and scale.
OUTPUTS: dict[str, tuple[str, str]] = {
    "loss_over_guess": ("initial loss over that of a uniform guess", "log"),
    "function_change": ("change of the predictions by the first update (nat)", "log"),
}
#: Measurement of the modules -> its title and scale.
MODULES: dict[str, tuple[str, str]] = {"norm_eps_share": ("eps fraction of normalizations", "share")}
#: Every measurement -> its title and scale.
ALL = {name: about[:2] for name, about in NUMBERS.items()} | OUTPUTS | MODULES
#: Why the measurements of predictions are unknown for a custom loss.
OF_ANOTHER_LOSS = "It is defined for predicted classes only, and loss= is not the mean cross entropy."
#: Measurement -> standard error of its logarithm on a narrow model with matched variances, compared with the full width
#: (``data/make_matched_width.py``).
WIDTH_ERRORS = {
    "gain_by_depth": 0.024, "growth_by_depth": 0.01, "attention_logit_max": 0.106, "loss_over_guess": 0.135,
    "function_change": 0.535,
}  # fmt: skip


def measure_structure(
    models: Iterable[nn.Module],
    batch: tuple[Any, Any],
    others: Any,
    plan: TrainingPlan,
    *,
    width_ratio: float = 1.0,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Measure the structure of freshly initialized models that differ in their seed only.

    Returns the dataset of `average_structure` and the first model's flow, None if its stream cannot be read; gain and
    growth are then those between blocks (``between_blocks`` is 1). ``unseen`` of a NaN states the reason.
    """
    flows, outputs, first_flow, unseen_flow = [], [], None, ""
    for model in models:
        inputs, targets = (on_device_of(model, part) for part in batch)
        flow, reason = _flow_of(model, inputs, targets, None if loss is token_loss else loss)
        unseen_flow = unseen_flow or reason
        flows += [] if flow is None else [flow]
        first_flow = flow if first_flow is None and not reason else first_flow
        other_inputs = on_device_of(model, others)
        with config_options(eager_options(model)):
            try:
                found = first_update(model, (inputs, targets), other_inputs, plan, loss, width_ratio=width_ratio)
            except WorkbenchError:
                raise
            except Exception:  # noqa: BLE001  (the model's code is unknown; it may overwrite states in place)
                found = {}
            fractions = eps_fractions(model, inputs)
        fractions = fractions[np.isfinite(fractions)]
        outputs.append(found | {"norm_eps_share": float(np.median(fractions)) if len(fractions) else math.nan})
    structure = average_structure(flows, outputs, log_errors=WIDTH_ERRORS if width_ratio != 1 else {})
    if unseen_flow and flows:
        structure.attrs["between_blocks"] = 1
    for name in NUMBERS if unseen_flow else ():
        if math.isnan(float(structure[name])):
            structure[name].attrs["unseen"] = unseen_flow
    for name in OUTPUTS if loss is not token_loss else ():
        structure[name].attrs["unseen"] = OF_ANOTHER_LOSS
    return structure, first_flow


def _flow_of(
    model: nn.Module, inputs: Any, targets: Any, loss: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[xr.Dataset | None, str]:
    """Return the flow and an empty text; or the flow between blocks (None if unreadable too) and the reason."""
    try:
        return measure(model, inputs, targets=targets, loss=loss, jacobian=False), ""
    except AnatomyError as error:
        reason = str(error)
    try:
        sizes, gradients = chain_sizes(model, inputs, targets=targets, loss=loss)
    except (AnatomyError, SnapshotError):
        return None, reason
    # The input of the first block is unknown, and is not used.
    values = {"state_rms": sizes, "gradient_norm": gradients}
    flow = xr.Dataset({name: ("boundary", np.concatenate([[math.nan], each])) for name, each in values.items()})
    return flow, reason


def average_structure(
    flows: Iterable[xr.Dataset], outputs: Iterable[dict[str, float]], *, log_errors: Mapping[str, float] = NO_OPTIONS
) -> xr.Dataset:
    """Average each measurement over freshly initialized models that differ in seed, with its standard error.

    Returns:
        Dataset of the 0-dim measurements ``ALL``; those compared as logarithms are geometric means, and NaN means that
        the model has no such part. ``<name>_error`` is the standard error over the seeds, of the logarithm if the mean
        is geometric. Attribute ``n_seeds``; the attribute ``block`` of a measurement is the block where it is worst in
        the first model.
    """
    flows, outputs = list(flows), list(outputs)
    values = {name: (title, scale, [find(flow) for flow in flows]) for name, (title, scale, find) in NUMBERS.items()}
    values |= {
        name: (title, scale, [of.get(name, math.nan) for of in outputs])
        for name, (title, scale) in (OUTPUTS | MODULES).items()
    }
    data = {}
    for name, (title, scale, found) in values.items():
        mean, error = _mean(np.array(found), scale == "log") if found else (math.nan, 0.0)
        error = math.hypot(error, log_errors.get(name, 0.0))
        attributes: dict[str, str | int] = {"long_name": title, "units": "1"}
        if flows and name in WORST_BLOCK and not math.isnan(mean):
            with np.errstate(all="ignore"):
                attributes["block"] = WORST_BLOCK[name](flows[0])
        data[name] = ((), mean, attributes)
        data[f"{name}_error"] = ((), error, {"long_name": f"standard error of the {title}", "units": "1"})
    return xr.Dataset(data, attrs={"n_seeds": len(outputs)})


def _mean(values: np.ndarray, is_log: bool) -> tuple[float, float]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        scaled = np.log(values) if is_log else values
        mean = float(np.mean(scaled))
        error = float(np.std(scaled, ddof=1) / math.sqrt(len(scaled))) if len(scaled) > 1 else 0.0
    error = error if math.isfinite(error) else 0.0
    return (math.exp(min(mean, 700.0)) if mean != math.inf else math.inf) if is_log else mean, error


#: Last part of the names of modules that write into the residual stream.
WRITES = re.compile(r"(^|_)(o_proj|down_proj|c_proj|dense_4h_to_h|out_proj|fc2|fc_out|wo|w2|out|down|output)$")
#: Standard deviation of embeddings.
EMBEDDING_STD = 0.02
#: The change as a clause.
WORDS = (
    "initialize matrices with standard deviation 1 / sqrt(fan-in), divided by sqrt(2 x blocks) for those that write "
    "into the residual stream, and embeddings with 0.02"
)


def with_standard_start(model: nn.Module, n_blocks: int, *, seed: int = 0) -> nn.Module:
    """Return a copy of a model whose matrices are redrawn from normal distributions that preserve signal norms."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            is_transposed = type(module).__name__ == "Conv1D"  # transformers' name for a linear map
            if not (isinstance(module, nn.Embedding | nn.Linear) or is_transposed):
                continue
            weight: Tensor = module.get_parameter("weight")
            std = EMBEDDING_STD
            if not isinstance(module, nn.Embedding):
                writes = WRITES.search(name.rsplit(".", 1)[-1])
                std = 1 / math.sqrt(weight.shape[0 if is_transposed else 1] * (2 * n_blocks if writes else 1))
            weight.copy_(torch.empty(weight.shape).normal_(0, std, generator=generator).to(weight))
    return model
