"""Inputs as users have them -> batches as a model takes them, and which token states of a batch to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import SnapshotError, ThresholdError

if TYPE_CHECKING:
    from workbench.subjects.checkpoint import Subject

#: Tokens in one forward pass, so that activations stay small whatever the input.
_TOKENS_PER_PASS = 4096
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Batches:
    """Batches of model inputs.

    Attributes:
        items: Each a tensor, a mapping of keyword arguments, or a tuple of positional arguments.
        n_rows: Sequences in each batch; None where the inputs come from an iterator and are not known beforehand.
    """

    items: Iterable[Any]
    n_rows: list[int] | None

    @classmethod
    def of(cls, inputs: Any, subject: Subject | None = None) -> Batches:
        """Batches from a tensor, a mapping, a tuple of arguments, text, or an iterable of these.

        Raises:
            SnapshotError: If the inputs are none of these, or empty.
        """
        if isinstance(inputs, str) or (_is_list(inputs) and inputs and all(isinstance(x, str) for x in inputs)):
            if subject is None:
                raise SnapshotError(
                    "Text needs a tokenizer; open the model with wb.open_checkpoint() or pass token ids."
                )
            inputs = subject.tokenize(inputs)
        if isinstance(inputs, Tensor | Mapping):
            parts = list(_split(inputs))
            return cls(parts, [count_rows(part) for part in parts])
        if isinstance(inputs, tuple):
            return cls([inputs], [count_rows(inputs)])
        if _is_list(inputs):
            split = (_split(item) if isinstance(item, Tensor | Mapping) else [item] for item in inputs)
            parts = [part for pieces in split for part in pieces]
            if not parts:
                raise SnapshotError("The inputs are empty; pass at least one batch of tokens.")
            return cls(parts, [count_rows(part) for part in parts])
        if isinstance(inputs, Iterable):
            return cls(inputs, None)
        raise SnapshotError(
            f"Inputs are a {type(inputs).__name__}, expected a tensor, a mapping, text, or an iterable of batches."
        )

    def probe_and_all(self) -> tuple[Any, Batches]:
        """A row or two to try the model with, and batches that still hold everything."""
        if self.n_rows is not None:
            return _head(self.items[0]), self
        iterator = iter(self.items)
        try:
            first = next(iterator)
        except StopIteration:
            raise SnapshotError("The inputs are empty; pass at least one batch of tokens.") from None

        def everything() -> Iterator[Any]:
            yield first
            yield from iterator

        return _head(first), Batches(everything(), None)


@dataclass
class TokenSelection:
    """Chooses token states, the same in every layer.

    Padding (an ``attention_mask`` of 0) is never chosen. With inputs whose number of rows is known, the states are
    spread at random over all of them; from an iterator they are taken in order.

    Attributes:
        n_snapshots: How many to choose in all; None for every one.
        skip_first: Leading tokens of each sequence to leave out (massive activations sit on the first).
        seed: Of the random choice.
        n_chosen: Chosen so far.
        n_offered: Seen so far that could have been chosen.
        has_unused_mask: Whether a mask came that does not fit the states, as in a model that shortens its sequences.
    """

    n_snapshots: int | None
    skip_first: int = 0
    seed: int = 0
    n_chosen: int = 0
    n_offered: int = 0
    has_unused_mask: bool = False
    _rows_left: int | None = None
    _generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.n_snapshots is not None and self.n_snapshots < 3:
            raise SnapshotError(f"n_snapshots is {self.n_snapshots}, expected at least 3.")
        if self.skip_first < 0:
            raise ThresholdError(f"skip_first is {self.skip_first}, expected at least 0.")
        self._generator.manual_seed(self.seed)

    def begin(self, batches: Batches) -> None:
        """Say how much is to come."""
        self._rows_left = None if batches.n_rows is None else sum(batches.n_rows)

    @property
    def is_complete(self) -> bool:
        """Whether no more states are wanted."""
        return self.n_snapshots is not None and self.n_chosen >= self.n_snapshots

    def choose(self, leading_shape: torch.Size, batch: Any) -> Tensor:
        """Indices into the flattened leading axes (batch, token) of the states of one batch, rising."""
        candidates = self._candidates(leading_shape, batch)
        self.n_offered += len(candidates)
        if self.n_snapshots is None:
            chosen = candidates
        elif self._rows_left is None:
            chosen = candidates[: self.n_snapshots - self.n_chosen]
        else:
            n_rows = count_rows(batch)
            wanted = self.n_snapshots - self.n_chosen
            quota = -(-wanted * n_rows // max(self._rows_left, n_rows))
            self._rows_left -= n_rows
            shuffled = torch.randperm(len(candidates), generator=self._generator)[:quota]
            chosen = candidates[shuffled.sort().values]
        self.n_chosen += len(chosen)
        return chosen

    def describe(self) -> str:
        """What was chosen, for provenance."""
        which = "every token" if self.n_chosen == self.n_offered else f"{self.n_chosen} of {self.n_offered} tokens"
        if self.skip_first:
            which += f", first {self.skip_first} of each sequence left out"
        if self.has_unused_mask:
            which += "; a mask did not fit the states and was not used"
        return which

    def _candidates(self, leading_shape: torch.Size, batch: Any) -> Tensor:
        mask = torch.ones(leading_shape, dtype=torch.int64)
        if isinstance(batch, Mapping):
            for name in _MASKS:
                given = batch.get(name)
                if isinstance(given, Tensor) and given.shape == leading_shape:
                    mask = (given.cpu() != 0).long()
            is_fitting = [batch[name].shape == leading_shape for name in _MASKS if isinstance(batch.get(name), Tensor)]
            self.has_unused_mask |= bool(is_fitting) and not any(is_fitting)
        if self.skip_first:
            if mask.ndim < 2:
                raise SnapshotError("skip_first needs states of shape (batch, token, feature); pass batched inputs.")
            mask = mask * (mask.cumsum(1) > self.skip_first)
        return mask.flatten().nonzero().flatten()


def _is_list(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str | tuple | bytes)


def count_rows(batch: Any) -> int:
    """Sequences in a batch: the length of its first tensor.

    Raises:
        SnapshotError: If it holds none.
    """
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise SnapshotError("A batch holds no tensor; pass token ids, pixel values or embeddings.")
    return len(tensors[0])


def _values(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, tuple | list) else [batch]


def _split(batch: Tensor | Mapping[str, Any]) -> Iterator[Any]:
    """Rows of one big batch in pieces that one forward pass can take."""
    n_rows = count_rows(batch)
    tokens = next(value for value in _values(batch) if isinstance(value, Tensor) and value.ndim)
    per_row = tokens.shape[1] if tokens.ndim in (2, 3) else 256
    step = max(1, _TOKENS_PER_PASS // max(per_row, 1))
    if n_rows == 0:
        raise SnapshotError("The inputs are empty; pass at least one row of tokens.")
    for i in range(0, n_rows, step):
        yield take_rows(batch, slice(i, i + step))


def _head(batch: Any) -> Any:
    """The first two rows: enough to read the anatomy."""
    return take_rows(batch, slice(0, 2)) if isinstance(batch, Tensor | Mapping) else batch


def take_rows(batch: Any, which: slice | Tensor) -> Any:
    """Some sequences of a batch: of every tensor in it that has one entry for each."""
    if isinstance(batch, Tensor):
        return batch[which if isinstance(which, slice) else which.to(batch.device)]
    n_rows = count_rows(batch)

    def taken(value: Any) -> Any:
        return take_rows(value, which) if isinstance(value, Tensor) and value.shape[:1] == (n_rows,) else value

    if isinstance(batch, Mapping):
        return {name: taken(value) for name, value in batch.items()}
    return tuple(taken(value) for value in batch)
