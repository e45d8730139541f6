"""Numbers of a low-precision format: lost updates, underflow of gradients, overflow of gradients and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding, NotMeasured, WorkingCopy
from workbench.hardware.plan import DTYPES
from workbench.models.block_calls import results

N_UPDATES = 8
_N_RATES = 8


def lost_updates(emulation: Emulation) -> Finding:
    """Measure the fraction of the intended change of the parameters that rounding removes, with the plan's optimizer.

    The parameters of a copy are rounded to the plan's format. The optimizer computes in float32 from their gradients,
    and the updated parameters are rounded to the nearest number of the format. The lost fraction is
    1 - <actual, intended> / <intended, intended> over all parameters and a few updates. An update of less than half the
    distance to the next number is lost entirely. Because updates are proportional to the learning rate, each is rounded
    at the rates of the full schedule. The effect is the mean over the schedule, weighted by the rate: the fraction of
    the total change in the run. The state of the optimizer is not rounded.
    """
    hardware, training = emulation.plan.hardware, emulation.training
    kind = DTYPES[hardware.weight_dtype]
    copy = emulation.copy()
    optimizer = updating(emulation, copy)
    factors = np.array([training.rate_factor(int(s)) for s in np.linspace(0, training.n_steps - 1, _N_RATES)])
    rates, repetitions = np.unique(np.append(factors[factors > 0], 1.0), return_counts=True)
    counts = repetitions.astype(float)
    counts[-1] -= 1  # The peak was added to the rates of the schedule.
    n_parameters = len(copy.parameters)
    actual_along = np.zeros((n_parameters, len(rates)))
    error, length, n_frozen, n_intended = np.zeros(n_parameters), np.zeros(n_parameters), 0, 0
    with torch.no_grad():
        for parameter in copy.parameters:
            parameter.copy_(parameter.to(kind).float())
    for batch in islice(cycle(emulation.micro_batches), N_UPDATES):
        before = [parameter.detach().clone() for parameter in copy.parameters]
        copy.measure(batch)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.parameters, training.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for i, (parameter, start) in enumerate(zip(copy.parameters, before, strict=True)):
                intended = (parameter - start).double()
                length[i] += float(intended.square().sum())
                for r, rate in enumerate(rates):
                    actual = (start + rate * intended).to(kind).double() - start.double()
                    actual_along[i, r] += float((actual * intended).sum()) / rate
                # The last rate is the peak, with which the copy continues.
                parameter.copy_((start + intended).to(kind).float())
                error[i] += float((actual - intended).square().sum())
                n_frozen += int(((actual == 0) & (intended != 0)).sum())
                n_intended += int((intended != 0).sum())
    if not length.sum() or not math.isfinite(length.sum()):
        raise NotMeasured("the updates are zero or not finite at the plan's learning rate")
    lost = 1 - actual_along.sum(0) / length.sum()
    mean = float(np.average(lost, weights=rates * np.maximum(counts, 1e-12)))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_parameter = np.where(length > 0, 1 - actual_along[:, -1] / length, np.nan)
    worst = int(np.nanargmax(of_parameter))
    layers = emulation.layout_of(copy, n_shares=1).layers
    in_layer = [np.array(layers) == layer for layer in range(len(emulation.layer_names))]
    return Finding(
        effect=max(0.0, mean),
        meaning=f"Rounding to {hardware.weight_dtype} removes {percent(mean)} of the updates of "
        f"{type(optimizer).__name__} over the schedule ({percent(lost[-1])} at the peak learning rate, where "
        f"{percent(n_frozen / n_intended)} of the entries do not change); most in {copy.names[worst]} "
        f"({percent(of_parameter[worst])}).",
        how=f"{N_UPDATES} updates of a copy at the peak rate, each also rounded at {len(rates)} rates of the schedule.",
        n_trials=N_UPDATES,
        relative_error=float(np.sqrt(error.sum() / length.sum())),
        shrinkage=mean,
        layer_errors=np.array(
            [math.sqrt(error[i].sum() / n) if (n := length[i].sum()) else math.nan for i in in_layer]
        ),
    )


def updating(emulation: Emulation, copy: WorkingCopy, factor: float = 1.0) -> torch.optim.Optimizer:
    """Create the plan's optimizer for a copy, at a multiple of its peak learning rate."""
    optimizer = emulation.training.optimizer_for(copy.model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotMeasured(f"{type(optimizer).__name__} needs several gradients for an update")
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"]) * factor
    return optimizer


_MAX_ENTRIES = 2**20
#: Fraction of the gradients, the smallest ones, whose loss counts as underflow.
TAIL = 0.01


@dataclass(frozen=True)
class Magnitudes:
    """Samples of magnitudes that would be stored in a low-precision format, float32, and the largest of all.

    ``state_gradients`` are those of module outputs, without those that backward hooks do not receive; ``where`` is the
    module of the largest activation.
    """

    parameter_gradients: Tensor
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
    parameter_parts: list[Tensor] = []
    state_parts: list[Tensor] = []
    largest, highest, where = 0.0, 0.0, ""
    for step, batch in enumerate(islice(cycle(emulation.micro_batches), N_UPDATES + 1)):
        with _recorded(copy) as (outputs, gradients):
            copy.measure(batch)
        for name, value in outputs.items():
            if not value <= highest:
                highest, where = value, name
        largest = max(largest, *(float(g.abs().max()) for g in [*copy.gradients(), *gradients] if g.numel()))
        if step in (0, N_UPDATES):
            parameter_parts.append(_sample(copy.gradients(), generator))
            state_parts.append(_sample(gradients, generator))
        if not math.isfinite(largest):
            raise NotMeasured(f"gradients are not finite after {step} updates at the plan's learning rate, in float32")
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.parameters, training.clip_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * training.rate_factor(step)
        optimizer.step()
    return Magnitudes(torch.cat(parameter_parts), torch.cat(state_parts), largest, highest, where)


def known_magnitudes(emulation: Emulation) -> Magnitudes:
    """Return `magnitudes`, measured once for all hazards."""
    if "magnitudes" not in emulation.measured:
        emulation.measured["magnitudes"] = magnitudes(emulation)
    return emulation.measured["magnitudes"]


def dynamic_scale(largest: float, kind: torch.dtype) -> float:
    """Return the largest power of two without overflow of the largest gradient, which a dynamic scale reaches."""
    return 2.0 ** math.floor(math.log2(torch.finfo(kind).max / largest)) if largest > 0 else 1.0


def underflow_fraction(values: Tensor, scale: float, kind: torch.dtype) -> float:
    """Return the fraction of nonzero values that become zero in a format after scaling; 0 without values."""
    values = values[values != 0]
    # In float64, because the product could underflow in float32.
    return float(((values.double() * scale).to(kind) == 0).double().mean()) if values.numel() else 0.0


def gradient_underflow(emulation: Emulation) -> Finding:
    """Measure the fraction of gradient entries that become zero in the plan's format, at the plan's loss scale."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    scale = _plan_scale(emulation, found, kind)
    both = found.parameter_gradients, found.state_gradients
    of_parameters, of_states = (underflow_fraction(values, scale, kind) for values in both)
    unscaled = max(underflow_fraction(values, 1.0, kind) for values in both)
    octaves = _octaves(found, kind)
    return Finding(
        effect=max(of_parameters, of_states),
        meaning=f"In {name} at a loss scale of {scale:g}, {percent(of_parameters)} of the nonzero entries of the "
        f"gradients of parameters and {percent(of_states)} of those of states become zero (without a scale "
        f"{percent(unscaled)}); there are {octaves:.1f} octaves between the loss of the smallest {percent(TAIL)} and "
        "overflow.",
        how=_how(),
        n_trials=2,
    )


def gradient_range(emulation: Emulation) -> Finding:
    """Measure the fraction of the range of the format that the gradients need, at any loss scale."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    total, remaining = octaves_of(kind), _octaves(found, kind)
    return Finding(
        effect=(total - remaining) / total,
        meaning=f"The gradients, from the largest to the smallest {percent(TAIL)}, span {total - remaining:.1f} of the "
        f"{total:.0f} octaves of {name}, which leaves {max(remaining, 0.0):.1f} octaves for the choice of a scale.",
        how=_how(),
        n_trials=2,
    )


def gradient_overflow(emulation: Emulation) -> Finding:
    """Measure how close the largest gradient is to overflow at a constant loss scale."""
    kind, name = narrow_format(emulation)
    found = known_magnitudes(emulation)
    scale = _plan_scale(emulation, found, kind)
    fraction = found.largest_gradient * scale / torch.finfo(kind).max
    proposed = dynamic_scale(found.largest_gradient, kind) / 64
    return Finding(
        effect=fraction,
        meaning=f"At a loss scale of {scale:g} the largest gradient is {fraction:.2g} times the largest number in "
        f"{name}: {_margin(fraction)}.",
        how=_how(),
        n_trials=N_UPDATES + 1,
        remedy_value=f"dynamic, or {proposed:g}" if fraction > 1 / 64 else None,
    )


def activation_overflow(emulation: Emulation) -> Finding:
    """Measure how close the largest activation is to overflow in the format of the plan's computations."""
    kind = emulation.plan.compute_dtype
    name = str(kind).removeprefix("torch.")
    found = known_magnitudes(emulation)
    fraction = found.largest_activation / torch.finfo(kind).max
    return Finding(
        effect=fraction,
        meaning=f"The largest activation, {found.largest_activation:.3g} in {found.where or 'the model'}, is "
        f"{fraction:.2g} times the largest number in {name}: {_margin(fraction)}.",
        how=f"{_how()} Only outputs of modules are measured, not intermediate results within them.",
        n_trials=N_UPDATES + 1,
    )


def octaves_of(kind: torch.dtype) -> float:
    """Return the octaves between the smallest nonzero and the largest number: 40 for float16, 261 for bfloat16."""
    return math.log2(torch.finfo(kind).max) - math.log2(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)


def narrow_format(emulation: Emulation) -> tuple[torch.dtype, str]:
    """Return the format with the narrowest range among those of the gradients in the plan, and its name."""
    hardware = emulation.plan.hardware
    kinds = {emulation.plan.compute_dtype, DTYPES[hardware.gradient_dtype], DTYPES[hardware.accumulation_dtype]}
    kind = min(kinds, key=octaves_of)
    return kind, str(kind).removeprefix("torch.")


def _plan_scale(emulation: Emulation, found: Magnitudes, kind: torch.dtype) -> float:
    """Return the loss scale of the plan; 1 for formats other than float16."""
    if kind is not torch.float16:
        return 1.0
    scale = emulation.plan.hardware.loss_scale
    return dynamic_scale(found.largest_gradient, kind) if scale == "dynamic" else float(scale)


def _octaves(found: Magnitudes, kind: torch.dtype) -> float:
    """Return the octaves by which the loss scale can vary without overflow, or loss of more than the tail."""
    tails = [_tail(values) for values in (found.parameter_gradients, found.state_gradients) if values.numel()]
    if not tails or not found.largest_gradient:
        raise NotMeasured("all gradients are zero")
    return octaves_of(kind) - math.log2(found.largest_gradient / min(tails))


def _tail(values: Tensor) -> float:
    """Return the quantile ``TAIL`` of the values, or their minimum if there are few."""
    index = max(1, math.ceil(TAIL * values.numel()))
    return float(values.kthvalue(index).values)


def _margin(fraction: float) -> str:
    """Describe the distance to overflow of a fraction of the largest number."""
    if not fraction > 0:
        return "it is zero"
    octaves = -math.log2(fraction)
    return f"{octaves:.1f} octaves below overflow" if octaves >= 0 else f"it overflows by {-octaves:.1f} octaves"


def _how() -> str:
    """Describe how magnitudes were measured."""
    return f"In float32, at initialization and over {N_UPDATES} updates of a copy with the plan's first learning rates."


def _sample(tensors: list[Tensor], generator: torch.Generator) -> Tensor:
    """Return a sample of absolute nonzero values, with the same stride in all tensors."""
    total = sum(t.numel() for t in tensors)
    step = max(1, -(-total // _MAX_ENTRIES))
    parts = []
    for tensor in tensors:
        start = int(torch.randint(min(step, max(tensor.numel(), 1)), (1,), generator=generator))
        parts.append(tensor.flatten()[start::step].float().abs().cpu())
    values = torch.cat(parts) if parts else torch.empty(0)
    return values[values > 0]


@contextmanager
def _recorded(copy: WorkingCopy) -> Iterator[tuple[dict[str, float], list[Tensor]]]:
    """Record the largest output of each module, by name, and the gradients of the outputs of innermost modules."""
    outputs: dict[str, float] = {}
    gradients: list[Tensor] = []
    handles = []

    def record(name: str, is_innermost: bool) -> None:
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
        record(name, next(module.children(), None) is None)
    try:
        yield outputs, gradients
    finally:
        for handle in handles:
            handle.remove()
