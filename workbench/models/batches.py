"""Conversion of inputs of any supported form into batches for a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.models.layout import BATCH_FIRST, BatchLayout, values_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

#: Tokens in one forward pass, so that activations stay small for every input.
_TOKENS_PER_PASS = 4096
#: Default number of token states requested from a task.
TOKENS_OF_A_TASK = 1024


@runtime_checkable
class HasProbe(Protocol):
    """Protocol of objects that provide inputs, such as every task of ``wb.tasks``."""

    def probe(self, n_tokens: int) -> Any:
        """Return inputs with at least ``n_tokens`` token states."""


def inputs_of(source: Any, n_tokens: int = TOKENS_OF_A_TASK) -> Any:
    """Return the inputs themselves, or the held-out inputs of a task, with at least ``n_tokens`` token states."""
    return source.probe(n_tokens) if isinstance(source, HasProbe) else source


@dataclass(frozen=True)
class Batches:
    """Batches of model inputs."""

    items: Iterable[Any]
    is_known: bool
    layout: BatchLayout = BATCH_FIRST

    @classmethod
    def of(cls, inputs: Any, subject: Subject | None = None, *, n_tokens: int = TOKENS_OF_A_TASK) -> Batches:
        """Create batches from a tensor, array, mapping, tuple of arguments, text, an iterable of these, or a task.

        Token ids may be of any integer type, in tensors, NumPy arrays or lists. Ids of a single sequence, shape
        (token,), are a batch of one. A task provides its held-out inputs, with ``n_tokens`` token states.
        """
        inputs = inputs_of(inputs, n_tokens)
        if (texts := _texts(inputs)) is not None:
            if subject is None:
                raise SnapshotError(
                    "Text needs a tokenizer; open the model with wb.open_checkpoint() or pass token ids."
                )
            inputs = subject.tokenize(texts)
        if _is_list(inputs):
            # Lists of ids of different lengths are batches of one sequence each: only the user knows how to pad them.
            is_ids = [_is_list(item) and _is_numbers(item) for item in inputs]
            inputs = (
                torch.tensor(inputs)
                if _is_numbers(inputs)
                else [torch.tensor(item) if is_id else item for item, is_id in zip(inputs, is_ids, strict=True)]
            )
        if isinstance(inputs, Tensor | np.ndarray | Mapping | tuple):
            inputs = [inputs]
        if _is_list(inputs):
            if not inputs:
                raise _empty()
            items = [as_batch(item) for item in inputs]
            for item in items:
                count_examples(item)
            return cls(items, True)
        if isinstance(inputs, Iterable) and not isinstance(inputs, bytes | str):
            return cls((as_batch(item) for item in inputs), False)
        raise SnapshotError(
            f"The inputs are a {type(inputs).__name__}, expected a tensor, a mapping, text, a task, or an iterable of "
            "batches."
        )

    def probe_and_all(self) -> tuple[Any, Batches]:
        """Return a few examples to try the model with, and batches that still contain all examples."""
        if self.is_known:
            return _head(self.first()), self
        iterator = iter(self.items)
        try:
            first = next(iterator)
        except StopIteration:
            raise _empty() from None

        def everything() -> Iterator[Any]:
            yield first
            yield from iterator

        return _head(first), Batches(everything(), False)

    def first(self) -> Any:
        """Return the complete first batch."""
        for item in self.items:
            return item
        raise _empty()

    def split(self, layout: BatchLayout = BATCH_FIRST) -> Batches:
        """Split the batches into parts small enough for one forward pass, between sequences and never within one."""
        if not self.is_known:
            return Batches(self.items, False, layout)
        parts = [part for item in self.items for part in _split(item, layout)]
        return Batches(parts, True, layout)

    @property
    def n_examples(self) -> list[int] | None:
        """Number of sequences in each batch; None if unknown before the batches are read."""
        return [count_examples(item, self.layout.inputs or 0) for item in self.items] if self.is_known else None


def _empty(found: str = "") -> SnapshotError:
    return SnapshotError(f"The inputs are empty; pass at least one batch of tokens{found}.")


def as_batch(inputs: Any) -> Any:
    """Return one batch (tensor or array, keyword arguments, or positional ones) in the form that a model accepts.

    Arrays become tensors, integers int64, and the ids of one sequence a batch of one; other values are unchanged.
    Tensors that no model accepts raise SnapshotError.
    """
    if isinstance(inputs, Mapping):
        return {name: _as_tensor(value, str(name)) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_as_tensor(value, None) for value in inputs)
    return _as_tensor(inputs, "")


def _as_tensor(value: Any, name: str | None) -> Any:
    """Convert a value to a tensor if it is an array or a list of ids.

    The name is that of a keyword argument, "" for inputs that are a single tensor, or None for a positional argument.
    """
    if name and name.endswith("_ids") and _is_list(value):
        try:
            value = torch.tensor(value)
        except (ValueError, TypeError, RuntimeError) as wrong:
            raise SnapshotError(
                f"'{name}' is a list that cannot become a tensor ({str(wrong).splitlines()[0]}); pad its sequences to "
                "one length, for example by tokenizer(..., padding=True, return_tensors='pt')."
            ) from wrong
    if isinstance(value, np.ndarray):
        value = _from_array(value)
    if not isinstance(value, Tensor):
        return value
    what = f"'{name}'" if name else "The input"

    def error(found: str, expected: str, remedy: str) -> SnapshotError:
        return SnapshotError(f"{what} {found}, expected {expected}; {remedy}.")

    if value.device.type == "meta":
        raise error("is on the meta device and holds no values", "values", "create it on the CPU or a GPU")
    if value.is_nested:
        raise error(
            "is a nested tensor", "one whose examples have equal length", "pass its examples as a list of tensors"
        )
    if value.is_quantized:
        raise error("is a quantized tensor", "ordinary numbers", "pass .dequantize()")
    if value.layout is not torch.strided:
        raise error("is a sparse tensor", "a dense tensor", "pass .to_dense()")
    if value.ndim and not value.numel():
        raise _empty(f" ({what.lower()} has shape {tuple(value.shape)})")
    if value.is_complex():
        raise error("holds complex numbers", "token ids, pixel values or embeddings", "convert it")
    is_ids = value.ndim in (1, 2) and not (value.is_floating_point() or value.dtype is torch.bool)
    if is_ids and (name == "" or (name and (name.endswith("_ids") or name == "attention_mask"))):
        value = value if value.dtype in (torch.int64, torch.int32) else value.long()
        value = value[None] if value.ndim == 1 else value
    return value


def _from_array(array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise SnapshotError(
            f"The input is an array of {array.dtype}, expected numbers; pass token ids as integers, or text as a list "
            "of strings."
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.array(array))  # a copy, as torch rejects negative strides and warns of read-only arrays


def _is_list(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str | tuple | bytes)


def _texts(inputs: Any) -> list[str] | None:
    """Return one or several texts as a list; None if the inputs are not text."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    is_text = isinstance(texts, list | tuple) and bool(texts) and all(isinstance(text, str) for text in texts)
    return list(texts) if is_text else None


