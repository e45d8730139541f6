"""Convert batches and rows of user data to the inputs of a model and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.tasks.task import Inputs

IGNORED = -100
_IMAGES = ("pixel_values", "images")
_WITH_TOKENS = ("attention_mask", "token_type_ids", "position_ids")
_LABELS = ("labels", "label")
#: Columns that are used, under Hugging Face's names; all others (text, row ids) are dropped.
_COLUMNS = ("input_ids", *_WITH_TOKENS, *_IMAGES, *_LABELS)


def as_batch(batch: Any) -> tuple[Inputs, Tensor]:
    """Return the inputs and targets of a batch.

    Args:
        batch: One of

            - ``(inputs, targets)``, which are used unchanged: each target is at the position that predicts it;
            - a mapping with ``input_ids`` (batch, token). The targets are the ``labels`` in Hugging Face's convention,
              of the same shape and unshifted, or else the ids; both are shifted by one position to the left. Labels of
              shape (batch,) are classes and are not shifted. ``attention_mask``, ``token_type_ids`` and
              ``position_ids`` are kept as inputs; a target is ignored if it or its position is masked;
            - a mapping with ``pixel_values`` or ``images``, and ``labels``;
            - token ids (batch, token).
    """
    if isinstance(batch, Mapping):
        return _from_mapping(batch)
    if isinstance(batch, tuple | list) and len(batch) == 1 and _is_array(batch[0]):
        batch = batch[0]
    if _is_array(batch):
        tokens = _token_ids(batch, "A batch without targets")
        return tokens, _next_tokens(tokens)
    if isinstance(batch, tuple | list) and len(batch) == 2 and _is_array(batch[1]):
        inputs, targets = batch[0], _targets(batch[1])
        if isinstance(inputs, Mapping):
            inputs = {name: _tensor(value) for name, value in inputs.items() if _is_array(value)}
        elif _is_array(inputs):
            inputs = _tensor(inputs)
        else:
            raise _not_a_batch(batch)
        if not _have_same_rows(inputs, targets):
            named = inputs if isinstance(inputs, Mapping) else {"": inputs}
            shapes: Any = {name: tuple(value.shape) for name, value in named.items()}
            raise WorkbenchError(
                f"A batch has inputs of shape {shapes.get('', shapes)} and targets of shape {tuple(targets.shape)}; "
                "both must have the same number of examples."
            )
        return inputs, targets
    raise _not_a_batch(batch)


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stack rows of a dataset to a batch (a collate function): token ids, (inputs, target), or mappings of columns."""
    first = rows[0]
    if isinstance(first, Mapping):
        used = [name for name in _COLUMNS if name in first]
        if not used:
            raise _missing_column("Rows", first, "; create them with a tokenizer or an image processor")
        return {name: _stack([row[name] for row in rows], name) for name in used}
    if _is_pair(first):
        inputs = [row[0] for row in rows]
        stacked = stack_rows(inputs) if isinstance(first[0], Mapping) else _stack(inputs, "the inputs")
        return stacked, _stack([row[1] for row in rows], "the targets")
    if isinstance(first, tuple) and len(first) == 1:
        return _stack([row[0] for row in rows], "the rows")
    return _stack(rows, "the rows")


def looks_like_batch(item: Any) -> bool:
    """Return whether an item of a list is a batch, that is, whether its inputs have a batch dimension."""
    if isinstance(item, Mapping):
        if "input_ids" in item:
            return _n_dims(item["input_ids"]) >= 2
        return any(name in item and _n_dims(item[name]) >= 4 for name in _IMAGES)
    if _is_pair(item):
        if isinstance(item[0], Mapping):
            return looks_like_batch(item[0])
        is_token_ids = _is_array(item[0]) and not _tensor(item[0]).is_floating_point()
        return _n_dims(item[0]) >= 2 if is_token_ids else _n_dims(item[1]) >= 1
    if isinstance(item, tuple | list) and len(item) == 1:
        return looks_like_batch(item[0])
    return _is_array(item) and item.ndim >= 2


