"""Check of an all-reduce with numbers whose exact sum is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, distributed

from workbench.errors import OptionError
from workbench.formatting import capitalized, counted, listed, number_in_words
from workbench.models.calling import is_shared, message_device

#: Number formats in which gradients are reduced.
_FORMATS = ("float16", "bfloat16", "float32", "float64")
#: Length of each of the two parts of the message.
_N_NUMBERS = 1024
#: Largest relative error that counts as rounding: truncation to two significant bits has errors up to 1/2.
_LARGEST_ROUNDING = 0.5


@dataclass(frozen=True)
class KnownAnswer:
    """Result of an all-reduce of numbers whose exact sum is known.

    Weights, (receiver, rank), are 1 if correct, 0 if missing, NaN if not finite, and empty in one process; ``errors``
    are the largest relative ones of numbers from one rank alone, ``sums_are_exact`` those of all ranks together.
    """

    dtype: str
    weights: np.ndarray
    errors: np.ndarray
    sums_are_exact: np.ndarray

    @property
    def n_ranks(self) -> int:
        """Number of ranks; 0 if there was nothing to reduce."""
        return len(self.weights)

    @property
    def is_exact(self) -> bool | None:
        """Whether every rank received the exact sum; None if there was nothing to reduce."""
        return bool((self.errors == 0).all() and self.sums_are_exact.all()) if self.n_ranks else None

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose contribution is missing on some rank."""
        return _numbers((self.weights == 0).any(0))

    @property
    def wrong(self) -> tuple[int, ...]:
        """Ranks whose contribution has errors on some rank, including missing ones."""
        return _numbers((self.errors > 0).any(0))

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that did not receive the exact sum."""
        return _numbers((self.errors > 0).any(1) | ~self.sums_are_exact)

    @property
    def n_bits(self) -> float:
        """Approximate number of significant bits received; NaN if contributions are exact or wrong in another way."""
        largest = self.errors.max(initial=0.0)
        # Truncation has a mean error of half the largest one; a wrong factor has the largest error everywhere.
        is_rounding = largest <= _LARGEST_ROUNDING and bool((abs(self.weights - 1) <= 0.75 * self.errors).all())
        return -math.log2(largest) if largest > 0 and is_rounding else math.nan

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        if not self.n_ranks:
            return "There is only one process, so there is nothing to reduce."
        if self.is_exact:
            return f"The sum over {self.n_ranks} ranks in {self.dtype} is exact on every rank."
        where = "" if len(self.receivers) == self.n_ranks else f" on {_ranks(self.receivers)}"
        if self.missing:
            return f"The contribution of {_ranks(self.missing)} is missing in the sum over {self.n_ranks} ranks{where}."
        if not math.isnan(self.n_bits):
            whose = "" if len(self.wrong) == self.n_ranks else f"the contribution of {_ranks(self.wrong)} to "
            return capitalized(
                f"{whose}the sum over {self.n_ranks} ranks in {self.dtype} is rounded to about "
                f"{counted(round(self.n_bits), 'significant bit')}{where}."
            )
        if self.wrong and len(self.wrong) < self.n_ranks:
            weights = [number_in_words(float(self.weights[self.receivers[0], rank])) for rank in self.wrong]
            return (
                f"The contribution of {_ranks(self.wrong)} is wrong{where}: its weight is {listed(weights)} instead "
                "of 1."
            )
        return f"The sum over {self.n_ranks} ranks in {self.dtype} is wrong{where}; no single rank explains it."


def known_answer_all_reduce(like: Tensor) -> KnownAnswer:
    """Sum numbers whose exact sum is known over all ranks, and report contributions that are missing or wrong.

    To each number of the first part of the message only one rank contributes, in turn: odd integers that use all
    significant bits of the format, so that a missing, wrong or rounded contribution can be attributed to its rank. To
    each number of the second part all ranks contribute small integers. Every partial sum is an integer that the format
    represents exactly, so the sum is exact in any order of summation: the error bound is 0.

    It tests the current sum of the default group, without communication hooks of DDP, in the number format and on the
    device of ``like``. Every rank must call it, and gets the same result; it is empty in a single process. Cost: one
    all-reduce of 2,048 numbers (up to 512 ranks), and one small all-gather. OptionError is raised for formats other
    than float16, bfloat16, float32 and float64.
    """
    name = str(like.dtype).removeprefix("torch.")
    if name not in _FORMATS:
        raise OptionError.of("like.dtype", name, _FORMATS)
    if not is_shared():
        return KnownAnswer(name, np.zeros((0, 0)), np.zeros((0, 0)), np.zeros(0, bool))
    n_ranks = distributed.get_world_size()
    message = contribution(distributed.get_rank(), n_ranks, like.dtype).to(like.device)
    distributed.all_reduce(message)
    found = torch.from_numpy(np.stack(received(message, n_ranks))).to(message_device())
    gathered = [torch.empty_like(found) for _ in range(n_ranks)]
    distributed.all_gather(gathered, found)
    weights, errors, sums = torch.stack(gathered).cpu().numpy().transpose(1, 0, 2)
    return KnownAnswer(name, weights, errors, sums[:, 0] == 0)


def contribution(rank: int, n_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a rank contributes, shape (number,), on the host."""
    n_bits = round(1 - math.log2(torch.finfo(dtype).eps))
    place = torch.arange(max(_N_NUMBERS, 2 * n_ranks))
    spread = place * 2654435761 % 2 ** (n_bits - 2)  # Knuth's multiplicative hash: all bits of the numbers vary
    alone = (2 ** (n_bits - 1) + 1 + 2 * spread) * (1 - place // n_ranks % 2 * 2)
    n_values = 2**n_bits // n_ranks  # with this many different integers no partial sum needs more bits
    shared = (spread + 3 * rank) % n_values - n_values // 2 if n_values > 1 else torch.zeros_like(place)
    return torch.cat([torch.where(place % n_ranks == rank, alone, 0), shared]).to(dtype)


def received(message: Tensor, n_ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare received sums with the exact ones; return weight, largest error and number of wrong sums per rank."""
    sent = torch.stack([contribution(rank, n_ranks, message.dtype) for rank in range(n_ranks)]).double().numpy()
    found = message.detach().cpu().double().numpy()
    n_alone = sent.shape[1] // 2
    weights, errors = np.empty(n_ranks), np.empty(n_ranks)
    with np.errstate(invalid="ignore", over="ignore"):
        for rank in range(n_ranks):
            own = slice(rank, n_alone, n_ranks)
            weights[rank] = found[own] @ sent[rank, own] / (sent[rank, own] @ sent[rank, own])
            errors[rank] = (np.abs(found[own] - sent[rank, own]) / np.abs(sent[rank, own])).max()
    is_wrong = found[n_alone:] != sent[:, n_alone:].sum(0)
    return weights, np.where(np.isfinite(errors), errors, np.inf), np.full(n_ranks, is_wrong.sum(), float)


def _numbers(is_one: ArrayLike) -> tuple[int, ...]:
    return tuple(np.flatnonzero(is_one).tolist())


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(map(str, ranks))}"
