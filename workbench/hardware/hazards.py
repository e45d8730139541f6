"""The numerical hazards of a plan: the setting that causes each, its measurement, its limits and their reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.callbacks.faults.communication import LowPrecisionReduction, StaleReduction, ring_sum
from workbench.errors import WorkbenchError
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Batch, Emulation, Finding, NotMeasured, WorkingCopy, compare
from workbench.hardware.number_formats import (
    accumulation_error,
    accumulation_shrinkage,
    activation_overflow,
    allreduce_error,
    allreduce_shrinkage,
    bucket_layout,
    gradient_overflow,
    gradient_range,
    gradient_underflow,
    lost_updates,
    plan_buckets,
    reduction_order,
    updating,
)
from workbench.hardware.plan import AssessmentPlan
from workbench.models.batches import count_examples, take_examples
from workbench.models.block_calls import Site
from workbench.option_kinds import Measured
from workbench.schema.statuses import CriterionState

#: Number of micro-batches whose gradients are measured with and without the effect.
_N_BATCHES = 4
_FIRST_SCALE = 2.0**16
#: Usual names of matrices that read the residual stream, which tensor parallelism splits by their outputs. Other
#: matrices whose output has the width of the residual stream are split by their inputs, and the partial sums are added.
_READS_STREAM = re.compile(
    r"(^|[._])(q|k|v|qkv|query|key|value|c_attn|c_fc|gate|up|fc1|w1|w3|wi|expand)(_|$|[0-9])|query_key_value|h_to_4h"
)
#: Function of a copy and a batch that returns the gradient of each parameter.
Pass = Callable[[WorkingCopy, Batch], list[Tensor]]


def compute_rounding(emulation: Emulation) -> Finding:
    """Measure the error of the gradient if the model is computed in the plan's format instead of float32."""
    plan, kind = emulation.plan, emulation.plan.compute_dtype
    name = str(kind).removeprefix("torch.")
    is_cast = plan.hardware.weight_dtype != "float32"
    changed = emulation.copy()
    if is_cast:
        changed.model.to(kind)

    def run(copy: WorkingCopy, batch: Batch) -> list[Tensor]:
        scale = _FIRST_SCALE if kind is torch.float16 else 1.0
        while True:
            copy.measure(_as_floats(batch, kind) if is_cast else batch, autocast=None if is_cast else kind, scale=scale)
            gradients = [gradient.float() / scale for gradient in copy.gradients()]
            if scale <= 1 or all(bool(g.isfinite().all()) for g in gradients):
                return gradients
            scale /= 2  # As with a dynamic loss scale.

    return _error_of_passes(
        emulation,
        changed,
        run,
        what=f"Computing in {name}",
        how=f"{'A copy in' if is_cast else 'Autocast to'} {name}, compared with float32",
    )


def tensor_parallel(emulation: Emulation) -> Finding:
    """Measure the error of the gradient if partial sums of split matrices are added in the plan's format.

    Each matrix of a block that writes to the residual stream is split by its inputs; the partial products are rounded
    and added in a ring. Each matrix that reads the residual stream is split by its outputs, and in the backward pass
    the devices' parts of the gradient of its input are added in the same way (Shoeybi et al. 2019, arXiv:1909.08053).
    Names and shapes determine which matrices read and which write. Everything else is computed in float32.
    """
    plan, n = emulation.plan, emulation.plan.hardware.tensor_parallel
    name = str(plan.compute_dtype).removeprefix("torch.")
    if n < 2:
        raise NotMeasured("nothing is split over devices")
    changed = emulation.copy()
    split = split_matrices(
        changed.model, emulation.layer_names, 0 if emulation.anatomy is None else emulation.anatomy.width, n, name
    )
    if not split:
        raise NotMeasured("no matrix was found that reads or writes the residual stream")
    return _error_of_passes(
        emulation,
        changed,
        _gradients,
        what=f"Adding the partial sums of {n} devices in {name}",
        how=f"{len(split)} matrices in {n} parts each, added in a ring",
    )


