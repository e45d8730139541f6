"""A small language model and loops that train it, sound or with one fault."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.contracts.check import check
from workbench.contracts.lab import CONTRACTS, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import CheckReport, Result, Status

N_IDS, LENGTH = 24, 12


class Block(nn.Module):
    def __init__(self, mask: Callable[[int], Tensor], *, over_batch: bool) -> None:
        super().__init__()
        self.mask, self.over_batch = mask, over_batch
        self.to_qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        mask = self.mask(x.shape[1])
        if keep is not None:
            mask = mask & keep[:, None, :]
        scores = (q @ k.mT / 4).masked_fill(~mask, -1e9)
        x = x + self.out(scores.softmax(-1) @ v)
        return x - x.mean(0, keepdim=True) if self.over_batch else x


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


class Model(nn.Module):
    """A decoder of two blocks; options break one contract each."""

    def __init__(
        self,
        *,
        mask: Callable[[int], Tensor] = causal,
        has_positions: bool = True,
        over_batch: bool = False,
        n_classes: int = N_IDS,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_IDS, 16)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, 16)) if has_positions else None
        self.blocks = nn.ModuleList(Block(mask, over_batch=over_batch) for _ in range(2))
        self.head = nn.Linear(16, n_classes)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, None if attention_mask is None else attention_mask.bool())
        return self.head(x)


def tokens(n: int = 4, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, N_IDS, (6, LENGTH), generator=generator) for _ in range(n)]


def next_token(logits: Tensor, ids: Tensor, *, ahead: int = 1, **options: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-ahead].flatten(0, 1), ids[:, ahead:].flatten(), **options)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def lm_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return next_token(model(ids), ids)


def checked(model: nn.Module | None = None, loss: Any = lm_loss, batches: Any = None, **options: Any) -> CheckReport:
    torch.manual_seed(0)
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return check(model, optimizer, tokens() if batches is None else batches, loss, progress=False, **options)


def results_of(
    module: ModuleType, loop: Callable[[], None], n_updates: int, *, sees_all: bool = True
) -> dict[str, Result]:
    """Return what the contracts of a module find in the updates of a loop."""
    found: list[Result] = []

    def ready(seen: Observer) -> None:
        mine = {id: experiment for id, experiment in CONTRACTS.items() if experiment.__module__ == module.__name__}
        with mock.patch("workbench.contracts.lab.CONTRACTS", mine):
            found.extend(all_results(seen, (), show_progress(False)))

    with Observer(n_updates, ready) as seen:
        seen.sees_all = sees_all
        loop()
        seen.finish()
    return {each.id: each for each in found}


def fails(result: Result, *words: str) -> bool:
    """Whether a contract is broken, with these words in evidence, place or remedy."""
    said = "; ".join((result.evidence, result.where, result.remedy))
    assert result.status is Status.FAILED, result
    assert all(each in said for each in words), said
    return True
