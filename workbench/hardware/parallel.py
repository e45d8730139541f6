"""Emulation of low precision in forward and backward passes, in tensor parallelism and between pipeline stages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.callbacks.faults.communication import LowPrecisionReduction, ring_sum
from workbench.errors import WorkbenchError
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.share_gradients import Batch, NotMeasured, WorkingCopy, compare
from workbench.models.site import Site

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
    """Measure the error of the gradient if the model is computed in the plan's format instead of float32.

    With low-precision parameters the entire copy has that format; otherwise autocast selects the operations.
    """
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
    split = split_matrices(changed.model, emulation.layer_names, _width(emulation), n, name)
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
    """Change the matrices of some blocks so that they multiply as if they were split over ``n`` devices.

    Args:
        model: The model, changed in place.
        blocks: Module paths of the blocks.
        width: Width of the residual stream.
        n: Number of devices.
        dtype: Format of the communicated values.

    Returns:
        Paths of the split matrices, which have at least ``n`` inputs or outputs.
    """
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
    """Compare the gradients of a changed copy with those of an unchanged one, on a few micro-batches.

    The error for the plan's batch has a part that is common to all micro-batches, and a part that averages out over
    them; both are estimated from the measured micro-batches.

    Args:
        emulation: The emulation.
        changed: The changed copy.
        run: Function that computes its gradients.
        what: Beginning of the sentence about the result.
        how: Beginning of the sentence about the method.
    """
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


def _width(emulation: Emulation) -> int:
    """Return the width of the residual stream; 0 if it cannot be read."""
    return 0 if emulation.anatomy is None else emulation.anatomy.width


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
