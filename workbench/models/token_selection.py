"""Selection of token states: all or a random subset, without padding and leading tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import OptionError, SnapshotError
from workbench.models.batches import Batches, count_examples
from workbench.models.layout import BATCH_FIRST, BatchLayout, require

#: Masks that are 0 at padding, laid out like the inputs; and those of PyTorch, (batch, token), which are True there.
_MASKS = ("attention_mask", "decoder_attention_mask")
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


@dataclass
class TokenSelection:
    """Selection of token states, the same in every layer.

    Padding (0 in an ``attention_mask``, True in PyTorch's ``src_key_padding_mask``) is never chosen. If the number of
    sequences is known, the states are drawn at random from all of them; from an iterator they are taken in order.

    Attributes:
        n_snapshots: Number of states to choose in total; None for all.
        skip_first: Number of leading tokens of each sequence to leave out, because the first often carries massive
            activations. For inputs without token ids, such as images, the number of leading states.
        seed: Seed of the random choice.
        layout: Layout of inputs and states.
        n_chosen: Number of states chosen so far.
        n_offered: Number of states so far that could have been chosen.
        has_unused_mask: Whether there was a mask that belongs to other tokens than the states, such as that of an
            encoder for states of the decoder.
    """

    n_snapshots: int | None
    skip_first: int = 0
    seed: int = 0
    layout: BatchLayout = BATCH_FIRST
    n_chosen: int = 0
    n_offered: int = 0
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
