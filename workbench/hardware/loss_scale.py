"""Margins of a low-precision format: gradients that underflow, gradients and activations that overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.lost_updates import updating
from workbench.hardware.plan_sections import DTYPES
from workbench.hardware.share_gradients import NotMeasured, WorkingCopy
from workbench.models.block_calls import results

N_UPDATES = 8
_MAX_ENTRIES = 2**20
#: Share of the gradients, the smallest ones, whose loss counts as underflow.
TAIL = 0.01


@dataclass(frozen=True)
class Magnitudes:
    """Sizes of the numbers that would be stored in a low-precision format.

    Attributes:
        weight_gradients: Absolute values of nonzero entries of the gradients of weights, a sample; float32.
        state_gradients: The same of the gradients of module outputs; those that backward hooks do not receive are
            missing.
        largest_gradient: Largest of both, not of a sample.
        largest_activation: Largest of all module outputs.
        where: The module with this output.
    """

    weight_gradients: Tensor
    state_gradients: Tensor
    largest_gradient: float
    largest_activation: float
    where: str


def magnitudes(emulation: Emulation) -> Magnitudes:
    """Measure magnitudes in float32, at initialization and after each of the plan's first few updates on a copy."""
    copy = emulation.copy()
    optimizer = updating(emulation, copy)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator, training = emulation.generator("magnitudes"), emulation.training
    weight_parts: list[Tensor] = []
    state_parts: list[Tensor] = []
    largest, highest, where = 0.0, 0.0, ""
    for step, batch in enumerate(islice(cycle(emulation.micro_batches), N_UPDATES + 1)):
        with _listening(copy) as (outputs, gradients):
            copy.measure(batch)
        for name, value in outputs.items():
            if not value <= highest:
                highest, where = value, name
        largest = max(largest, *(float(g.abs().max()) for g in [*copy.gradients(), *gradients] if g.numel()))
        if step in (0, N_UPDATES):
            weight_parts.append(_sample(copy.gradients(), generator))
            state_parts.append(_sample(gradients, generator))
        if not math.isfinite(largest):
            raise NotMeasured(f"gradients are not finite after {step} updates at the plan's rate, in float32 already")
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.weights, training.clip_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * training.rate_factor(step)
        optimizer.step()
    return Magnitudes(torch.cat(weight_parts), torch.cat(state_parts), largest, highest, where)


def known_magnitudes(emulation: Emulation) -> Magnitudes:
    """`magnitudes`, measured once for all hazards that need them."""
    if "magnitudes" not in emulation.measured:
        emulation.measured["magnitudes"] = magnitudes(emulation)
    return emulation.measured["magnitudes"]


def dynamic_scale(largest: float, kind: torch.dtype) -> float:
    """The largest power of two at which the largest gradient is below overflow, where a dynamic scale settles."""
    return 2.0 ** math.floor(math.log2(torch.finfo(kind).max / largest)) if largest > 0 else 1.0


def share_lost(values: Tensor, scale: float, kind: torch.dtype) -> float:
    """Share of nonzero values that are zero in a format once multiplied by the loss scale; 0 for no values."""
    values = values[values != 0]
    # In float64: a product below the range of float32 would vanish for another reason.
    return float(((values.double() * scale).to(kind) == 0).double().mean()) if values.numel() else 0.0


def gradient_underflow(emulation: Emulation) -> Finding:
    """Share of gradient entries that become zero in the plan's format, at the plan's loss scale."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    scale = _plan_scale(emulation, found, kind)
    of_weights, of_states = (share_lost(v, scale, kind) for v in (found.weight_gradients, found.state_gradients))
    bare = max(share_lost(v, 1.0, kind) for v in (found.weight_gradients, found.state_gradients))
    octaves = _octaves(found, kind)
    return Finding(
        effect=max(of_weights, of_states),
        meaning=f"In {name} at a loss scale of {scale:g}, {percent(of_weights)} of the nonzero entries of the weights' "
        f"gradients and {percent(of_states)} of those of the states become zero (without a scale {percent(bare)}); "
        f"{octaves:.1f} octaves are left between the loss of the smallest {percent(TAIL)} and overflow.",
        how=_how(),
        n_trials=2,
    )


def gradient_range(emulation: Emulation) -> Finding:
    """How much of the format's range the gradients need, at any loss scale."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    total, left = octaves_of(kind), _octaves(found, kind)
    return Finding(
        effect=(total - left) / total,
        meaning=f"From the largest gradient down to the smallest {percent(TAIL)} there are {total - left:.1f} octaves "
        f"of the {total:.0f} that {name} has: a loss scale may be wrong by {max(left, 0.0):.1f} octaves in all.",
        how=_how(),
        n_trials=2,
    )


