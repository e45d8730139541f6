"""Convert inputs of any supported form into batches for a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.models.layout import BATCH_FIRST, BatchLayout

if TYPE_CHECKING:
    from workbench.models.subject import Subject

#: Tokens in one forward pass, so that activations stay small whatever the input.
_TOKENS_PER_PASS = 4096
#: Default number of token states that a task is asked for.
TOKENS_OF_A_TASK = 1024


@runtime_checkable
class HasProbe(Protocol):
    """The part of a task that provides inputs: every task of ``wb.tasks`` has this method."""

    def probe(self, n_tokens: int) -> Any:
        """Inputs with at least ``n_tokens`` token states."""


def inputs_of(source: Any, n_tokens: int = TOKENS_OF_A_TASK) -> Any:
    """The inputs themselves; of a task, its held-out ones.

    Args:
        source: Inputs of any kind, or a task.
        n_tokens: Token states to ask a task for.
    """
    return source.probe(n_tokens) if isinstance(source, HasProbe) else source


@dataclass(frozen=True)
class Batches:
    """Batches of model inputs.

    Attributes:
        items: Batches, each a tensor, a mapping of keyword arguments, or a tuple of positional arguments.
        is_known: Whether all items exist already, rather than coming from an iterator.
        layout: Layout of the items.
    """

    items: Iterable[Any]
    is_known: bool
    layout: BatchLayout = BATCH_FIRST

    @classmethod
    def of(cls, inputs: Any, subject: Subject | None = None, *, n_tokens: int = TOKENS_OF_A_TASK) -> Batches:
        """Batches from a tensor, an array, a mapping, a tuple of arguments, text, an iterable of these, or a task.

        Token ids may be of any integer type, NumPy arrays or plain lists; ids of one sequence alone, shape (token,),
        are a batch of one. Of a task these are its held-out inputs, with ``n_tokens`` token states.

        Raises:
            SnapshotError: If the inputs are none of these, or empty.
        """
        inputs = inputs_of(inputs, n_tokens)
        if (texts := _texts(inputs)) is not None:
            if subject is None:
                raise SnapshotError(
                    "Text needs a tokenizer; open the model with wb.open_checkpoint() or pass token ids."
                )
            inputs = subject.tokenize(texts)
        if _is_list(inputs):
            # Lists of ids of different lengths are batches of one sequence each, for padding is not ours to make.
            inputs = torch.tensor(inputs) if _is_numbers(inputs) else [_of_numbers(item) for item in inputs]
        if isinstance(inputs, Tensor | np.ndarray | Mapping | tuple):
            inputs = [inputs]
        if _is_list(inputs):
            if not inputs:
                raise SnapshotError("The inputs are empty; pass at least one batch of tokens.")
            items = [as_batch(item) for item in inputs]
            for item in items:
                count_rows(item)
            return cls(items, True)
        if isinstance(inputs, Iterable) and not isinstance(inputs, bytes | str):
            return cls((as_batch(item) for item in inputs), False)
        raise SnapshotError(
            f"Inputs are a {type(inputs).__name__}, expected a tensor, a mapping, text, a task, or an iterable of "
            "batches."
        )

    def probe_and_all(self) -> tuple[Any, Batches]:
        """A row or two to try the model with, and batches that still hold everything."""
        if self.is_known:
            return _head(self.first()), self
        iterator = iter(self.items)
        try:
            first = next(iterator)
        except StopIteration:
            raise SnapshotError("The inputs are empty; pass at least one batch of tokens.") from None

        def everything() -> Iterator[Any]:
            yield first
            yield from iterator

        return _head(first), Batches(everything(), False)

    def first(self) -> Any:
        """The first batch, not cut.

        Raises:
            SnapshotError: If there is none.
        """
        for item in self.items:
            return item
        raise SnapshotError("The inputs are empty; pass at least one batch of tokens.")

    def split(self, layout: BatchLayout = BATCH_FIRST) -> Batches:
        """Batches that one forward pass can take, cut between sequences and never within one.

        Args:
            layout: Layout of the inputs.
        """
        if not self.is_known:
            return Batches(self.items, False, layout)
        parts = [part for item in self.items for part in _split(item, layout)]
        return Batches(parts, True, layout)

    @property
    def n_rows(self) -> list[int] | None:
        """Sequences in each batch; None where they are not known beforehand."""
        return [count_rows(item, self.layout.inputs or 0) for item in self.items] if self.is_known else None


def as_batch(inputs: Any) -> Any:
    """One batch as a model takes it: arrays become tensors, integers int64, ids of one sequence a batch of one.

    Args:
        inputs: A tensor or array; a mapping of keyword arguments; a tuple or list of positional ones.

    Returns:
        The same structure; what needs no change is passed on as it is.

    Raises:
        SnapshotError: If a tensor is empty, sparse, nested, quantized, without memory (meta), or of a kind that no
            model takes.
    """
    if isinstance(inputs, Mapping):
        return {name: _as_tensor(value, str(name)) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_as_tensor(value, None) for value in inputs)
    return _as_tensor(inputs, "")


def _as_tensor(value: Any, name: str | None) -> Any:
    """A value as a tensor; the name is that of a keyword, "" of inputs that are one tensor, None of an argument."""
    if name and name.endswith("_ids") and _is_list(value):
        value = _from_lists(value, name)
    if isinstance(value, np.ndarray):
        value = _from_array(value)
    if not isinstance(value, Tensor):
        return value
    what = f"'{name}'" if name else "The input"
    if value.device.type == "meta":
        raise SnapshotError(f"{what} is on the meta device and holds no values; make it on the CPU or a GPU.")
    if value.is_nested:
        raise SnapshotError(
            f"{what} is a nested tensor, expected one whose rows have one length; pass its rows as a list of tensors."
        )
    if value.is_quantized:
        raise SnapshotError(f"{what} is a quantized tensor, expected plain numbers; pass .dequantize().")
    if value.layout is not torch.strided:
        raise SnapshotError(f"{what} is a sparse tensor, expected a dense one; pass .to_dense().")
    if value.ndim and not value.numel():
        raise SnapshotError(
            f"The inputs are empty; pass at least one batch of tokens ({what.lower()} has shape {tuple(value.shape)})."
        )
    if value.is_complex():
        raise SnapshotError(f"{what} holds complex numbers, expected token ids, pixel values or embeddings.")
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
    return torch.from_numpy(np.array(array))  # a copy: what is read-only stays so, and strides may be negative


def _from_lists(value: Sequence[Any], name: str) -> Tensor:
    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SnapshotError(
            f"'{name}' is a list that makes no tensor ({str(error).splitlines()[0]}); pad its rows to one length, as "
            "tokenizer(..., padding=True, return_tensors='pt') does."
        ) from error


def _is_list(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str | tuple | bytes)


def _texts(inputs: Any) -> list[str] | None:
    """One text or several as a list; None: the inputs are no texts."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    is_text = isinstance(texts, list | tuple) and bool(texts) and all(isinstance(text, str) for text in texts)
    return list(texts) if is_text else None


