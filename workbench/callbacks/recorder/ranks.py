"""Exchange of values between the recorders of several processes that train one model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed

from workbench.formatting import listed
from workbench.models.process_group import is_shared, message_device
from workbench.probes.precision import broken_arithmetic

#: A setting that has changed: its name, the ratio of the new to the previous value, and a sentence.
Change = tuple[str, float, str]
#: Values of the variables of each part that was measured.
Measured = dict[str, dict[str, np.ndarray]]

#: Metrics of an update that are averaged over the ranks that have them, and those that are summed.
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
    "ignored_labels",
    "repeated_examples",
    "loss_weight",
    "is_training",
    "loss_scale",
    "is_skipped",
    "update_ratio",
)
SUMS = ("batch_size", "n_tokens", "n_changes", "n_unmade")


def is_first() -> bool:
    """Return whether this process writes the record."""
    return not is_shared() or distributed.get_rank() == 0


def of_all_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Combine the metrics of an update over all ranks, in one message whose length does not depend on the metrics.

    The metrics in `MEANS` and `SUMS` are averaged or summed; others keep their value on each rank.
    """
    if not is_shared():
        return dict(numbers)
    names = MEANS + SUMS
    own = [float(numbers.get(name, math.nan)) for name in names]
    is_known = [name in numbers and not math.isnan(value) for name, value in zip(names, own, strict=True)]
    # A loss that is NaN on one rank is NaN for all.
    is_broken = [name in numbers and math.isnan(value) for name, value in zip(names, own, strict=True)]
    sums = summed_over_ranks(np.array([np.where(is_known, own, 0.0), is_known, is_broken], dtype=np.float64))
    found = dict(numbers)
    for name, total, count, n_broken in zip(names, *sums, strict=True):
        if n_broken:
            found[name] = math.nan
        elif count:
            found[name] = float(total / count if name in MEANS else total)
    return found


def summed_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return values summed over all ranks, in float64."""
    if not is_shared():
        return values
    device = message_device()
    message = torch.as_tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(message)
    return message.cpu().numpy()


def of_first_rank(value: Any) -> Any:
    """Return the value of rank 0 on every rank; tensors are on the host."""
    if not is_shared():
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0, device=message_device())
    return box[0]


def on_every_rank(is_so: bool) -> bool:
    """Return whether a condition holds on every rank; a collective operation."""
    return bool(summed_over_ranks(np.array([not is_so], dtype=np.float64))[0] == 0)


def measured_by_all(measured: Measured) -> Measured:
    """Return measurements of one step that are the same on every rank, so that all raise the same alarms.

    They are those of rank 0, since all ranks have the same parameters and examples. Only the arithmetic is that of the
    first rank where it is broken, if it is sound on others.

    Args:
        measured: Measurements of this rank; a part that failed is missing.
    """
    if not is_shared():
        return measured
    ranks = _of_each_rank(measured)
    found = dict(ranks[0])
    known = [rank for rank, values in enumerate(ranks) if "precision" in values]
    broken = [rank for rank in known if broken_arithmetic(ranks[rank]["precision"]) is not None]
    if broken and len(broken) < len(known):
        found["precision"] = ranks[broken[0]]["precision"] | {"broken_rank": np.array(float(broken[0]))}
    return found


def changed_on_any(own: list[Change]) -> list[Change]:
    """Return the settings that have changed on any rank, given those of this rank; a collective operation."""
    if not is_shared():
        return own
    ranks = _of_each_rank(own)
    found: dict[str, tuple[Change, list[int]]] = {}
    for rank, changes in enumerate(ranks):
        for change in changes:
            found.setdefault(change[0], (change, []))[1].append(rank)
    return [
        (name, factor, sentence if len(where) == len(ranks) else _on_ranks(where, sentence))
        for name, ((_, factor, sentence), where) in found.items()
    ]


def _on_ranks(ranks: list[int], sentence: str) -> str:
    """Prefix a sentence with ranks, such as "On rank 1 the learning rate rose"."""
    where = f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"
    return f"On {where} {sentence[0].lower()}{sentence[1:]}"


def _of_each_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
