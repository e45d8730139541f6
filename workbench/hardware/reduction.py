"""Emulation of sums of gradients over ranks and micro-batches: in low precision, in another order, in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workbench.callbacks.faults.communication import LowPrecisionReduction, in_buckets, ring_sum
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Discrepancy, Emulation, Finding, NotMeasured, Terms
from workbench.hardware.plan import DTYPES

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