def pipeline_boundaries(emulation: Emulation) -> Finding:
    """Measure the error of the gradient if states and their gradients are sent between stages in the plan's format."""
    plan, name = emulation.plan, str(emulation.plan.compute_dtype).removeprefix("torch.")
    if plan.hardware.pipeline_parallel < 2:
        raise NotMeasured("there is one stage, so nothing is sent")
    if emulation.anatomy is None:
        raise NotMeasured("the residual blocks of the model cannot be read")
    depth = len(emulation.anatomy.sites)
    n_stages = min(plan.hardware.pipeline_parallel, depth)
    if n_stages < 2:
        raise NotMeasured("the measured model has one block, so there is no boundary")
    starts = [int(part[0]) for part in torch.arange(depth).tensor_split(n_stages)][1:]
    changed = emulation.copy()
    if any(site.exit is not None for site in emulation.anatomy.sites):
        raise NotMeasured("residuals are added outside of modules, so states between stages cannot be rounded")
    for start in starts:
        _send(changed.model, emulation.anatomy.sites[start], plan.compute_dtype)
    fewer = "" if n_stages == plan.hardware.pipeline_parallel else f" (the measured model has only {depth} blocks)"
    return _error_of_passes(
        emulation,
        changed,
        _gradients,
        what=f"Sending states between {plan.hardware.pipeline_parallel} stages in {name}",
        how=f"States and their gradients rounded at {len(starts)} boundaries{fewer}",
    )


def split_matrices(model: nn.Module, blocks: Iterable[str], width: int, n: int, dtype: str) -> list[str]:
    """Change the matrices of some blocks so that they multiply as if they were split over ``n`` devices."""
    fault = LowPrecisionReduction(n_ranks=n, dtype=dtype)
    found = []
    for block in blocks:
        for path, module in model.get_submodule(block).named_modules():
            weight = getattr(module, "weight", None)
            is_conv = type(module).__name__ == "Conv1D"  # In transformers, a linear map of shape (input, output).
            if not (isinstance(module, nn.Linear) or is_conv) or not isinstance(weight, Tensor) or weight.ndim != 2:
                continue
            n_inputs, n_outputs = weight.shape if is_conv else weight.shape[::-1]
            is_named_reader = bool(_READS_STREAM.search(path.rsplit(".", 1)[-1]))
            is_reader = n_inputs == width and (is_named_reader or n_outputs != width)
            is_writer = n_outputs == width and not is_reader
            if not ((is_reader and n_outputs >= n) or (is_writer and n_inputs >= n)):
                continue
            product = _ReaderProduct.apply if is_reader else _writer_product

            def forward(
                x: Tensor, module: nn.Module = module, product: Any = product, is_conv: bool = is_conv
            ) -> Tensor:
                weight = module.weight.T if is_conv else module.weight
                y = product(x, weight, fault)
                return y if module.bias is None else y + module.bias

            module.forward = forward
            found.append(f"{block}.{path}")
    return found


def _writer_product(x: Tensor, weight: Tensor, fault: LowPrecisionReduction) -> Tensor:
    """Return ``x weight^T`` with the inputs split over ranks, and the parts added in the format of the fault."""
    parts = zip(x.tensor_split(fault.n_ranks, -1), weight.tensor_split(fault.n_ranks, 1), strict=True)
    partial = [functional.linear(a, b) for a, b in parts]
    return ring_sum([p.flatten() for p in partial], fault).view_as(partial[0])


class _ReaderProduct(torch.autograd.Function):
    """``x weight^T`` without error; the gradient of x is added over ranks, each with a part of the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fault: LowPrecisionReduction) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        n = ctx.fault.n_ranks
        parts = zip(gradient.tensor_split(n, -1), weight.tensor_split(n, 0), strict=True)
        of_x = ring_sum([(g @ w).flatten() for g, w in parts], ctx.fault).view_as(x)
        return of_x, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


def _send(model: nn.Module, site: Site, kind: torch.dtype) -> None:
    """Add a hook that rounds the state that enters a block, and its gradient."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def sent(state: Tensor) -> Tensor:
            return state.to(kind).to(state.dtype)

        slot = site.input_slot
        if isinstance(slot, tuple) or site.terms is not None:
            return site.with_state(args, kwargs, sent(site.state_in(args, kwargs)))
        if isinstance(slot, int):
            return tuple(sent(a) if i == slot else a for i, a in enumerate(args)), kwargs
        return args, {name: sent(a) if name == slot else a for name, a in kwargs.items()}

    model.get_submodule(site.name.split("#")[0]).register_forward_pre_hook(hook, with_kwargs=True)