def gradient_overflow(emulation: Emulation) -> Finding:
    """How near the largest gradient is to overflow at a loss scale that is given as a number."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    scale = _plan_scale(emulation, found, kind)
    share = found.largest_gradient * scale / torch.finfo(kind).max
    near = dynamic_scale(found.largest_gradient, kind) / 64
    return Finding(
        effect=share,
        meaning=f"At a loss scale of {scale:g} the largest gradient is {share:.2g} of the largest number in {name}: "
        f"{_room(share)}.",
        how=_how(),
        n_trials=N_UPDATES + 1,
        remedy_value=f"dynamic, or {near:g}" if share > 1 / 64 else None,
    )


def activation_overflow(emulation: Emulation) -> Finding:
    """How near the largest activation is to overflow in the format that the plan computes in."""
    kind = emulation.plan.compute_dtype
    name = str(kind).removeprefix("torch.")
    found = known_magnitudes(emulation)
    share = found.largest_activation / torch.finfo(kind).max
    return Finding(
        effect=share,
        meaning=f"The largest activation, {found.largest_activation:.3g} in {found.where or 'the model'}, is "
        f"{share:.2g} of the largest number in {name}: {_room(share)}.",
        how=f"{_how()} Only what modules give out is seen, not what is inside of them.",
        n_trials=N_UPDATES + 1,
    )


def octaves_of(kind: torch.dtype) -> float:
    """Octaves between the smallest nonzero number and the largest: 40 for float16, 261 for bfloat16."""
    return math.log2(torch.finfo(kind).max) - math.log2(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)


def narrow_format(emulation: Emulation) -> tuple[torch.dtype, str]:
    """The format with the narrowest range that gradients pass in the plan."""
    hardware = emulation.plan.hardware
    kinds = {emulation.plan.compute_dtype, DTYPES[hardware.gradient_dtype], DTYPES[hardware.accumulation_dtype]}
    kind = min(kinds, key=octaves_of)
    return kind, str(kind).removeprefix("torch.")


def _plan_scale(emulation: Emulation, found: Magnitudes, kind: torch.dtype) -> float:
    """The loss scale of the plan; only float16 has one."""
    if kind is not torch.float16:
        return 1.0
    scale = emulation.plan.hardware.loss_scale
    return dynamic_scale(found.largest_gradient, kind) if scale == "dynamic" else float(scale)


def _octaves(found: Magnitudes, kind: torch.dtype) -> float:
    """Octaves by which the loss scale may vary without overflow or the loss of more than the smallest gradients."""
    tails = [_tail(values) for values in (found.weight_gradients, found.state_gradients) if values.numel()]
    if not tails or not found.largest_gradient:
        raise NotMeasured("all gradients are zero")
    return octaves_of(kind) - math.log2(found.largest_gradient / min(tails))


def _tail(values: Tensor) -> float:
    """The quantile ``TAIL`` of the values; at least the smallest number of float32."""
    index = max(1, math.ceil(TAIL * values.numel()))
    return float(values.kthvalue(index).values)


def _room(share: float) -> str:
    if not share > 0:
        return "nothing is there"
    octaves = -math.log2(share)
    return f"{octaves:.1f} octaves below overflow" if octaves >= 0 else f"it overflows, by {-octaves:.1f} octaves"


def _how() -> str:
    return f"In float32, at the initial weights and over {N_UPDATES} updates of a copy at the plan's first rates."


def _sample(tensors: list[Tensor], generator: torch.Generator) -> Tensor:
    """A sample of absolute nonzero values, evenly from all tensors."""
    total = sum(t.numel() for t in tensors)
    step = max(1, -(-total // _MAX_ENTRIES))
    parts = []
    for tensor in tensors:
        start = int(torch.randint(min(step, max(tensor.numel(), 1)), (1,), generator=generator))
        parts.append(tensor.flatten()[start::step].float().abs().cpu())
    values = torch.cat(parts) if parts else torch.empty(0)
    return values[values > 0]


@contextmanager
def _listening(copy: WorkingCopy) -> Iterator[tuple[dict[str, float], list[Tensor]]]:
    """Largest output of each module, by name, and the gradients of the outputs of innermost modules."""
    outputs: dict[str, float] = {}
    gradients: list[Tensor] = []
    handles = []

    def listen(name: str, is_innermost: bool) -> None:
        def hook(_module: torch.nn.Module, _args: tuple, output: object) -> None:
            for _, value in results(output):
                if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
                    continue
                outputs[name] = max(outputs.get(name, 0.0), float(value.detach().abs().max()))
                if is_innermost and value.requires_grad:
                    value.register_hook(lambda g: gradients.append(g.detach()))

        module = copy.model.get_submodule(name)
        handles.append(module.register_forward_hook(hook))

    for name, module in copy.model.named_modules():
        listen(name, next(module.children(), None) is None)
    try:
        yield outputs, gradients
    finally:
        for handle in handles:
            handle.remove()
