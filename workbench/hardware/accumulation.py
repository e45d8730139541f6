"""Emulate the accumulation of micro-batch gradients in a low-precision buffer."""

from __future__ import annotations

from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.reduction import as_shrinkage, error_of_sum, running_sum


def accumulation_error(emulation: Emulation) -> Finding:
    """Measure the rounding of the accumulation in the plan's format, relative to the sampling noise of the batch.

    Each rank has its own buffer: the part of the error along the gradient is common to all ranks, and the rest is
    assumed to average out over them.
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
    """Measure the loss along the gradient itself by the accumulation, of terms too small to change the sum."""
    return as_shrinkage(accumulation_error(emulation))