def _error_of_passes(emulation: Emulation, changed: WorkingCopy, run: Pass, *, what: str, how: str) -> Finding:
    """Compare gradients of a changed and an unchanged copy on some micro-batches: common and averaging error."""
    unchanged, batches = emulation.copy(), emulation.micro_batches[:_N_BATCHES]
    layout = emulation.layout_of(unchanged, n_shares=2 * len(batches))
    found, exact = [], []
    for batch in batches:
        exact.append(layout.flat(_gradients(unchanged, batch)).double())
        try:
            found.append(layout.flat(run(changed, batch)).double())
        except WorkbenchError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise NotMeasured(f"the model does not run in this format ({reason})") from error
    factor, layer = layout.factor, layout.layer
    mean = torch.stack(exact).mean(0)
    total = compare(torch.stack(found).mean(0), mean, factor, layer, layout.n_layers)
    if not math.isfinite(total.error_norm):
        return Finding(
            effect=math.inf,
            meaning=f"{what} yields gradients that are not finite.",
            how=f"{how}.",
            n_trials=len(batches),
        )
    errors = torch.stack([f - e for f, e in zip(found, exact, strict=True)])
    m, n = len(batches), emulation.plan.n_shares * emulation.plan.rows_per_share / emulation.rows
    spread = float(((errors - errors.mean(0)).square() * factor).sum()) / max(m - 1, 1)
    common = max(0.0, total.error_norm**2 - spread / m)
    over_noise = emulation.over_noise(math.sqrt(common + spread / max(n, 1)))
    return Finding(
        effect=over_noise,
        meaning=f"{what} changes the gradient of a few examples by {percent(total.relative_error)}; for the plan's "
        f"batch this is {percent(over_noise)} of its sampling noise{emulation.worst_layer(total.layer_errors)}.",
        how=f"{how}, on {m} micro-batches of {counted(emulation.rows, 'example')}.",
        n_trials=m,
        relative_error=total.relative_error,
        error_over_noise=over_noise,
        shrinkage=total.shrinkage,
        cosine=total.cosine,
        layer_errors=total.layer_errors,
    )


def _gradients(copy: WorkingCopy, batch: Batch) -> list[Tensor]:
    """Return the gradients of a copy in float32."""
    copy.measure(batch)
    return [gradient.clone() for gradient in copy.gradients()]


def _as_floats(batch: Batch, kind: torch.dtype) -> Batch:
    """Convert the floating-point inputs of a batch, such as images, to a format."""

    def cast(value: Any) -> Any:
        return value.to(kind) if isinstance(value, Tensor) and value.is_floating_point() else value

    inputs, targets = batch
    if isinstance(inputs, Tensor):
        return cast(inputs), targets
    if isinstance(inputs, tuple | list):
        return tuple(cast(v) for v in inputs), targets
    return {name: cast(v) for name, v in inputs.items()}, targets


N_UPDATES = 20
_ROWS = 4
#: Exponents of 2 of the smallest and largest learning rate tried, relative to the plan's rate.
_LOWEST, _HIGHEST = -6, 10
#: Last step of the search, in octaves; half an octave determines the edge to within a fifth.
_RESOLUTION = 0.5


