"""The numbers of each update, as loops log them: which every update has, and their values on the host."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from workbench.errors import OptionError
from workbench.models.device_numbers import read_numbers

#: Numbers that every update has, in the order in which they are stored; NaN where unknown.
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
    "repeated_examples",
    "update_ratio",
    "spike_score",
)


def as_number(name: str, value: Any) -> float | Tensor:
    """A number, or a tensor of one number that may still be computed."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, np.ndarray) and value.size == 1:
        return float(value.item())
    if isinstance(value, Real):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise OptionError(
        f"log() got {name} as a {type(value).__name__}{shape}, expected one number; pass its mean or another number."
    )


def as_floats(numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Numbers of which some may still be computed, in their order; the host waits for them once."""
    late = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    read = dict(zip(late, read_numbers([*late.values()]), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in numbers.items()}
