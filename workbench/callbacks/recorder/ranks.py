"""Values shared between recorders of several processes that train one model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed

from workbench.models.process_group import is_shared, message_device

#: Numbers of an update that are the mean over the ranks that know them, and those that are summed.
MEANS = (
    "loss",
    "auxiliary_loss",
    "accuracy",
    "grad_norm",
    "learning_rate",
    "token_entropy",
    "label_entropy",
    "label_agreement",
    "largest_losses",
    "repeated_examples",
    "update_ratio",
)
SUMS = ("batch_size", "n_tokens")


def is_first() -> bool:
    """Whether this process writes the record."""
    return not is_shared() or distributed.get_rank() == 0


def of_all_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an update, over all ranks: one message of fixed length, independent of what a rank has logged.

    Known numbers are averaged or summed; others keep their value on each rank.
    """
    if not is_shared():
        return dict(numbers)
    names = MEANS + SUMS
    own = [float(numbers.get(name, math.nan)) for name in names]
    is_known = [name in numbers and not math.isnan(value) for name, value in zip(names, own, strict=True)]
    # A loss that is NaN on one rank is NaN for all: it is logged there, but not known.
    is_broken = [name in numbers and math.isnan(value) for name, value in zip(names, own, strict=True)]
    sums = added_up(np.array([np.where(is_known, own, 0.0), is_known, is_broken], dtype=np.float64))
    found = dict(numbers)
    for name, total, count, n_broken in zip(names, *sums, strict=True):
        if n_broken:
            found[name] = math.nan
        elif count:
            found[name] = float(total / count if name in MEANS else total)
    return found


def added_up(values: np.ndarray) -> np.ndarray:
    """Values summed over all ranks, in float64."""
    if not is_shared():
        return values
    device = message_device()
    message = torch.as_tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(message)
    return message.cpu().numpy()


def of_first_rank(value: Any) -> Any:
    """The value of rank 0, on every rank; tensors on the host."""
    if not is_shared():
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0, device=message_device())
    return box[0]
