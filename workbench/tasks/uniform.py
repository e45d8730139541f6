"""Random tokens, of which only the distribution can be learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from workbench.option_checks import PositiveInt, Seed, at_least, checked
from workbench.tasks.task import SequenceTask, batch_generator

if TYPE_CHECKING:
    from torch import Tensor


@checked
@dataclass(frozen=True)
class RandomTokens(SequenceTask):
    """Next-token prediction on uniformly random tokens, on which RKSP trains its MoE, Mamba and KAN models.

    The lowest possible loss is ln ``vocab_size`` nats. The paper does not state length and vocabulary; the defaults are
    those of associative recall.
    """

    name: ClassVar[str] = "random_tokens"
    length: PositiveInt = 64
    vocab_size: Annotated[int, at_least(2)] = 256
    batch_size: PositiveInt = 32
    seed: Seed = 0

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch number ``index`` of the stream.

        Returns:
            tokens: int64, shape (batch, token).
            targets: The next token at each position, same shape.
        """
        shape = (self.batch_size, self.length + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=batch_generator(self.seed, index))
        return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def random_tokens(
    *, length: PositiveInt = 64, vocab_size: int = 256, batch_size: PositiveInt = 32, seed: Seed = 0
) -> RandomTokens:
    """Create a task of uniformly random tokens.

    Args:
        length: See `RandomTokens`; likewise the others.
        vocab_size: See `RandomTokens`.
        batch_size: See `RandomTokens`.
        seed: See `RandomTokens`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16)
        >>> tuple(task.probe(32).shape)
        (4, 8)

    See Also:
        `workbench.tasks.synthetic_lm`: Makes a task that can be learned.
    """
    return RandomTokens(length=length, vocab_size=vocab_size, batch_size=batch_size, seed=seed)
