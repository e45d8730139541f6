"""Metrics of each update as logged by training loops: their names, and their values on the host."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from workbench.errors import OptionError
from workbench.models.device_numbers import read_numbers

#: Metrics of every update, in the order in which they are stored; NaN if unknown.
NUMBERS = (
    "loss",
    "auxiliary_loss",
    "accuracy",
    "grad_norm",
    "learning_rate",
    "batch_size",
    "n_tokens",
    "token_entropy",
    "label_entropy",
    "label_agreement",
    "largest_losses",
    "ignored_labels",
    "repeated_examples",
    "loss_weight",
    "is_training",
    "loss_scale",
    "is_skipped",
    "repeated_batch",
    "lookahead",
    "update_ratio",
    "spike_score",
)


def as_number(name: str, value: Any) -> float | Tensor:
    """Return a metric as a number, or as a 0-dim tensor that may not be computed yet.

    Raises:
        OptionError: If the value is not one number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, np.ndarray) and value.size == 1:
        return float(value.item())
    if isinstance(value, Real):
        return float(value)
    raise OptionError.of(name, value, "one number", remedy="log its mean or another number")


def as_floats(numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return metrics as floats in their order; the host waits once for those that are still being computed."""
    late = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    read = dict(zip(late, read_numbers([*late.values()]), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in numbers.items()}
