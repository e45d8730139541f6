"""Batches for a model from inputs of any supported form, and the choice of token states among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from workbench.errors import OptionError, SnapshotError
from workbench.models.calling import tensors_of, with_values
from workbench.models.layout import BATCH_FIRST, BatchLayout, require
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
        """Create batches from a tensor, array, mapping, tuple, text, an iterable of these, or a task."""
        inputs = inputs_of(inputs, n_tokens)
        if (texts := _texts(inputs)) is not None:
            if subject is None:
                raise SnapshotError("Text needs a tokenizer; open the model by wb.open_checkpoint() or pass ids.")
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
        raise SnapshotError(f"The inputs are a {type(inputs).__name__}, expected tensors, text, a task or batches.")

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
    """Return one batch as a model accepts it (arrays as tensors, integers int64), or raise SnapshotError."""
    return with_values(inputs, _as_tensor)


def _as_tensor(value: Any, name: Any) -> Any:
    """Convert a value to a tensor if it is an array or a list of ids; names are those of `with_values`."""
    name = str(name) if name is not None else None
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
        raise error("is a nested tensor", "one whose examples have equal length", "pass its examples as a list")
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
        raise SnapshotError(f"The input is an array of {array.dtype}, not of numbers; pass token ids or texts.")
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
    tensors = [value for _, value in tensors_of(batch)]
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
    first = next(value for _, value in tensors_of(batch))
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
    first = next((value for _, value in tensors_of(batch) if value.ndim > 1), None)
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
    tensors = [value for _, value in tensors_of(batch) if value.ndim > 1]
    return all(
        value.shape[axis] in (1, n_examples) or (axis == 1 and value.shape[0] == n_examples)  # masks: batch first
        for value in tensors
    )


def take_examples(batch: Any, which: slice | Tensor, axis: int = 0) -> Any:
    """Return some sequences of a batch, or of a task, from every tensor in it that has one entry per sequence."""
    batch = inputs_of(batch)
    if isinstance(batch, Tensor):
        axis = axis if batch.ndim > axis else 0
        return batch[
            (slice(None),) * axis + (which if isinstance(which, slice) else which.to(batch.device, non_blocking=True),)
        ]
    n_examples = count_examples(batch, axis)

    def taken(value: Any, name: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.ndim > axis and value.shape[axis] == n_examples:
            return take_examples(value, which, axis)
        return take_examples(value, which) if axis and value.shape[0] == n_examples else value  # masks: batch first

    return with_values(batch, taken)


#: Masks that are 0 at padding, laid out like the inputs; and those of PyTorch, (batch, token), which are True there.
_MASKS = ("attention_mask", "decoder_attention_mask")
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


@dataclass
class TokenSelection:
    """Selection of token states, the same in every layer.

    Padding (0 in an ``attention_mask``, True in PyTorch's ``src_key_padding_mask``) is never chosen. If the number of
    sequences is known, the states are drawn at random from all of them; from an iterator they are taken in order.
    """

    n_snapshots: int | None  # number of states to choose in total; None for all
    #: Number of leading tokens of each sequence to leave out, because the first often carries massive activations. For
    #: inputs without token ids, such as images, the number of leading states.
    skip_first: int = 0
    seed: int = 0  # seed of the random choice
    layout: BatchLayout = BATCH_FIRST  # layout of inputs and states
    n_chosen: int = 0  # number of states chosen so far
    n_offered: int = 0  # number of states so far that could have been chosen
    #: Whether there was a mask that belongs to other tokens than the states, such as that of an encoder for states of
    #: the decoder.
    has_unused_mask: bool = False
    _n_left: int | None = None
    _generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.n_snapshots is not None and self.n_snapshots < 3:
            raise SnapshotError.of("n_snapshots", self.n_snapshots, "at least 3")
        if self.skip_first < 0:
            raise OptionError.of("skip_first", self.skip_first, "at least 0")
        self._generator.manual_seed(self.seed)

    def begin(self, batches: Batches) -> None:
        """Set the layout and the expected number of sequences."""
        self.layout = batches.layout
        self._n_left = None if batches.n_examples is None else sum(batches.n_examples)

    def reset(self) -> None:
        """Restart the selection from the first batch."""
        self.n_chosen = self.n_offered = 0
        self.has_unused_mask = False
        self._generator.manual_seed(self.seed)

    @property
    def is_complete(self) -> bool:
        """Whether enough states are chosen."""
        return self.n_snapshots is not None and self.n_chosen >= self.n_snapshots

    def choose(self, leading_shape: torch.Size, batch: Any) -> Tensor:
        """Choose states of one batch and return their indices into the flattened leading axes, in increasing order."""
        candidates = self._candidates(leading_shape, batch)
        self.n_offered += len(candidates)
        if self.n_snapshots is None:
            chosen = candidates
        elif self._n_left is None:
            chosen = candidates[: self.n_snapshots - self.n_chosen]
        else:
            n_examples = count_examples(batch, self.layout.inputs or 0)
            remaining = self.n_snapshots - self.n_chosen
            quota = -(-remaining * n_examples // max(self._n_left, n_examples))
            self._n_left -= n_examples
            shuffled = torch.randperm(len(candidates), generator=self._generator)[:quota]
            chosen = candidates[shuffled.sort().values]
        self.n_chosen += len(chosen)
        return chosen

    def describe(self) -> str:
        """Return a description of the selection for provenance."""
        which = "every token" if self.n_chosen == self.n_offered else f"{self.n_chosen} of {self.n_offered} tokens"
        if self.skip_first:
            which += f", first {self.skip_first} of each sequence left out"
        if self.has_unused_mask:
            which += "; a mask did not fit the states and was not used"
        return which

    def _candidates(self, leading_shape: torch.Size, batch: Any) -> Tensor:
        mask = torch.ones(leading_shape, dtype=torch.int64)
        fitted = self._mask(tuple(leading_shape), batch)
        if fitted is not None:
            mask = fitted.long()
        if self.skip_first:
            if mask.ndim < 2:
                raise SnapshotError("skip_first needs states of shape (batch, token, feature); pass batched inputs.")
            axis = require(self.layout.states, "skip_first", tuple(leading_shape))
            self._require_state_per_token(tuple(leading_shape), axis, batch)
            rows = mask.movedim(axis, 0)
            kept = rows * (rows.flatten(1).cumsum(1) > self.skip_first).view(rows.shape)
            mask = kept.movedim(0, axis)
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # the mask is in host memory

    def _require_state_per_token(self, leading: tuple[int, ...], axis: int, batch: Any) -> None:
        """Raise SnapshotError if there is not one state for each token, so that leading tokens cannot be counted."""
        given = _token_shapes(batch)
        if len(leading) != 2 or not given:
            return
        inputs = self.layout.inputs
        counts = {n for shape in given for n in (shape if inputs is None else (shape[1 - inputs],))}
        if leading[1 - axis] not in counts:
            known = " or ".join(map(str, sorted(counts)))
            raise SnapshotError(
                f"skip_first leaves out the first tokens of each sequence, but there are {leading[1 - axis]} states "
                f"for {known} tokens, as with a prompt or image tokens in front, so the first tokens cannot be "
                "determined; pass skip_first=0."
            )

    def _mask(self, leading: tuple[int, ...], batch: Any) -> Tensor | None:
        """Return a boolean mask of the tokens that are no padding, laid out like the states; None if there is none."""
        if not isinstance(batch, Mapping):
            return None
        found, unused = None, []
        for name in (*_MASKS, *_PADDING_MASKS):
            given = batch.get(name)
            if not isinstance(given, Tensor):
                continue
            is_pytorch = name in _PADDING_MASKS
            hides = given.cpu() != 0
            shown = ~hides if is_pytorch else hides
            axis = 0 if is_pytorch else self.layout.inputs
            fitted = _laid_out(shown, leading, axis, self.layout.states)
            if fitted is not None:
                found = fitted
            elif not bool(shown.all()):
                unused.append((name, given))
        if found is None and unused:
            name, given = unused[0]
            if name == "attention_mask" and "decoder_input_ids" in batch:  # it belongs to the encoder's tokens
                self.has_unused_mask = True
                return None
            raise SnapshotError(
                f"The {name} of shape {tuple(given.shape)} hides tokens, but the states have leading shape {leading}, "
                "so padding cannot be distinguished from tokens; pass inputs without padding."
            )
        return found


def _token_shapes(batch: Any) -> list[tuple[int, int]]:
    """Return the shapes (first two axes) of the token ids or embeddings in a batch; none for images or audio."""
    if isinstance(batch, Mapping):
        named = [value for name, value in batch.items() if str(name).endswith(("input_ids", "inputs_embeds"))]
        values = named and [*named, batch.get("labels")]  # from which decoders derive their ids
    else:
        values = [*batch] if isinstance(batch, tuple | list) else [batch]
        values = [v for v in values if isinstance(v, Tensor) and not v.is_floating_point()]
    found = (tuple(v.shape[:2]) for v in values if isinstance(v, Tensor) and v.ndim == 2 + v.is_floating_point())
    return [(a, b) for a, b in found]


def _laid_out(mask: Tensor, leading: tuple[int, ...], axis: int | None, states: int | None) -> Tensor | None:
    """Return a mask (batch, token), or (token, batch) if ``axis`` is 1, laid out like the states; None if it is not."""
    if mask.ndim != 2 or len(leading) != 2:
        return mask if tuple(mask.shape) == leading else None
    if axis is None or states is None:
        shapes = [tuple(mask.shape) == leading, tuple(mask.shape[::-1]) == leading]
        if all(shapes) and not bool(mask.all()):
            require(None, "A mask that is as long as it is wide", leading)
        return mask if shapes[0] else mask.T if shapes[1] else None
    by_sequence = mask.movedim(axis, 0)
    expected = (leading[states], leading[1 - states])
    if tuple(by_sequence.shape) != expected and tuple(mask.shape) == expected:
        by_sequence = mask  # masks are often (batch, token) whatever the layout of the states
    return by_sequence.movedim(0, states) if tuple(by_sequence.shape) == expected else None