def late_gradients(emulation: Emulation) -> Finding:
    """Measure the plan's learning rate over the largest one that decreases the loss with late gradients.

    A rate decreases the loss if none of twenty updates diverges by the plan's limits, and if over the last quarter of
    them the mean loss is lower than the initial loss of the same batches. The largest such rate is found by bisection,
    assuming that no larger rate decreases the loss; warm-up and schedule are ignored. For SGD on a parabola the result
    is known: a delay of k updates multiplies the largest rate by sin(pi / (4 k + 2)), which is 1/2 for one update.
    """
    hardware = emulation.plan.hardware
    delay = hardware.delay
    if not delay:
        raise NotMeasured("no gradient is late")
    buckets = plan_buckets(emulation)
    late = buckets if hardware.reduction == "stale" else buckets[-1:]
    rate = max(group["lr"] for group in updating(emulation, emulation.copy()).param_groups)
    is_lower, cosine = _run(emulation, 1.0, delay, late)
    power_late = _edge(lambda power: is_lower if power == 0 else _run(emulation, 2.0**power, delay, late)[0], 0)
    # The edge without delay is rarely far above that with delay, so the search starts there.
    start = min(max(power_late - _RESOLUTION / 2, _LOWEST), _HIGHEST)
    power = _edge(lambda power: _run(emulation, 2.0**power, 0, late)[0], start)
    edge_late, edge = rate * 2.0**power_late, rate * 2.0**power
    which = "all gradients" if hardware.reduction == "stale" else "the gradients of the last bucket"
    part = (
        "" if hardware.reduction == "stale" else f"; {percent(_fraction(emulation, late))} of the parameters are late"
    )
    updates = counted(delay, "update")
    if edge_late == math.inf:
        found = f"every learning rate tried decreases the loss, up to {rate * 2.0**_HIGHEST:.3g}"
    elif edge == 0:
        found = f"no learning rate down to {rate * 2.0**_LOWEST:.3g} decreases the loss, nor does any without delay"
    else:
        before = f"{edge:.3g}" if math.isfinite(edge) else f"more than {rate * 2.0**_HIGHEST:.3g}"
        found = (
            f"the largest learning rate that decreases the loss in {N_UPDATES} updates is {edge_late:.3g} instead of "
            f"{before}"
        )
    return Finding(
        effect=rate / edge_late if edge_late else math.inf,
        meaning=f"With {which} {updates} late, {found}; the plan's rate is {rate:.3g}"
        f"{'' if math.isnan(cosine) else f', at which the cosine of late and current gradient is {cosine:.2f}'}.",
        how=f"{N_UPDATES} updates of copies at constant learning rates, on batches of at most {_ROWS} examples, "
        f"compared with the same without delay{part}.",
        n_trials=1,
        shrinkage=1 - edge_late / edge if math.isfinite(edge) and edge else math.nan,
        cosine=cosine,
        remedy_value=f"synchronous, or learning_rate = {edge_late / 2:.2g}" if 0 < edge_late < 2 * rate else None,
    )


def _edge(decreases: Callable[[float], bool], start: float) -> float:
    """Return the largest exponent of 2, relative to the plan's rate, that decreases the loss; to a quarter octave."""
    is_upward = decreases(start)
    low, high, step = start, start, 1.0
    while True:
        if is_upward and low >= _HIGHEST:
            return math.inf
        if not is_upward and high <= _LOWEST:
            return -math.inf
        power = min(low + step, _HIGHEST) if is_upward else max(high - step, _LOWEST)
        is_lower = decreases(power)
        low, high = (power if is_lower else low), (high if is_lower else power)
        if is_lower != is_upward:
            break
        step *= 2
    while high - low > _RESOLUTION:
        middle = math.floor((low + high) / 2 / _RESOLUTION) * _RESOLUTION
        low, high = (middle, high) if decreases(middle) else (low, middle)
    return (low + high) / 2


