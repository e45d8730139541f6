"""The associative recall task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from workbench.errors import OptionError
from workbench.option_checks import PositiveInt, Seed, checked
from workbench.tasks.task import SequenceTask, batch_generator

if TYPE_CHECKING:
    from torch import Tensor

PADDING = 0


@checked
@dataclass(frozen=True)
class AssociativeRecall(SequenceTask):
    """Associative recall (RKSP): read key-value pairs, then predict the value of one key at the last position.

    A sequence consists of ``n_pairs`` pairs (key, value), padding, and the query key. The keys of a sequence differ.
    The paper does not state how keys and values share the vocabulary; here keys are from the lower half (without token
    0, the padding) and values from the upper half, so that they cannot be confused.
    """

    name: ClassVar[str] = "associative_recall"
    length: PositiveInt = 64
    vocab_size: PositiveInt = 256
    n_pairs: PositiveInt = 4
    batch_size: PositiveInt = 32
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.length < 2 * self.n_pairs + 1:
            raise OptionError.of(
                "length", self.length, f"at least {2 * self.n_pairs + 1} for {self.n_pairs} pairs and a query"
            )
        if self.vocab_size // 2 - 1 < self.n_pairs:
            raise OptionError.of(
                "vocab_size", self.vocab_size, f"at least {2 * self.n_pairs + 2} for {self.n_pairs} different keys"
            )

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch number ``index`` of the stream.

        Returns:
            Tokens and targets, both int64 of shape (batch, token). The target at the last position is the value, and
            all others are -100, which cross entropy ignores.
        """
        generator = batch_generator(self.seed, index)
        half = self.vocab_size // 2
        n, pairs = self.batch_size, self.n_pairs
        keys = torch.rand(n, half - 1, generator=generator).argsort(1)[:, :pairs] + 1
        values = torch.randint(half, self.vocab_size, (n, pairs), generator=generator)
        query = torch.randint(pairs, (n, 1), generator=generator)
        tokens = torch.full((n, self.length), PADDING, dtype=torch.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        tokens[:, -1:] = keys.gather(1, query)
        targets = torch.full_like(tokens, -100)
        targets[:, -1:] = values.gather(1, query)
        return tokens.to(device), targets.to(device)


def associative_recall(
    *,
    length: PositiveInt = 64,
    vocab_size: PositiveInt = 256,
    n_pairs: PositiveInt = 4,
    batch_size: PositiveInt = 32,
    seed: Seed = 0,
) -> AssociativeRecall:
    """Create a task of associative recall.

    Args:
        length: See `AssociativeRecall`; likewise the others.
        vocab_size: See `AssociativeRecall`.
        n_pairs: See `AssociativeRecall`.
        batch_size: See `AssociativeRecall`.
        seed: See `AssociativeRecall`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.associative_recall(length=6, vocab_size=16, n_pairs=2)
        >>> task.describe()
        {'task': 'associative_recall', 'length': 6, 'vocab_size': 16, 'n_pairs': 2, 'batch_size': 32, 'seed': 0}

    See Also:
        `workbench.tasks.synthetic_lm`: Makes a task of synthetic language.
    """
    return AssociativeRecall(length=length, vocab_size=vocab_size, n_pairs=n_pairs, batch_size=batch_size, seed=seed)
