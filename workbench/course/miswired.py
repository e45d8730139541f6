"""A small training with one line wrong, as people report it: for notebook 10 and practice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import OptionError

#: Faults of `miswired`; the empty name is the sound training.
MISWIRED = (
    "labels shifted twice",
    "no causal mask",
    "padding in the loss",
    "head replaced after the optimizer",
    "positions forgotten",
    "left in eval mode",
)
_LENGTH, _N_IDS, _WIDTH = 24, 32, 48


@dataclass(frozen=True)
class MiswiredTraining:
    """A training that may be wired wrong.

    Attributes:
        model: Decoder of two blocks, from ids of shape (batch, token) to logits.
        optimizer: Its optimizer.
        loss: Function of model and batch that returns the loss, in nats.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Tensor], Tensor]

    def update(self, ids: Tensor) -> float:
        """Make one update on a batch, and return its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model, ids)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def texts(self, n: int, *, seed: int = 0) -> list[Tensor]:
        """Return batches in which an id is often followed by the next one; shorter texts end with padding, 0.

        Args:
            n: Number of batches.
            seed: Seed of the texts.

        Returns:
            Ids of shape (16, 24) each.
        """
        generator = torch.Generator().manual_seed(seed)
        steps = torch.where(torch.rand(n, 16, _LENGTH, generator=generator) < 0.7, 1, 5)
        ids = (steps.cumsum(-1) + torch.randint(0, _N_IDS - 1, (n, 16, 1), generator=generator)) % (_N_IDS - 1) + 1
        ends = torch.randint(_LENGTH // 2, _LENGTH + 1, (n, 16, 1), generator=generator)
        return list(ids.where(torch.arange(_LENGTH) < ends, 0))


class Decoder(nn.Module):
    """A decoder of two blocks with learned positions, whose padding is id 0."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.embedding = nn.Embedding(_N_IDS, _WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(_LENGTH, _WIDTH) / 10)
        block = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _N_IDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (batch, token, id)."""
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.is_causal else None
        states = self.embedding(ids) + self.positions[:n]
        return self.head(self.blocks(states, mask=mask, is_causal=self.is_causal))


def miswired(fault: str = "") -> MiswiredTraining:
    """Create a small training with a fault in its wiring.

    Args:
        fault: One of `MISWIRED`; empty for the sound training.

    Returns:
        The training, with texts for it.

    Raises:
        OptionError: If there is no such fault.

    Example:
        >>> import workbench as wb
        >>> training = wb.course.miswired("no causal mask")
        >>> batches = training.texts(4)
        >>> report = wb.check(training.model, training.optimizer, batches, training.loss, progress=False)
        >>> [each.id for each in report.failed]
        ['causal']

    See Also:
        `workbench.check`: Finds the faults.
    """
    if fault and fault not in MISWIRED:
        raise OptionError.of("fault", fault, MISWIRED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(is_causal=fault != "no causal mask")
        held = [p for name, p in model.named_parameters() if fault != "positions forgotten" or name != "positions"]
        optimizer = torch.optim.AdamW(held, lr=3e-3)
        if fault == "head replaced after the optimizer":
            model.head = nn.Linear(_WIDTH, _N_IDS)
    ahead = 2 if fault == "labels shifted twice" else 1
    ignored = -100 if fault == "padding in the loss" else 0

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-ahead]
        labels = ids[:, ahead:].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=ignored)

    return MiswiredTraining(model.train(fault != "left in eval mode"), optimizer, loss)
