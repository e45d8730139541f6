"""Faults to inject into training, such as a learning rate that is too large, corrupted data or low precision.

They can be combined, and switched on and off while a model trains.

Example:
    >>> import workbench as wb
    >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
    >>> fault = wb.faults.large_rate(factor=10.0, start=1)
    >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=2, learning_rate=1e-3, faults=[fault]):
    ...     print(record.step, record.learning_rate, record.active_faults)
    0 0.001 ()
    1 0.01 ('large_rate',)

See Also:
    `workbench.faults.catalog`: Lists all kinds of faults.
    `workbench.train`: Injects faults by its argument ``faults``.
    `workbench.faults.Fault`: Injects a fault into any training loop by its method ``attach``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.callbacks.faults.communication import DroppedBucket, LowPrecisionReduction, StaleReduction
from workbench.callbacks.faults.fault import CorruptedData, Fault, LargeRate, NoAuxiliaryLoss, SmallBatch
from workbench.callbacks.faults.flash_attention_mode import (
    Cut,
    FlashAttentionMode,
    LowPrecisionAttention,
    cut_low_bits,
    flash_attention,
)
from workbench.callbacks.faults.injection import Injection
from workbench.option_checks import publish

low_precision_attention = LowPrecisionAttention
large_rate = LargeRate
small_batch = SmallBatch
no_auxiliary_loss = NoAuxiliaryLoss
corrupted_data = CorruptedData
dropped_bucket = DroppedBucket
stale_reduction = StaleReduction
low_precision_reduction = LowPrecisionReduction

__all__ = [
    "CorruptedData", "Cut", "DroppedBucket", "Fault", "FlashAttentionMode", "Injection", "LargeRate",
    "LowPrecisionAttention", "LowPrecisionReduction", "NoAuxiliaryLoss", "SmallBatch", "StaleReduction", "catalog",
    "corrupted_data", "cut_low_bits", "dropped_bucket", "flash_attention", "large_rate", "low_precision_attention",
    "low_precision_reduction", "no_auxiliary_loss", "small_batch", "stale_reduction",
]  # fmt: skip


class CatalogEntry(NamedTuple):
    """A kind of fault."""

    make: Callable[..., Fault]
    meaning: str


def catalog() -> dict[str, CatalogEntry]:
    """Return all kinds of faults by name.

    Example:
        >>> import workbench as wb
        >>> list(wb.faults.catalog())[:3]
        ['low_precision_attention', 'large_rate', 'small_batch']

    See Also:
        `workbench.faults.Fault`: Base class of all faults.
        `workbench.early_warning`: Measures how early alarms detect faults.
    """
    kinds = (
        LowPrecisionAttention,
        LargeRate,
        SmallBatch,
        NoAuxiliaryLoss,
        CorruptedData,
        DroppedBucket,
        StaleReduction,
        LowPrecisionReduction,
    )
    return {kind.kind: CatalogEntry(kind, kind.meaning) for kind in kinds}


__dir__ = publish(__name__)