def _from_mapping(batch: Mapping[str, Any]) -> tuple[Inputs, Tensor]:
    labels = next((batch[name] for name in _LABELS if batch.get(name) is not None), None)
    if "input_ids" in batch:
        tokens = _token_ids(batch["input_ids"], "input_ids")
        inputs = {"input_ids": tokens}
        inputs |= {name: _tensor(batch[name], name) for name in _WITH_TOKENS if batch.get(name) is not None}
        given = tokens if labels is None else _targets(labels)
        if given.shape == tokens.shape:
            targets = _next_tokens(given)
            mask = inputs.get("attention_mask")
            if mask is not None and mask.shape == tokens.shape:
                targets[:, :-1][(mask[:, 1:] == 0) | (mask[:, :-1] == 0)] = IGNORED
        elif given.shape[:1] == tokens.shape[:1] and given.ndim == 1:
            targets = given
        else:
            raise WorkbenchError(
                f"labels have shape {tuple(given.shape)} and input_ids {tuple(tokens.shape)}; expected the same shape, "
                "or one class for each example."
            )
        return (inputs if len(inputs) > 1 else tokens), targets
    name = next((name for name in _IMAGES if name in batch), None)
    if name is None:
        raise _missing_column("A batch", batch)
    images = _tensor(batch[name], name)
    if labels is None:
        raise WorkbenchError(f"A batch has {name} but no labels; add the classes of the images as 'labels'.")
    if not images.is_floating_point():
        raise WorkbenchError.of(name, _dtype(images), "floating point", remedy="scale them, for example to [0, 1]")
    targets = _targets(labels)
    if not _have_same_rows(images, targets):
        raise WorkbenchError(
            f"A batch has {len(images)} images and labels of shape {tuple(targets.shape)}; pass a label per image."
        )
    return images, targets


def _missing_column(what: str, columns: Mapping[str, Any], remedy: str = "") -> WorkbenchError:
    """Create the error for a batch or rows without inputs of a known name."""
    return WorkbenchError(
        f"{what} must have a column input_ids, pixel_values or images, got {', '.join(map(str, columns))}{remedy}."
    )


def _have_same_rows(inputs: Inputs, targets: Tensor) -> bool:
    """Return whether both have the same number of examples."""
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return targets.ndim > 0 and any(value.ndim and len(value) == len(targets) for value in tensors)


def _next_tokens(tokens: Tensor) -> Tensor:
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def _token_ids(value: Any, name: str) -> Tensor:
    tokens = _tensor(value, name)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise WorkbenchError(
            f"{name} has the type {_dtype(tokens)}, expected token ids; pass other inputs together with their targets."
        )
    if tokens.ndim != 2:
        raise WorkbenchError(
            f"{name} has shape {tuple(tokens.shape)}, expected (batch, token); combine single rows to batches with "
            "a DataLoader, or with batch() of an iterable dataset."
        )
    return tokens.long()


def _targets(value: Any) -> Tensor:
    targets = _tensor(value, "the targets")
    return targets if targets.is_floating_point() else targets.long()


def _tensor(value: Any, name: str = "a batch") -> Tensor:
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        raise WorkbenchError(f"{name} is a list of tensors; pass the dataset itself or call with_format('torch').")
    try:
        return _as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkbenchError(f"{name} is no tensor ({error}); expected numbers, in rows of equal length.") from error


def _stack(values: Sequence[Any], name: str) -> Tensor:
    try:
        tensors = [_as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkbenchError(
            f"{name} hold a {type(values[0]).__name__} that cannot be converted to a tensor ({error}); expected "
            "numbers, so tokenize text and convert images to tensors first."
        ) from error
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        few = " and ".join(map(str, sorted(shapes)[:2]))
        raise WorkbenchError(
            f"{name} differ in shape between rows, such as {few}; expected equal lengths, so pad or truncate the rows "
            "(with a tokenizer: padding='max_length', truncation=True) and keep the attention_mask."
        )
    return torch.stack(tensors)


def _as_tensor(value: Any) -> Tensor:
    """Convert a value to a tensor; arrays are copied, because they may be read-only."""
    return torch.tensor(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)


def _n_dims(value: Any) -> int:
    if isinstance(value, list | tuple):
        return 1 + (_n_dims(value[0]) if value else 0)
    return getattr(value, "ndim", 0)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_pair(value: Any) -> bool:
    """Return whether a value is (inputs, target) rather than two token ids."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return isinstance(value, tuple) or isinstance(value[0], Mapping) or _is_array(value[0])


def _not_a_batch(batch: Any) -> WorkbenchError:
    parts = f" of {len(batch)} parts" if isinstance(batch, tuple | list) else ""
    expected = (
        "token ids (batch, token), (inputs, targets), or a mapping with input_ids, or with pixel_values and labels"
    )
    return WorkbenchError(f"A batch is a {type(batch).__name__}{parts}; expected {expected}.")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