def _run(emulation: Emulation, factor: float, delay: int, late: list[list[int]]) -> tuple[bool, float]:
    """Return whether updates at a multiple of the rate decrease the loss, and the mean cosine of the late gradients."""
    copy, plan = emulation.copy(), emulation.training
    optimizer = updating(emulation, copy, factor)
    fault = StaleReduction(delay=delay) if delay else None
    generator = emulation.generator("late")
    # Return batches of a few examples, so that many learning rates can be tried
    batches = [(take_examples(x, slice(0, min(_ROWS, count_examples(x)))), y[:_ROWS]) for x, y in emulation.batches]
    kept: list[list[Tensor | None]] = []
    cosines: list[float] = []
    if "first losses" not in emulation.measured:
        emulation.measured["first losses"] = [copy.measure(batch) for batch in batches]
    changes = []
    for step in range(N_UPDATES):
        loss = copy.measure(batches[step % len(batches)])
        changes.append(loss - emulation.measured["first losses"][step % len(batches)])
        present = [g.clone() for g in copy.gradients()]
        if plan.cause_of_divergence(loss, float(torch.nn.utils.get_total_norm(present))):
            return False, _mean(cosines)
        if fault is not None:
            kept = [*kept[-delay:], list[Tensor | None](present)]
            used = cast(list[Tensor], fault.late(kept, late, generator))
            if step >= delay:
                cosines.append(_cosine(used, present))
            for parameter, gradient in zip(copy.parameters, used, strict=True):
                parameter.grad = gradient.clone()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.parameters, plan.clip_norm)
        optimizer.step()
    return _mean(changes[-N_UPDATES // 4 :]) < 0, _mean(cosines)


def _fraction(emulation: Emulation, buckets: list[list[int]]) -> float:
    """Return the fraction of the parameters that is in some buckets."""
    sizes = [parameter.numel() for parameter in emulation.copy().parameters]
    return sum(sizes[i] for bucket in buckets for i in bucket) / sum(sizes)


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the cosine between two gradients; NaN if one is zero."""

    def dot(u: list[Tensor], v: list[Tensor]) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(u, v, strict=True))

    lengths = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / lengths if lengths else math.nan


def _mean(values: list[float]) -> float:
    """Return the mean; NaN without values."""
    return math.fsum(values) / len(values) if values else math.nan


# The reasons of the limits.
_NOISE = (
    "An independent error of r times the sampling noise increases the variance of the gradient by a factor of 1 + r^2, "
    "as if the batch were smaller by this factor: by a tenth at r = 1/3, by half at r = 1."
)
_SHRINKAGE = (
    "The fraction that is missing along the gradient is missing in every update and does not average out. A hundredth "
    "is less than the precision to which learning rates are tuned; a tenth is an unplanned reduction of the learning "
    "rate, which differs between parameters."
)
_LOST = (
    "The lost fraction acts like a smaller learning rate: a twentieth is within the precision to which learning rates "
    "are tuned; beyond a half the run makes little progress."
)
_UNDERFLOW = (
    "Optimizers such as Adam divide each gradient by its magnitude, so that small gradients have the same weight as "
    "large ones; a parameter whose gradient becomes zero is not trained. A hundredth of the entries is the tail of the "
    "distribution, a tenth is a part of the model."
)
_MARGIN = "Gradients and activations may grow by factors of tens in training; a factor of 64, six octaves, is reserved."
_RANGE = "Six of the 40 octaves of float16, or 0.15 of them, are reserved for changes while a dynamic scale adapts."
_RATE = (
    "A factor of two below the largest learning rate that decreases the loss is the usual margin; above that rate the "
    "loss increases."
)


@dataclass(frozen=True)
class Hazard:
    """A setting of a plan that may cause numerical errors."""

    id: str
    title: str
    setting: str
    applies: Callable[[AssessmentPlan], bool]
    measure: Callable[[Emulation], Finding]
    unit: str
    healthy_limit: float
    failing_limit: float
    reason: str
    remedy_setting: str
    remedy_value: str

    def state_of(self, effect: Measured) -> CriterionState:
        """Return the state of an effect relative to the limits; NaN counts as not measured."""
        if math.isnan(effect):
            return CriterionState.NOT_MEASURED
        if effect <= self.healthy_limit:
            return CriterionState.HEALTHY
        return CriterionState.AT_RISK if effect <= self.failing_limit else CriterionState.FAILING


def _has_ranks(plan: AssessmentPlan) -> bool:
    return plan.hardware.data_parallel > 1


def _accumulates(plan: AssessmentPlan) -> bool:
    return plan.hardware.accumulation > 1


def _computes_low(plan: AssessmentPlan) -> bool:
    return plan.compute_dtype is not torch.float32


def _has_low_gradients(plan: AssessmentPlan, *, of: tuple[str, ...] = ("bfloat16", "float16")) -> bool:
    name = str(plan.compute_dtype).removeprefix("torch.")
    return not {name, plan.hardware.gradient_dtype, plan.hardware.accumulation_dtype}.isdisjoint(of)


def _has_fixed_scale(plan: AssessmentPlan) -> bool:
    return _has_low_gradients(plan, of=("float16",)) and plan.hardware.loss_scale != "dynamic"


_OF_NOISE = "of the batch's sampling noise"

HAZARDS: tuple[Hazard, ...] = (
    Hazard("allreduce_error", "Rounding of the gradient reduction", "gradient_dtype", _has_ranks, allreduce_error,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32"),
    Hazard(
        "allreduce_shrinkage", "Gradient shortened by the reduction", "gradient_dtype", _has_ranks, allreduce_shrinkage,
        "of the gradient", 0.01, 0.1, _SHRINKAGE, "gradient_dtype", "float32"),
    Hazard("reduction_order", "Order of the gradient reduction", "reduction_order", _has_ranks, reduction_order,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32"),
    Hazard("bucket_layout", "Buckets of the gradient reduction", "bucket_mb", _has_ranks, bucket_layout,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "gradient_dtype", "float32"),
    Hazard("accumulation_error", "Rounding of the gradient accumulation", "accumulation_dtype", _accumulates,
        accumulation_error, _OF_NOISE, 1 / 3, 1.0, _NOISE, "accumulation_dtype", "float32"),
    Hazard("accumulation_shrinkage", "Gradient shortened by the accumulation", "accumulation_dtype", _accumulates,
        accumulation_shrinkage, "of the gradient", 0.01, 0.1, _SHRINKAGE, "accumulation_dtype", "float32"),
    Hazard("lost_updates", "Updates lost in low-precision parameters", "master_weights",
        lambda plan: plan.hardware.weight_dtype != "float32" and not plan.hardware.master_weights, lost_updates,
        "of the intended change", 0.05, 0.5, _LOST, "master_weights", "true"),
    Hazard("compute_rounding", "Gradient computed in low precision", "precision", _computes_low, compute_rounding,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "precision", "float32"),
    Hazard("gradient_underflow", "Gradients that become zero", "loss_scale", _has_low_gradients, gradient_underflow,
        "of nonzero entries", 0.01, 0.1, _UNDERFLOW, "precision", "bfloat16"),
    Hazard("gradient_range", "Range of the gradients", "precision", _has_low_gradients, gradient_range,
        "of the format's octaves", 0.85, 1.0, _RANGE, "precision", "bfloat16"),
    Hazard("gradient_overflow", "Gradients near overflow", "loss_scale", _has_fixed_scale, gradient_overflow,
        "of the largest number", 1 / 64, 1.0, _MARGIN, "loss_scale", "dynamic"),
    Hazard("activation_overflow", "Activations near overflow", "precision", _computes_low, activation_overflow,
        "of the largest number", 1 / 64, 1.0, _MARGIN, "precision", "bfloat16"),
    Hazard("late_gradients", "Late gradients", "staleness", lambda plan: plan.hardware.delay > 0, late_gradients,
        "of the largest rate that decreases the loss", 0.5, 1.0, _RATE, "reduction", "synchronous"),
    Hazard("tensor_parallel", "Partial sums of split matrices", "tensor_parallel",
        lambda plan: plan.hardware.tensor_parallel > 1, tensor_parallel,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "tensor_parallel", "1"),
    Hazard("pipeline_boundaries", "States sent between stages", "pipeline_parallel",
        lambda plan: plan.hardware.pipeline_parallel > 1, pipeline_boundaries,
        _OF_NOISE, 1 / 3, 1.0, _NOISE, "pipeline_parallel", "1"),
)  # fmt: skip