def _of_numbers(item: Any) -> Any:
    return torch.tensor(item) if _is_list(item) and _is_numbers(item) else item


def _is_numbers(inputs: Sequence[Any]) -> bool:
    """Whether a list is token ids of one sequence, or of several of one length."""
    if all(isinstance(x, int) and not isinstance(x, bool) for x in inputs):
        return bool(inputs)
    return bool(inputs) and all(_is_list(x) and _is_numbers(x) and len(x) == len(inputs[0]) for x in inputs)


def count_rows(batch: Any, axis: int = 0) -> int:
    """Sequences in a batch: the length of its first tensor.

    Args:
        batch: A tensor, a mapping or a tuple.
        axis: Axis that counts sequences.

    Raises:
        SnapshotError: If it holds none.
    """
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise SnapshotError("A batch holds no tensor; pass token ids, pixel values or embeddings.")
    return tensors[0].shape[axis if tensors[0].ndim > axis else 0]


def _values(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, tuple | list) else [batch]


def _split(batch: Any, layout: BatchLayout) -> Iterator[Any]:
    """Sequences of one big batch in pieces that one forward pass can take."""
    if isinstance(batch, tuple) or not layout.can_split:  # nobody knows which arguments run over sequences
        yield batch
        return
    axis = layout.inputs or 0
    if not _can_be_cut(batch, axis):  # such as several images for one text
        yield batch
        return
    n_rows = count_rows(batch, axis)
    first = next(value for value in _values(batch) if isinstance(value, Tensor) and value.ndim)
    is_tokens = first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point())
    per_row = first.shape[1 - axis] if is_tokens else 1 if first.ndim == 2 else 256
    step = max(1, _TOKENS_PER_PASS // max(per_row, 1))
    if n_rows == 0:
        raise SnapshotError("The inputs are empty; pass at least one row of tokens.")
    if step >= n_rows:
        yield batch
        return
    for i in range(0, n_rows, step):
        yield take_rows(batch, slice(i, i + step), axis)


def _head(batch: Any) -> Any:
    """The first two rows, enough to read the anatomy; three, where that tells the axes apart better."""
    if isinstance(batch, tuple) or not _can_be_cut(batch, 0):
        return batch
    first = next((value for value in _values(batch) if isinstance(value, Tensor) and value.ndim > 1), None)
    return take_rows(batch, slice(0, 3 if first is not None and first.shape[1] == 2 else 2))


def shortened(batch: Any, n_tokens: int) -> Any:
    """The first tokens of each sequence; None where it cannot be told from shapes which axis counts them.

    Args:
        batch: Token ids, or a mapping of them and of masks.
        n_tokens: Most tokens of a sequence.
    """
    if isinstance(batch, Mapping):
        shapes = {tuple(value.shape) for value in batch.values() if isinstance(value, Tensor)}
        is_plain = len(shapes) == 1 and all(isinstance(value, Tensor) for value in batch.values())
        return {name: value[:, :n_tokens] for name, value in batch.items()} if is_plain and len(*shapes) == 2 else None
    is_ids = isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point()
    return batch[:, :n_tokens] if is_ids else None


def _can_be_cut(batch: Any, axis: int) -> bool:
    """Whether all tensors have one entry a sequence, so that some sequences of them still belong together."""
    n_rows = count_rows(batch, axis)
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim > 1]
    return all(
        value.shape[axis] in (1, n_rows) or (axis == 1 and value.shape[0] == n_rows)  # masks: batch first
        for value in tensors
    )


def take_rows(batch: Any, which: slice | Tensor, axis: int = 0) -> Any:
    """Some sequences of a batch: of every tensor in it that has one entry for each.

    Args:
        batch: A tensor, a mapping or a tuple; or a task, for its held-out inputs.
        which: Indices of the sequences.
        axis: Axis that counts sequences.
    """
    batch = inputs_of(batch)
    if isinstance(batch, Tensor):
        axis = axis if batch.ndim > axis else 0
        return batch[(slice(None),) * axis + (which if isinstance(which, slice) else which.to(batch.device),)]
    n_rows = count_rows(batch, axis)

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.ndim > axis and value.shape[axis] == n_rows:
            return take_rows(value, which, axis)
        return take_rows(value, which) if axis and value.shape[0] == n_rows else value  # masks: batch first

    if isinstance(batch, Mapping):
        return {name: taken(value) for name, value in batch.items()}
    return tuple(taken(value) for value in batch)
