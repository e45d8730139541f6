"""Selection of sequences and tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.models.batches import count_examples, take_examples
from workbench.models.layout import BATCH_FIRST, BatchLayout

_MASKS = ("attention_mask", "decoder_attention_mask")


def first_examples(batch: Any, targets: Any, n_tokens: int, layout: BatchLayout = BATCH_FIRST) -> tuple[Any, Any]:
    """Return the first sequences of a batch and their targets, at least one sequence, truncated if it is too long.

    Args:
        batch: Batch as `call_model` takes it.
        targets: Tensor with an entry for each sequence; None if there are no targets.
        n_tokens: Maximum number of tokens. Only token ids, and tensors shaped like them, can be truncated within a
            sequence.
        layout: Layout of the batch; if the axis that counts sequences is unknown, the batch is returned unchanged.
    """
    if layout.inputs is None:
        return batch, targets
    axis = layout.inputs
    length = _length(batch, axis)
    n_examples = max(1, n_tokens // length)
    if n_examples < count_examples(batch, axis):
        batch = take_examples(batch, slice(0, n_examples), axis)
        if isinstance(targets, Tensor) and targets.ndim:
            targets = take_examples(targets, slice(0, n_examples), axis if targets.ndim > 1 else 0)
    if length > n_tokens and not axis and _has_tokens(batch):
        batch = _shortened(batch, length, lambda x: x[:, :n_tokens])
        if isinstance(targets, Tensor) and targets.ndim == 2 and targets.shape[1] == length:
            targets = targets[:, :n_tokens]
    return batch, targets


def one_sequence(batch: Any, n_tokens: int, layout: BatchLayout = BATCH_FIRST) -> Any:
    """Return the sequence with the least padding, without that padding, truncated if it consists of token ids."""
    if layout.inputs != 0:
        return batch if layout.inputs is None else take_examples(batch, slice(0, 1), layout.inputs)
    masks = (
        [batch[name] for name in _MASKS if isinstance(batch.get(name), Tensor)] if isinstance(batch, Mapping) else []
    )
    length = _length(batch)
    masks = [mask for mask in masks if mask.shape == (count_examples(batch), length)]
    row = int(masks[-1].ne(0).sum(1).argmax()) if masks else 0
    batch = take_examples(batch, slice(row, row + 1))
    if not _has_tokens(batch):
        return batch
    kept = masks[-1][row].ne(0).nonzero().flatten() if masks else torch.arange(length)
    return _shortened(batch, length, lambda x: x[:, kept[:n_tokens].to(x.device)])


def _length(batch: Any, axis: int = 0) -> int:
    """Return the number of tokens of a sequence; 1 if the examples are no sequences."""
    tensor = next(value for value in _values(batch) if isinstance(value, Tensor) and value.ndim)
    if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
        return max(1, tensor.shape[1 - axis])
    return 1


def _has_tokens(batch: Any) -> bool:
    """Return whether every tensor of a batch consists of token ids, or of their masks or positions."""
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim]
    return all(tensor.ndim <= 2 and not tensor.is_floating_point() for tensor in tensors)


def _shortened(batch: Any, length: int, shorten: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of shape (sequence, length) of a batch."""

    def taken(value: Any) -> Any:
        return shorten(value) if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length else value

    if isinstance(batch, Mapping):
        return {name: taken(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(taken(value) for value in batch)
    return taken(batch)


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, tuple | list) else [batch]
