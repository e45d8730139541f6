"""Emulation of low precision: lost updates, underflow, overflow, and sums of gradients in other orders and buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from workbench.callbacks.faults.communication import LowPrecisionReduction, in_buckets, ring_sum
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Discrepancy, Emulation, Finding, NotMeasured, Terms, WorkingCopy
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


#: Maximum number of terms that are emulated; the error of more terms is extrapolated.
MAX_TERMS = 1024
#: Maximum number of ranks for which a ring is emulated chunk by chunk.
_MAX_RING = 32
_N_ORDERS = 4
#: Number of draws at the plan's number of terms.
_N_DRAWS = 4
#: Function that adds terms, shape (term, entry), in a format.
Sum = Callable[[Tensor, str], Tensor]


def running_sum(terms: Tensor, dtype: str) -> Tensor:
    """Add terms in sequence with rounding after each, as an accumulation buffer and one chunk of a ring do."""
    kind = DTYPES[dtype]
    total = terms[0].to(kind)
    for term in terms[1:]:
        total = total + term.to(kind)
    return total.float()


def tree_sum(terms: Tensor, dtype: str) -> Tensor:
    """Add neighboring terms, then their sums, and so on, with rounding after each; arguments as in `running_sum`."""
    kind = DTYPES[dtype]
    level = list(terms.to(kind))
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0].float()


def reduced(terms: Tensor, dtype: str, order: str) -> Tensor:
    """Add terms over ranks as an all-reduce does; a ring of more than 32 adds all entries like the first chunk."""
    if len(terms) == 1:
        return terms[0].to(DTYPES[dtype]).float()
    if order == "tree":
        return tree_sum(terms, dtype)
    if len(terms) > _MAX_RING:
        return running_sum(terms, dtype)
    return ring_sum(list(terms), LowPrecisionReduction(n_ranks=len(terms), dtype=dtype))


def allreduce_error(emulation: Emulation) -> Finding:
    """Measure the rounding of an all-reduce in the plan's format, relative to the sampling noise of the batch."""
    hardware = emulation.plan.hardware
    return error_of_sum(
        emulation,
        n_terms=hardware.data_parallel,
        rows=emulation.plan.rows_per_share * hardware.accumulation,
        dtype=hardware.gradient_dtype,
        add=lambda terms, dtype: reduced(terms, dtype, hardware.reduction_order),
        what=f"Adding up the gradients of {hardware.data_parallel} ranks in {hardware.gradient_dtype}",
    )


def allreduce_shrinkage(emulation: Emulation) -> Finding:
    """Measure the fraction of the gradient that an all-reduce loses along its direction."""
    return as_shrinkage(allreduce_error(emulation))


def reduction_order(emulation: Emulation) -> Finding:
    """Measure the difference between reductions of the same gradients with the ranks in different orders."""
    hardware = emulation.plan.hardware
    n = min(hardware.data_parallel, MAX_TERMS)
    if n < 2:
        raise NotMeasured("there is one rank, so nothing is added")
    generator = emulation.generator("order")
    terms = emulation.shares.terms(n, emulation.plan.rows_per_share * hardware.accumulation, generator)
    exact = terms.exact_sum
    sums = []
    for trial in range(_N_ORDERS):
        order = torch.arange(n) if trial == 0 else torch.randperm(n, generator=generator)
        values = scaled(terms, hardware.gradient_dtype, hardware.loss_scale)[order]
        sums.append(reduced(values, hardware.gradient_dtype, hardware.reduction_order).double())
    scale = float(scale_of(terms, hardware.gradient_dtype, hardware.loss_scale))
    spread = torch.stack(sums).div(scale)
    differences = [terms.compare(exact + found - spread[0], exact) for found in spread[1:]]
    error = math.sqrt(sum(d.relative_error**2 for d in differences) / len(differences))
    over_noise = emulation.over_noise(math.sqrt(sum(d.error_norm**2 for d in differences) / len(differences)) / n)
    return Finding(
        effect=over_noise,
        meaning=f"In another order, the sum of the same gradients of {n} ranks differs by {percent(error)} in "
        f"{hardware.gradient_dtype}, {percent(over_noise)} of the batch's sampling noise: if the order is not fixed, "
        f"two runs with the same seed differ from the first update on.",
        how=f"{_N_ORDERS - 1} random orders of {_origin(terms, emulation)}.",
        n_trials=_N_ORDERS - 1,
        relative_error=error,
        error_over_noise=over_noise,
        layer_errors=differences[0].layer_errors,
    )


