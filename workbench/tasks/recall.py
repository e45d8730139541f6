"""Associative recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from workbench.errors import OptionError
from workbench.tasks.task import SequenceTask, batch_generator, require_seed, require_whole

if TYPE_CHECKING:
    from torch import Tensor

PADDING = 0


@dataclass(frozen=True)
class AssociativeRecall(SequenceTask):
    """Associative recall (RKSP): read key-value pairs, then answer for one key at the last position.

    A sequence is ``n_pairs`` pairs key, value, then padding, then the query key. Keys of a sequence differ. The paper
    does not say how keys and values share the vocabulary; here keys are the lower half (without padding, token 0) and
    values the upper half, so that a value is never mistaken for a key.

    Attributes:
        length: Tokens in a sequence.
        vocab_size: Tokens in the vocabulary.
        n_pairs: Pairs in a sequence.
        batch_size: Sequences in a batch.
        seed: Seed of the stream of batches.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.AssociativeRecall(length=6, vocab_size=16, n_pairs=2, batch_size=4)
        >>> tokens, targets = task.batch(0)
        >>> tuple(tokens.shape), (targets != -100).sum(dim=1).tolist()
        ((4, 6), [1, 1, 1, 1])
    """

    name: ClassVar[str] = "associative_recall"
    length: int = 64
    vocab_size: int = 256
    n_pairs: int = 4
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole(
            1, length=self.length, vocab_size=self.vocab_size, n_pairs=self.n_pairs, batch_size=self.batch_size
        )
        require_seed(self.seed)
        if self.length < 2 * self.n_pairs + 1:
            raise OptionError(
                f"length is {self.length}, expected at least {2 * self.n_pairs + 1}: {self.n_pairs} pairs and a query."
            )
        if self.vocab_size // 2 - 1 < self.n_pairs:
            raise OptionError(
                f"vocab_size is {self.vocab_size}, too small for {self.n_pairs} different keys; "
                f"expected at least {2 * self.n_pairs + 2}."
            )

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number ``index`` of the stream.

        Returns:
            tokens: int64, shape (batch, token).
            targets: int64, shape (batch, token): the value at the last position, -100 (ignored by cross entropy)
                elsewhere.
        """
        generator = batch_generator(self.seed, index)
        half = self.vocab_size // 2
        n, pairs = self.batch_size, self.n_pairs
        keys = torch.rand(n, half - 1, generator=generator).argsort(1)[:, :pairs] + 1
        values = torch.randint(half, self.vocab_size, (n, pairs), generator=generator)
        asked = torch.randint(pairs, (n, 1), generator=generator)
        tokens = torch.full((n, self.length), PADDING, dtype=torch.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        tokens[:, -1:] = keys.gather(1, asked)
        targets = torch.full_like(tokens, -100)
        targets[:, -1:] = values.gather(1, asked)
        return tokens.to(device), targets.to(device)


def associative_recall(
    *, length: int = 64, vocab_size: int = 256, n_pairs: int = 4, batch_size: int = 32, seed: int = 0
) -> AssociativeRecall:
    """The paper's associative recall; see `AssociativeRecall`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.associative_recall(length=6, vocab_size=16, n_pairs=2)
        >>> task.describe()
        {'task': 'associative_recall', 'length': 6, 'vocab_size': 16, 'n_pairs': 2, 'batch_size': 32, 'seed': 0}
    """
    return AssociativeRecall(length=length, vocab_size=vocab_size, n_pairs=n_pairs, batch_size=batch_size, seed=seed)
