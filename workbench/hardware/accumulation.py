"""Gradients of many micro-batches added up in a low-precision buffer."""

from __future__ import annotations

from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.reduction import as_shrinkage, error_of_sum, running_sum


def accumulation_error(emulation: Emulation) -> Finding:
    """Rounding of the accumulation in the plan's format, beside the sampling noise of the batch.

    Each rank has a buffer of its own: of the error, what points along the gradient is common to all of them, and the
    rest is taken to average out over the ranks.
    """
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
    """What the accumulation loses along the gradient itself: terms too small to change the sum."""
    return as_shrinkage(accumulation_error(emulation))