def bucket_layout(emulation: Emulation) -> Finding:
    """Measure the difference between a reduction in the plan's buckets and one in a single bucket."""
    hardware = emulation.plan.hardware
    n_ranks = min(hardware.data_parallel, _MAX_RING)
    if n_ranks < 2:
        raise NotMeasured("there is one rank, so nothing is added")
    sizes = list(emulation.shares.layout.sizes)
    buckets = plan_buckets(emulation)
    terms = emulation.shares.terms(
        n_ranks, emulation.plan.rows_per_share * hardware.accumulation, emulation.generator("buckets")
    )
    if terms.values.shape[1] != sum(sizes):
        raise NotMeasured("the model is too large to keep the complete gradients of every rank")
    scale = float(scale_of(terms, hardware.gradient_dtype, hardware.loss_scale))
    parts = (terms.values * scale).split(sizes, dim=1)
    found = [torch.empty(0)] * len(sizes)
    for bucket in buckets:
        total = reduced(torch.cat([parts[i] for i in bucket], 1), hardware.gradient_dtype, hardware.reduction_order)
        for i, part in zip(bucket, total.split([sizes[i] for i in bucket]), strict=True):
            found[i] = part
    single = reduced(terms.values * scale, hardware.gradient_dtype, hardware.reduction_order)
    exact = terms.exact_sum
    difference = terms.compare(exact + (torch.cat(found).double() - single.double()) / scale, exact)
    over_noise = emulation.over_noise(difference.error_norm / n_ranks)
    return Finding(
        effect=over_noise,
        meaning=f"Reducing in {len(buckets)} buckets instead of one changes the sum by "
        f"{percent(difference.relative_error)}, {percent(over_noise)} of the batch's sampling noise: this is how much "
        "results depend on bucket_mb.",
        how=f"{hardware.reduction_order} over {_origin(terms, emulation)}, in buckets of {hardware.bucket_mb:g} MiB, "
        "at least two.",
        relative_error=difference.relative_error,
        error_over_noise=over_noise,
        layer_errors=difference.layer_errors,
    )


def plan_buckets(emulation: Emulation) -> list[list[int]]:
    """Return the parameters of each of the plan's buckets, from the last one; at least two, also of a small proxy."""
    hardware, sizes = emulation.plan.hardware, [parameter.numel() for parameter in emulation.copy().parameters]
    n_bytes = DTYPES[hardware.gradient_dtype].itemsize * sum(sizes)
    n_buckets = max(2, math.ceil(n_bytes / (hardware.bucket_mb * 2**20)))
    return in_buckets(sizes, min(n_buckets, len(sizes)))


def scale_of(terms: Terms, dtype: str, loss_scale: str | float) -> float:
    """Return the factor of gradients before they are added: 1, or float16's largest power of two without overflow."""
    if dtype != "float16":
        return 1.0
    if loss_scale != "dynamic":
        return float(loss_scale)
    largest = max(float(terms.values.abs().max()), float(terms.exact_sum.abs().max()))
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest)) if largest else 1.0


def scaled(terms: Terms, dtype: str, loss_scale: str | float) -> Tensor:
    """Return the terms as they are communicated, shape (term, entry)."""
    scale = scale_of(terms, dtype, loss_scale)
    return terms.values if scale == 1 else terms.values * scale


def measure_sum(terms: Terms, dtype: str, loss_scale: str | float, add: Sum) -> Discrepancy:
    """Compare a low-precision sum of terms with the float64 sum of the same terms."""
    found = add(scaled(terms, dtype, loss_scale), dtype).double() / scale_of(terms, dtype, loss_scale)
    return terms.compare(found, terms.exact_sum)


def extrapolated(counts: Sequence[int], values: Sequence[float], n: int) -> float:
    """Extrapolate values at smaller counts to ``n`` by a power law through the last three."""
    known = [(c, v) for c, v in zip(counts, values, strict=True) if v > 0 and math.isfinite(v)][-3:]
    if len(known) < 2:
        return values[-1]
    log_counts, log_values = np.log(np.array(known)).T
    slope, offset = np.polyfit(log_counts, log_values, 1)
    return float(math.exp(offset + slope * math.log(n)))


def error_of_sum(
    emulation: Emulation, *, n_terms: int, rows: int, dtype: str, add: Sum, what: str, n_sums: int = 1
) -> Finding:
    """Measure the error of a sum of ``n_terms`` gradients, each of ``rows`` examples, at several numbers of terms."""
    if n_terms < 2:
        raise NotMeasured("there is one term, so nothing is added")
    if what not in emulation.known:
        emulation.known[what] = _error_of_sum(emulation, n_terms, rows, dtype, add, what, n_sums)
    return emulation.known[what]