def _is_numbers(inputs: Sequence[Any]) -> bool:
    """Return whether a list holds the token ids of one sequence, or of several of equal length."""
    if all(isinstance(x, int) and not isinstance(x, bool) for x in inputs):
        return bool(inputs)
    return bool(inputs) and all(_is_list(x) and _is_numbers(x) and len(x) == len(inputs[0]) for x in inputs)


def count_examples(batch: Any, axis: int = 0) -> int:
    """Return the number of sequences in a batch: the length of its first tensor along the axis that counts them."""
    tensors = [value for value in values_of(batch) if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise SnapshotError("A batch holds no tensor; pass token ids, pixel values or embeddings.")
    return tensors[0].shape[axis if tensors[0].ndim > axis else 0]


def _split(batch: Any, layout: BatchLayout) -> Iterator[Any]:
    """Yield the sequences of a large batch in parts small enough for one forward pass."""
    if isinstance(batch, tuple) or not layout.can_split:  # it is unknown which arguments have an axis of sequences
        yield batch
        return
    axis = layout.inputs or 0
    if not _can_be_cut(batch, axis):  # such as several images for one text
        yield batch
        return
    n_examples = count_examples(batch, axis)
    first = next(value for value in values_of(batch) if isinstance(value, Tensor) and value.ndim)
    is_tokens = first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point())
    per_example = first.shape[1 - axis] if is_tokens else 1 if first.ndim == 2 else 256
    step = max(1, _TOKENS_PER_PASS // max(per_example, 1))
    if n_examples == 0:
        raise _empty()
    if step >= n_examples:
        yield batch
        return
    for i in range(0, n_examples, step):
        yield take_examples(batch, slice(i, i + step), axis)


def _head(batch: Any) -> Any:
    """Return the first two examples, enough to read the anatomy; three where the axis of tokens has length 2."""
    if isinstance(batch, tuple) or not _can_be_cut(batch, 0):
        return batch
    first = next((value for value in values_of(batch) if isinstance(value, Tensor) and value.ndim > 1), None)
    return take_examples(batch, slice(0, 3 if first is not None and first.shape[1] == 2 else 2))


def shortened(batch: Any, n_tokens: int) -> Any:
    """Return the first tokens of each sequence of ids (and of masks); None if shapes do not tell the axis of tokens."""
    if isinstance(batch, Mapping):
        shapes = {tuple(value.shape) for value in batch.values() if isinstance(value, Tensor)}
        is_uniform = len(shapes) == 1 and all(isinstance(value, Tensor) for value in batch.values())
        can_cut = is_uniform and len(*shapes) == 2
        return {name: value[:, :n_tokens] for name, value in batch.items()} if can_cut else None
    is_ids = isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point()
    return batch[:, :n_tokens] if is_ids else None


def _can_be_cut(batch: Any, axis: int) -> bool:
    """Return whether all tensors have one entry per sequence, so that a subset of the sequences can be taken."""
    n_examples = count_examples(batch, axis)
    tensors = [value for value in values_of(batch) if isinstance(value, Tensor) and value.ndim > 1]
    return all(
        value.shape[axis] in (1, n_examples) or (axis == 1 and value.shape[0] == n_examples)  # masks: batch first
        for value in tensors
    )


def take_examples(batch: Any, which: slice | Tensor, axis: int = 0) -> Any:
    """Return some sequences of a batch, or of a task, from every tensor in it that has one entry per sequence."""
    batch = inputs_of(batch)
    if isinstance(batch, Tensor):
        axis = axis if batch.ndim > axis else 0
        return batch[(slice(None),) * axis + (which if isinstance(which, slice) else which.to(batch.device),)]
    n_examples = count_examples(batch, axis)

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.ndim > axis and value.shape[axis] == n_examples:
            return take_examples(value, which, axis)
        return take_examples(value, which) if axis and value.shape[0] == n_examples else value  # masks: batch first

    if isinstance(batch, Mapping):
        return {name: taken(value) for name, value in batch.items()}
    return tuple(taken(value) for value in batch)
