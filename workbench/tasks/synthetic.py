"""Synthetic language modeling: repetitions, integer runs and random runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from workbench.option_checks import PositiveInt, Seed, at_least, checked
from workbench.tasks.task import SequenceTask, Split, mixed_seed, shuffled_rows

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("repetition", "integer_run", "random_run")
#: The lowest token id; those below are reserved for special tokens.
FIRST_TOKEN = 10
_LONGEST_RUN = 15


@checked
@dataclass(frozen=True)
class SyntheticLM(SequenceTask):
    """Synthetic language modeling (RKSP): next-token prediction on sequences of random segments.

    A segment is a repeated pattern of 2 to 5 tokens, a run of consecutive token ids, or a run of random tokens. Every
    sequence is a function of the seed, the split and its number. An epoch reads all sequences of the split once, in a
    different order each time; the last batch of an epoch is completed with sequences of the next.
    """

    name: ClassVar[str] = "synthetic_lm"
    length: PositiveInt = 256
    vocab_size: Annotated[int, at_least(FIRST_TOKEN + _LONGEST_RUN)] = 10_000
    batch_size: PositiveInt = 32
    seed: Seed = 0
    split: Split = "train"
    n_sequences: PositiveInt = 20_000
    n_validation_sequences: PositiveInt = 2_000

    @property
    def n_held_out(self) -> int:
        """Sequences in the validation split."""
        return self.n_validation_sequences

    def sequence(self, row: int) -> Tensor:
        """Return sequence number ``row`` of the split and the token that follows it.

        Args:
            row: Number of the sequence.

        Returns:
            int64, shape (``length`` + 1,).
        """
        generator = random.Random(mixed_seed(self.name, self.split, self.seed, row))
        tokens: list[int] = []
        for _, segment in segments(generator, vocab_size=self.vocab_size):
            tokens += segment
            if len(tokens) > self.length:
                break
        return torch.tensor(tokens[: self.length + 1])

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch number ``index`` of the stream.

        Returns:
            tokens: int64, shape (batch, token).
            targets: The next token at each position, same shape.
        """
        n_rows = self.n_sequences if self.split == "train" else self.n_validation_sequences
        key = (self.name, "order", self.split, self.seed)
        rows = shuffled_rows(n_rows, batch_size=self.batch_size, index=index, key=key)
        sequences = torch.stack([self.sequence(row) for row in rows.tolist()])
        return sequences[:, :-1].to(device), sequences[:, 1:].to(device)


def synthetic_lm(
    *,
    length: PositiveInt = 256,
    vocab_size: int = 10_000,
    batch_size: PositiveInt = 32,
    seed: Seed = 0,
    split: Split = "train",
    n_sequences: int = 20_000,
    n_validation_sequences: int = 2_000,
) -> SyntheticLM:
    """Create a task of synthetic language modeling.

    Args:
        length: See `SyntheticLM`; likewise the others.
        vocab_size: See `SyntheticLM`.
        batch_size: See `SyntheticLM`.
        seed: See `SyntheticLM`.
        split: See `SyntheticLM`.
        n_sequences: See `SyntheticLM`.
        n_validation_sequences: See `SyntheticLM`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.synthetic_lm(length=16, vocab_size=64, batch_size=2)
        >>> [tuple(part.shape) for part in task.batch(0)]
        [(2, 16), (2, 16)]

    See Also:
        `workbench.tasks.associative_recall`: Makes a task of recall.
    """
    return SyntheticLM(length, vocab_size, batch_size, seed, split, n_sequences, n_validation_sequences)


def segments(generator: random.Random, *, vocab_size: int = 10_000) -> Iterator[tuple[str, list[int]]]:
    """Generate the segments of a sequence, without end.

    The paper states the three kinds and their lengths:

    - ``"repetition"``: a pattern of 2 to 5 random tokens, repeated 2 to 4 times;
    - ``"integer_run"``: 5 to 15 consecutive token ids, increasing;
    - ``"random_run"``: 5 to 15 random tokens.

    The following is not in the paper: the kinds are equally likely and independent; lengths and counts are uniform over
    their ranges; random tokens are uniform over the ids from 10 up and may repeat; integer runs stay below
    ``vocab_size``; there is no separator between segments; the last segment is truncated at the end of the sequence.
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
