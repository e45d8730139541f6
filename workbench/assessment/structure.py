"""Measure the structure of a design on fresh models: numbers that do not depend on the scale of the residual stream."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import AnatomyError, SnapshotError, WorkbenchError
from workbench.flow.block_chain import chain_sizes
from workbench.flow.flow_measurement import measure
from workbench.flow.gains import plain_options
from workbench.flow.norm_eps import eps_shares
from workbench.models.calling import on_device_of
from workbench.models.config_options import config_options
from workbench.models.losses import token_loss
from workbench.sweeps.trial_updates import first_update
from workbench.training.training_plan import NO_OPTIONS

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

    from workbench.training.training_plan import TrainingPlan


#: Depth below which the growth of the stream is judged as that of a stack this deep.
SHALLOW = 8


def gains(flow: xr.Dataset) -> np.ndarray:
    """The scale-free gradient gain of every boundary, (boundary,): |g_l| |h_l| / (|g_L| |h_L|).

    The gradient of a state scales with one over the state's length, so that the product is near 1 wherever signal and
    gradient pass unchanged, however the stream grows.

    Args:
        flow: From `workbench.flow.measure`.
    """
    with np.errstate(all="ignore"):
        product = flow["state_rms"].values.astype(float) * flow["gradient_norm"].values.astype(float)
        return product / product[-1]


def _gain_by_depth(flow: xr.Dataset) -> float:
    """The largest departure of the gain from 1, as a factor for each root of the number of blocks.

    Independent gains of blocks are a random walk, whose departure grows with that root. The first block, whose input
    may have tokens of 0, is left out.
    """
    values = gains(flow)[1:]
    if len(values) < 2 or np.isnan(values).all():
        return math.nan
    with np.errstate(divide="ignore"):
        largest = float(np.abs(np.log(np.where(np.isnan(values), np.inf, values))).max())
    return math.exp(min(largest / math.sqrt(len(values) - 1), 700.0)) if math.isfinite(largest) else math.inf


def _growth_by_depth(flow: xr.Dataset) -> float:
    """The largest change of the stream's size after the first block, as a factor for each root of the depth.

    Fewer blocks count as ``SHALLOW``: the factors of single blocks differ too much to be judged by the root of a few.
    """
    sizes = flow["state_rms"].values.astype(float)[1:]
    if len(sizes) < 2:
        return math.nan
    with np.errstate(all="ignore"):
        largest = float(np.abs(np.log(sizes / sizes[0])).max())
    depth = max(len(sizes) - 1, SHALLOW)
    return math.exp(min(largest / math.sqrt(depth), 700.0)) if math.isfinite(largest) else math.inf


def _over(name: str, worst: Callable[[Any], Any]) -> Callable[[xr.Dataset], float]:
    def over(flow: xr.Dataset) -> float:
        values = flow[name].values.astype(float) if name in flow else np.array(math.nan)
        return float(worst(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan

    return over


def _by_layer(values: xr.DataArray, worst: Callable[..., Any]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # layers without the part
        return np.asarray(worst(values.values.astype(float), axis=-1))


def _worst(values: np.ndarray, first: int = 0) -> int:
    """The block of the largest value; -1: none is known."""
    return int(np.nanargmax(values)) + first if np.isfinite(values).any() else -1


def _largest_step(values: np.ndarray) -> int:
    """The block, after the first, that changes a positive number most as a factor."""
    return _worst(np.abs(np.diff(np.log(values[1:]))), first=1)


#: Number -> its title, its scale ("log" or "share"), and the function of a flow that computes it. Logits below 1 make
#: no token stand out, and count as 1.
NUMBERS: dict[str, tuple[str, str, Callable[[xr.Dataset], float]]] = {
    "gain_by_depth": ("scale-free gradient gain per root of depth", "log", _gain_by_depth),
    "growth_by_depth": ("growth of the stream per root of depth", "log", _growth_by_depth),
    "attention_entropy_share": (
        "smallest attention entropy share", "share", _over("attention_entropy_share", np.min),
    ),
    "attention_logit_max": (
        "largest attention logit, at least 1", "log", _over("attention_logit_max", lambda x: max(1.0, np.max(x))),
    ),
    "routing_entropy_share": ("smallest routing entropy share", "share", _over("routing_entropy_share", np.min)),
}  # fmt: skip
#: Number -> the block where it is worst.
WORST_BLOCK: dict[str, Callable[[xr.Dataset], int]] = {
    "gain_by_depth": lambda flow: _largest_step(gains(flow)),
    "growth_by_depth": lambda flow: _largest_step(flow["state_rms"].values.astype(float)),
    "attention_entropy_share": lambda flow: _worst(-_by_layer(flow["attention_entropy_share"], np.nanmin)),
    "attention_logit_max": lambda flow: _worst(_by_layer(flow["attention_logit_max"], np.nanmax)),
    "routing_entropy_share": lambda flow: _worst(-flow["routing_entropy_share"].values.astype(float)),
}
#: Numbers of the predictions -> their title and scale.
OUTPUTS: dict[str, tuple[str, str]] = {
    "loss_over_guess": ("initial loss over that of a guess", "log"),
    "function_change": ("change of predictions, first update (nat)", "log"),
}
#: Numbers of the modules -> their title and scale.
MODULES: dict[str, tuple[str, str]] = {
    "norm_eps_share": ("share of eps in normalizations", "share"),
}
#: Every number -> its title and scale.
ALL = {name: about[:2] for name, about in NUMBERS.items()} | OUTPUTS | MODULES
#: Why the numbers of predictions are not known under another loss than the mean cross entropy.
OF_ANOTHER_LOSS = "It is that of predicted classes, and loss= is another one than the mean cross entropy."
#: Number -> standard error of its logarithm on a thin model with matched variances, against the real width
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
    """Measure the structure of fresh models that differ in seed only.

    Args:
        models: The models, made one by one.
        batch: Inputs and targets.
        others: Inputs of other examples, for the change of the predictions.
        plan: Plan with the optimizer and its peak rate.
        width_ratio: Width of the planned design over that of the models.
        loss: Function of logits and targets.

    Returns:
        The numbers of `structure_numbers`, and the flow of the first model; None: its residual stream cannot be read.
        Where its blocks are a chain, gain and growth are those between blocks then (`workbench.flow.block_chain`),
        which the attribute ``between_blocks`` says; the attribute ``unseen`` of numbers that are NaN says why.
    """
    flows, outputs, whole, unseen_flow = [], [], None, ""
    for model in models:
        inputs, targets = (on_device_of(model, part) for part in batch)
        flow, reason = _flow_of(model, inputs, targets, None if loss is token_loss else loss)
        unseen_flow = unseen_flow or reason
        flows += [] if flow is None else [flow]
        whole = flow if whole is None and not reason else whole
        other_inputs = on_device_of(model, others)
        with config_options(plain_options(model)):
            try:
                found = first_update(model, (inputs, targets), other_inputs, plan, loss, width_ratio=width_ratio)
            except WorkbenchError:
                raise
            except Exception:  # noqa: BLE001  (of any kind, as of a state that is overwritten: no gradient in eval mode)
                found = {}
            shares = eps_shares(model, inputs)
        shares = shares[np.isfinite(shares)]
        outputs.append(found | {"norm_eps_share": float(np.median(shares)) if len(shares) else math.nan})
    numbers = structure_numbers(flows, outputs, log_errors=WIDTH_ERRORS if width_ratio != 1 else {})
    if unseen_flow and flows:
        numbers.attrs["between_blocks"] = 1
    for name in NUMBERS if unseen_flow else ():
        if math.isnan(float(numbers[name])):
            numbers[name].attrs["unseen"] = unseen_flow
    for name in OUTPUTS if loss is not token_loss else ():
        numbers[name].attrs["unseen"] = OF_ANOTHER_LOSS
    return numbers, whole


def _flow_of(
    model: nn.Module, inputs: Any, targets: Any, loss: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[xr.Dataset | None, str]:
    """The flow and ""; where the stream cannot be read, what passes between blocks, if anything, and the reason."""
    import xarray as xr

    try:
        return measure(model, inputs, targets=targets, loss=loss, jacobian=False), ""
    except AnatomyError as error:
        reason = str(error)
    try:
        sizes, gradients = chain_sizes(model, inputs, targets=targets, loss=loss)
    except (AnatomyError, SnapshotError):
        return None, reason
    # What enters the first block is not known, and is not used.
    values = {"state_rms": sizes, "gradient_norm": gradients}
    flow = xr.Dataset({name: ("boundary", np.concatenate([[math.nan], each])) for name, each in values.items()})
    return flow, reason


def structure_numbers(
    flows: Iterable[xr.Dataset], outputs: Iterable[dict[str, float]], *, log_errors: Mapping[str, float] = NO_OPTIONS
) -> xr.Dataset:
    """Average each number over fresh models that differ in seed, with its standard error.

    Args:
        flows: Of each model, from `workbench.flow.measure`.
        outputs: Of each model, the numbers of ``OUTPUTS`` and ``MODULES``.
        log_errors: Number -> additional standard error of its logarithm, common to all seeds.

    Returns:
        Dataset of the numbers of ``ALL``, 0-dim, geometric means of those compared as logarithms;
        NaN where the model has no such part. ``<name>_error``: standard error over the seeds, of the logarithm where
        the mean is geometric. Attribute ``n_seeds``; of a number ``block``, where it is worst in the first model.
    """
    import xarray as xr

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
        about: dict[str, str | int] = {"long_name": title, "units": "1"}
        if flows and name in WORST_BLOCK and not math.isnan(mean):
            with np.errstate(all="ignore"):
                about["block"] = WORST_BLOCK[name](flows[0])
        data[name] = ((), mean, about)
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
