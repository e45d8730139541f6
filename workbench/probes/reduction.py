"""An all-reduce of numbers whose exact sum is known: whether the ranks' contributions arrive, whole and exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, distributed

from workbench.errors import OptionError
from workbench.formatting import capitalized, counted, listed, number_in_words
from workbench.models.process_group import is_shared, message_device

#: Numbers of each of the two parts of the message.
_N_NUMBERS = 1024
#: Largest relative error that is called rounding: what two significant bits and a cut towards zero make is 1/2.
_LARGEST_ROUNDING = 0.5


@dataclass(frozen=True)
class KnownAnswer:
    """What an all-reduce made of numbers whose exact sum is known.

    Attributes:
        dtype: Number format that was reduced, such as "float32".
        weights: How often each rank's contribution is in the sum that a rank received, shape (receiver, rank), unit 1;
            1 is right, 0 is missing, NaN not finite. Empty where one process trains alone.
        errors: Largest relative error of a number that only one rank contributes to, shape (receiver, rank), unit 1;
            infinite where it is not finite.
        sums_are_exact: Whether the numbers that all ranks contribute to are right, shape (receiver,).

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> weights, errors = np.array([[1.0, 0.0]] * 2), np.array([[0.0, 1.0]] * 2)
        >>> wb.probes.KnownAnswer("float32", weights, errors, np.ones(2, dtype=bool)).sentence
        'The contribution of rank 1 is missing in the sum over 2 ranks.'
    """

    dtype: str
    weights: np.ndarray
    errors: np.ndarray
    sums_are_exact: np.ndarray

    @property
    def n_ranks(self) -> int:
        """Number of ranks; 0 where there was nothing to reduce."""
        return len(self.weights)

    @property
    def is_exact(self) -> bool | None:
        """Whether every rank received the exact sum; None if there was nothing to reduce."""
        return bool((self.errors == 0).all() and self.sums_are_exact.all()) if self.n_ranks else None

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of whose contribution some rank received nothing."""
        return _numbers((self.weights == 0).any(0))

    @property
    def wrong(self) -> tuple[int, ...]:
        """Ranks whose contribution some rank received with errors, missing ones included."""
        return _numbers((self.errors > 0).any(0))

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that did not receive the exact sum."""
        return _numbers((self.errors > 0).any(1) | ~self.sums_are_exact)

    @property
    def n_bits(self) -> float:
        """About how many significant bits arrive; NaN if contributions are exact, or wrong in another way."""
        largest = self.errors.max(initial=0.0)
        # A cut towards zero makes half of the largest error in the mean, a wrong factor the largest everywhere.
        is_rounding = largest <= _LARGEST_ROUNDING and bool((abs(self.weights - 1) <= 0.75 * self.errors).all())
        return -math.log2(largest) if largest > 0 and is_rounding else math.nan

    @property
    def sentence(self) -> str:
        """The result as a person reads it."""
        if not self.n_ranks:
            return "One process trains alone: there is nothing to reduce."
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
                f"The contribution of {_ranks(self.wrong)} arrives wrong{where}: it counts {listed(weights)} times "
                "instead of once."
            )
        return f"The sum over {self.n_ranks} ranks in {self.dtype} is wrong{where}; no single rank explains it."


def known_answer_all_reduce(like: Tensor) -> KnownAnswer:
    """Add up numbers over all ranks whose exact sum is known, and say whose contribution did not arrive.

    The first part of the message has numbers to which one rank alone contributes, every n-th number the same rank: odd
    integers that take all significant bits of the format, so that a missing, wrong or rounded contribution is named.
    To each number of the second part all ranks contribute small integers. Every partial sum is an integer that the
    format holds, so the sum is exact in whatever order it is made: the error bound is 0.

    It measures the sum of the default group as it is now, not what a communication hook of DDP does besides. Every rank
    calls it. Cost: one all-reduce of 2,048 numbers (up to 512 ranks), and one small all-gather.

    Args:
        like: Tensor of the number format, on the device, that gradients have.

    Returns:
        The result, the same on every rank; without contributions where one process trains alone.

    Raises:
        OptionError: If the format is no floating-point format that PyTorch computes with.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.probes.known_answer_all_reduce(torch.zeros(1)).sentence
        'One process trains alone: there is nothing to reduce.'
    """
    name = str(like.dtype).removeprefix("torch.")
    if like.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise OptionError(f"like has dtype {name}, expected the floating-point format of gradients, such as float32.")
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
    """The numbers that a rank contributes.

    Args:
        rank: The rank.
        n_ranks: Number of ranks.
        dtype: Floating-point format.

    Returns:
        Shape (number,), on the host.
    """
    n_bits = round(1 - math.log2(torch.finfo(dtype).eps))
    place = torch.arange(max(_N_NUMBERS, 2 * n_ranks))
    spread = place * 2654435761 % 2 ** (n_bits - 2)  # Knuth's multiplicative hash: all bits of the numbers vary
    alone = (2 ** (n_bits - 1) + 1 + 2 * spread) * (1 - place // n_ranks % 2 * 2)
    n_values = 2**n_bits // n_ranks  # so many different integers, and no partial sum needs more bits
    shared = (spread + 3 * rank) % n_values - n_values // 2 if n_values > 1 else torch.zeros_like(place)
    return torch.cat([torch.where(place % n_ranks == rank, alone, 0), shared]).to(dtype)


def received(message: Tensor, n_ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare a sum of contributions with what it should be.

    Args:
        message: The sum that a rank received, shape (number,).
        n_ranks: Number of ranks.

    Returns:
        For each rank, shape (rank,): the weight of its contribution, its largest relative error (infinite where it is
        not finite), and the number of wrong numbers to which all contribute, the same for all.
    """
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
