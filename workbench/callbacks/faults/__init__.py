"""Faults to inject into a run, alone or together, and to switch while it trains: ``train(..., faults=[...])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.callbacks.faults.communication import DroppedBucket, LowPrecisionReduction, StaleReduction
from workbench.callbacks.faults.conditions import CorruptedData, LargeRate, NoAuxiliaryLoss, SmallBatch
from workbench.callbacks.faults.fault import Fault
from workbench.callbacks.faults.flash_attention_mode import Cut, FlashAttentionMode, cut_low_bits, flash_attention
from workbench.callbacks.faults.injection import Injection
from workbench.callbacks.faults.low_precision_fault import LowPrecisionAttention

low_precision_attention = LowPrecisionAttention
large_rate = LargeRate
small_batch = SmallBatch
no_auxiliary_loss = NoAuxiliaryLoss
corrupted_data = CorruptedData
dropped_bucket = DroppedBucket
stale_reduction = StaleReduction
low_precision_reduction = LowPrecisionReduction

__all__ = [
    "CatalogEntry",
    "CorruptedData",
    "Cut",
    "DroppedBucket",
    "Fault",
    "FlashAttentionMode",
    "Injection",
    "LargeRate",
    "LowPrecisionAttention",
    "LowPrecisionReduction",
    "NoAuxiliaryLoss",
    "SmallBatch",
    "StaleReduction",
    "catalog",
    "corrupted_data",
    "cut_low_bits",
    "dropped_bucket",
    "flash_attention",
    "large_rate",
    "low_precision_attention",
    "low_precision_reduction",
    "no_auxiliary_loss",
    "small_batch",
    "stale_reduction",
]


class CatalogEntry(NamedTuple):
    """A kind of fault: the function that makes one, and its effect in one line.

    Example:
        >>> import workbench as wb
        >>> entry = wb.faults.catalog()["large_rate"]
        >>> entry.make(factor=20.0).effect
        'the learning rate is multiplied by 20'
    """

    make: Callable[..., Fault]
    meaning: str


def catalog() -> dict[str, CatalogEntry]:
    """All kinds of faults by name; all options of ``make()`` are optional.

    Example:
        >>> import workbench as wb
        >>> list(wb.faults.catalog())[:3]
        ['low_precision_attention', 'large_rate', 'small_batch']
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


def __dir__() -> list[str]:
    return sorted(__all__)
