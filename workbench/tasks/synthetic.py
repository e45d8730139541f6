"""Synthetic language modelling: repetitions, integer runs and random runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from workbench.tasks.task import SequenceTask, mixed_seed, require_seed, require_split, require_whole, shuffled_rows

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("repetition", "integer_run", "random_run")
#: The lowest token id; those below are left free for special tokens.
FIRST_TOKEN = 10
_LONGEST_RUN = 15


@dataclass(frozen=True)
class SyntheticLM(SequenceTask):
    """Synthetic language modelling (RKSP): next-token prediction on sequences made of segments, see `segments`.

    Every sequence is a function of the seed, the split and its number. An epoch goes once through all sequences of the
    split, each time in another order; the last batch of an epoch is filled up from the next.

    Attributes:
        length: Tokens in a sequence that the model reads; one more is made, so that every position has a target.
        vocab_size: Tokens in the vocabulary; ids from 10 up occur.
        batch_size: Sequences in a batch.
        seed: Seed of the sequences and their order.
        split: ``"train"`` or ``"validation"``.
        n_sequences: Sequences for training.
        n_validation_sequences: Sequences for validation, made apart from those for training.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.SyntheticLM(length=16, vocab_size=64, batch_size=2)
        >>> tokens, targets = task.batch(0)
        >>> bool((tokens[:, 1:] == targets[:, :-1]).all())
        True
    """

    name: ClassVar[str] = "synthetic_lm"
    length: int = 256
    vocab_size: int = 10_000
    batch_size: int = 32
    seed: int = 0
    split: str = "train"
    n_sequences: int = 20_000
    n_validation_sequences: int = 2_000

    def __post_init__(self) -> None:
        require_whole(1, length=self.length, batch_size=self.batch_size)
        require_whole(1, n_sequences=self.n_sequences, n_validation_sequences=self.n_validation_sequences)
        require_whole(FIRST_TOKEN + _LONGEST_RUN, vocab_size=self.vocab_size)
        require_seed(self.seed)
        require_split(self.split)

    @property
    def n_held_out(self) -> int:
        """Sequences for validation."""
        return self.n_validation_sequences

    def sequence(self, row: int) -> Tensor:
        """Sequence number ``row`` of the split, with the token after its last: int64, shape (``length`` + 1,)."""
        generator = random.Random(mixed_seed(self.name, self.split, self.seed, row))
        tokens: list[int] = []
        for _, segment in segments(generator, vocab_size=self.vocab_size):
            tokens += segment
            if len(tokens) > self.length:
                break
        return torch.tensor(tokens[: self.length + 1])

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number ``index`` of the stream.

        Returns:
            tokens: int64, shape (batch, token).
            targets: Token after each of them, same shape.
        """
        n_rows = self.n_sequences if self.split == "train" else self.n_validation_sequences
        key = (self.name, "order", self.split, self.seed)
        rows = shuffled_rows(n_rows, batch_size=self.batch_size, index=index, key=key)
        sequences = torch.stack([self.sequence(row) for row in rows.tolist()])
        return sequences[:, :-1].to(device), sequences[:, 1:].to(device)


def synthetic_lm(
    *,
    length: int = 256,
    vocab_size: int = 10_000,
    batch_size: int = 32,
    seed: int = 0,
    split: str = "train",
    n_sequences: int = 20_000,
    n_validation_sequences: int = 2_000,
) -> SyntheticLM:
    """The paper's synthetic language modelling; see `SyntheticLM`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.synthetic_lm(length=16, vocab_size=64, batch_size=2)
        >>> [tuple(part.shape) for part in task.batch(0)]
        [(2, 16), (2, 16)]
    """
    return SyntheticLM(length, vocab_size, batch_size, seed, split, n_sequences, n_validation_sequences)


def segments(generator: random.Random, *, vocab_size: int = 10_000) -> Iterator[tuple[str, list[int]]]:
    """Segments of a sequence, without end.

    The paper gives the three kinds and their lengths:

    - ``"repetition"``: a pattern of 2 to 5 random tokens, 2 to 4 times;
    - ``"integer_run"``: 5 to 15 consecutive token ids, rising;
    - ``"random_run"``: 5 to 15 random tokens.

    Chosen here, where the paper says nothing: the three kinds are equally likely and independent of what came before;
    lengths and counts are uniform over their ranges; random tokens are uniform over the ids from 10 up and may repeat;
    an integer run starts where it still fits below ``vocab_size``, so none wraps around; nothing marks the border of
    two segments; the last segment is cut where the sequence is full.

    Args:
        generator: Generator of the random numbers.
        vocab_size: Token ids lie below it.

    Yields:
        The kind, and its tokens.
    """
    vocabulary = range(FIRST_TOKEN, vocab_size)

    while True:
        kind = generator.choice(KINDS)
        if kind == "repetition":
            pattern = generator.choices(vocabulary, k=generator.randint(2, 5))
            yield kind, pattern * generator.randint(2, 4)
        elif kind == "integer_run":
            n_tokens = generator.randint(5, _LONGEST_RUN)
            start = generator.randint(FIRST_TOKEN, vocab_size - n_tokens)
            yield kind, list(range(start, start + n_tokens))
        else:
            yield kind, generator.choices(vocabulary, k=generator.randint(5, _LONGEST_RUN))