def _error_of_sum(
    emulation: Emulation, n_terms: int, rows: int, dtype: str, add: Sum, what: str, n_sums: int
) -> Finding:
    counts = sorted({n for n in (2**i for i in range(1, 11)) if n < n_terms} | {min(n_terms, MAX_TERMS)})
    loss_scale = emulation.plan.hardware.loss_scale
    found: dict[int, Discrepancy] = {}
    trials: list[Discrepancy] = []
    for n in counts:
        for trial in range(_N_DRAWS if n == counts[-1] else 1):
            terms = emulation.shares.terms(n, rows, emulation.generator("sum", what, n, trial))
            trials.append(measure_sum(terms, dtype, loss_scale, add))
            if terms.are_measured:  # The terms do not depend on the draw.
                break
        found[n], trials, drawn = _mean(trials), [], trials
    last, spread = found[counts[-1]], np.std([d.shrinkage for d in drawn], ddof=1) if len(drawn) > 1 else 0.0
    growth = {n: d.relative_error for n, d in found.items()}
    error, shrinkage = last.relative_error, last.shrinkage
    along = abs(shrinkage) / error if error else 0.0  # Fraction of the error that is common to all sums.
    over_noise = last.error_norm / counts[-1] * math.sqrt(along**2 + max(0.0, 1 - along**2) / n_sums)
    is_extrapolated = n_terms > MAX_TERMS
    if is_extrapolated:
        error = extrapolated(counts, list(growth.values()), n_terms)
        # The noise is that of the plan's full batch, so the error of the mean is proportional to the relative error.
        over_noise *= error / last.relative_error if last.relative_error else 1.0
        lost = [d.shrinkage for d in found.values()]
        shrinkage = min(1.0, extrapolated(counts, lost, n_terms)) if shrinkage > 0 else shrinkage
    over_noise = emulation.over_noise(over_noise)
    beyond = f", extrapolated from {counts[-3:]} terms by a power law" if is_extrapolated else ""
    length = f"{'shortens' if shrinkage >= 0 else 'lengthens'} the gradient by {percent(abs(shrinkage))}"
    return Finding(
        effect=over_noise,
        meaning=f"{what} causes an error of {percent(error)}, {percent(over_noise)} of the batch's sampling noise, and "
        f"{length}{emulation.worst_layer(last.layer_errors)}.",
        how=f"Compared with the float64 sum of {_origin(terms, emulation)}{beyond}.",
        relative_error=error,
        error_over_noise=over_noise,
        n_trials=len(drawn),
        shrinkage=shrinkage,
        shrinkage_error=float(spread) / math.sqrt(len(drawn)),
        cosine=last.cosine,
        layer_errors=last.layer_errors,
        growth=growth,
        is_extrapolated=is_extrapolated,
    )


def as_shrinkage(finding: Finding) -> Finding:
    """Return the finding with the part along the gradient as its effect, less three standard errors of its draws."""
    return replace(finding, effect=max(0.0, abs(finding.shrinkage) - 3 * finding.shrinkage_error))


def _mean(trials: Sequence[Discrepancy]) -> Discrepancy:
    """Average discrepancies: the root mean square of errors, the mean of shrinkage and cosine."""
    if len(trials) == 1:
        return trials[0]
    return Discrepancy(
        relative_error=math.sqrt(math.fsum(d.relative_error**2 for d in trials) / len(trials)),
        error_norm=math.sqrt(math.fsum(d.error_norm**2 for d in trials) / len(trials)),
        shrinkage=math.fsum(d.shrinkage for d in trials) / len(trials),
        cosine=math.fsum(d.cosine for d in trials) / len(trials),
        layer_errors=np.sqrt(np.mean([d.layer_errors**2 for d in trials], axis=0)),
    )


def _origin(terms: Terms, emulation: Emulation) -> str:
    """Describe the origin of the terms, for the sentence about the method."""
    n_measured = len(emulation.micro_batches)
    if terms.are_measured:
        return f"the gradients of {len(terms.values)} shares of the measured examples"
    return (
        f"{len(terms.values)} terms resampled from the gradients of {n_measured} measured micro-batches of "
        f"{counted(emulation.rows, 'example')}, with their noise scaled to the plan's number of examples"
    )


def accumulation_error(emulation: Emulation) -> Finding:
    """Measure the rounding of accumulation in the plan's format, a buffer per rank, over the batch's noise."""
    hardware = emulation.plan.hardware
    return error_of_sum(
        emulation,
        n_terms=hardware.accumulation,
        rows=emulation.plan.rows_per_share,
        dtype=hardware.accumulation_dtype,
        add=running_sum,
        what=f"Adding up {hardware.accumulation} micro-batches in {hardware.accumulation_dtype}",
        n_sums=hardware.data_parallel,
    )


def accumulation_shrinkage(emulation: Emulation) -> Finding:
    """Measure the fraction of the gradient that accumulation loses along its direction, in terms below the rounding."""
    return as_shrinkage(accumulation_error(emulation))
