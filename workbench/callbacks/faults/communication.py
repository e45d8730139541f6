"""Faults of data-parallel training: errors in the reduction of gradients, emulated in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from workbench.callbacks.faults.fault import Fault
from workbench.callbacks.faults.flash_attention_mode import Bits, cut_low_bits
from workbench.errors import OptionError
from workbench.option_kinds import Fraction, PositiveInt, at_least, one_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Gradients of one rank, one per parameter; None for a parameter without gradient.
Gradients = list[Tensor | None]


@dataclass(kw_only=True, eq=False)
class DroppedBucket(Fault):
    """Fault: in each step, random buckets of gradients are lost and count as zero.

    Attributes:
        share: Probability that a bucket is lost in a step; above 0, at most 1.
        n_buckets: Number of buckets. The parameters are assigned to buckets of similar size, from last to first as in
            PyTorch's DDP.
        lost_from: ``"all_ranks"``: the entire gradient of the bucket is zero. ``"one_rank"``: the contribution of one
            random rank is missing from the mean. The batch is then actually split over the ranks, with ``n_ranks``
            backward passes over a part of the examples each.
        n_ranks: Number of processes, for ``lost_from="one_rank"``.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.DroppedBucket(share=0.5, start=1)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault])
        >>> [record.active_faults for record in run]
        [(), ('dropped_bucket',)]

    See Also:
        `workbench.faults.StaleReduction`: Delays buckets instead of losing them.
    """

    kind: ClassVar[str] = "dropped_bucket"
    meaning: ClassVar[str] = "buckets of gradients are lost between processes"
    share: Fraction = 0.25
    n_buckets: PositiveInt = 4
    lost_from: Annotated[str, one_of(("all_ranks", "one_rank"))] = "all_ranks"
    n_ranks: Annotated[int, at_least(2)] = 4

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        what = "lost" if self.lost_from == "all_ranks" else f"lost from one of {self.n_ranks} processes"
        return f"each of {self.n_buckets} buckets of gradients is {what} with probability {self.share:g}"

    @property
    def needs_ranks(self) -> bool:
        """Whether the batch has to be split over ranks."""
        return self.lost_from == "one_rank"

    def drop(self, ranks: Sequence[Gradients], buckets: Sequence[Sequence[int]], generator: torch.Generator) -> None:
        """Draw the buckets that are lost in a step and set their gradients to zero, in place."""
        is_lost = torch.rand(len(buckets), generator=generator) < self.share
        rank_of_bucket = torch.randint(self.n_ranks, (len(buckets),), generator=generator)
        for b, bucket in enumerate(buckets):
            if is_lost[b]:
                affected = [ranks[int(rank_of_bucket[b])]] if self.needs_ranks else ranks
                for gradients in affected:
                    if lost := [gradient for i in bucket if (gradient := gradients[i]) is not None]:
                        torch._foreach_zero_(lost)


@dataclass(kw_only=True, eq=False)
class LowPrecisionReduction(Fault):
    """Fault: the gradients of several processes are summed in low precision, in a ring.

    The batch is actually split over ``n_ranks`` ranks, with one backward pass and the memory of one set of gradients
    each. As in a ring all-reduce, the gradients are divided into ``n_ranks`` chunks. Chunk c starts with the values of
    rank c, and is rounded after the addition of each further rank. The mean is then taken in float32. All ranks have
    equal weight, as in PyTorch's DDP, even if their examples have different numbers of targets.

    Attributes:
        n_ranks: Number of processes, at least 2.
        dtype: Number format of the sums: ``"bfloat16"``, ``"float16"``, or ``"float32"`` for a control run.
        n_bits: Number of additional low bits to set to zero, 0 to 8, for bfloat16; see `workbench.faults.cut_low_bits`.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> fault = wb.faults.LowPrecisionReduction(dtype="bfloat16", n_bits=4)
        >>> fault.sent(torch.tensor([1.2345])).item()
        1.125

    See Also:
        `workbench.faults.cut_low_bits`: Sets low bits to zero.
    """

    kind: ClassVar[str] = "low_precision_reduction"
    meaning: ClassVar[str] = "gradients of several processes are summed in low precision"
    n_ranks: Annotated[int, at_least(2)] = 4
    dtype: Annotated[str, one_of(_DTYPES)] = "bfloat16"
    n_bits: Bits = 0

    def __post_init__(self) -> None:
        if self.n_bits and self.dtype != "bfloat16":
            raise OptionError.of(
                "dtype", self.dtype, "'bfloat16' if n_bits is above 0", remedy="leave out dtype, or set n_bits=0"
            )
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        cut = f" less {self.n_bits} {'bit' if self.n_bits == 1 else 'bits'}" if self.n_bits else ""
        return f"gradients of {self.n_ranks} processes are summed in {self.dtype}{cut}"

    def sent(self, gradient: Tensor) -> Tensor:
        """Return a gradient, or a sum of gradients, after rounding to the format of the messages, in its own dtype."""
        return cut_low_bits(gradient, self.n_bits).to(_DTYPES[self.dtype]).to(gradient.dtype)


def ring_sum(ranks: Sequence[Tensor], fault: LowPrecisionReduction) -> Tensor:
    """Return the sum over ranks as computed in a ring."""
    chunks = [rank.tensor_split(len(ranks)) for rank in ranks]
    sums = []
    for c in range(len(ranks)):
        total = fault.sent(chunks[c][c])
        for hop in range(1, len(ranks)):
            total = fault.sent(total + fault.sent(chunks[(c + hop) % len(ranks)][c]))
        sums.append(total)
    return torch.cat(sums)


@dataclass(kw_only=True, eq=False)
class StaleReduction(Fault):
    """Fault: the optimizer receives gradients of earlier steps.

    While the fault is on, the gradients of the last ``delay`` steps are kept, and stored in checkpoints. Until there
    are that many, the oldest ones are used: the first step has no delay, the second a delay of one step, and so on.

    Attributes:
        delay: Delay in steps.
        share: Probability that a bucket is delayed in a step; above 0, at most 1.
        n_buckets: Number of buckets, as in `DroppedBucket`.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.StaleReduction(delay=2, start=50)
        >>> fault.effect
        'all gradients are those of 2 steps earlier'

    See Also:
        `workbench.faults.DroppedBucket`: Loses buckets instead of delaying them.
        `workbench.probes.compare_gradients`: Detects gradients that are not those of the step.
    """

    kind: ClassVar[str] = "stale_reduction"
    meaning: ClassVar[str] = "the optimizer receives gradients of earlier steps"
    delay: PositiveInt = 1
    share: Fraction = 1.0
    n_buckets: PositiveInt = 4

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        which = "all gradients" if self.share == 1 else f"{100 * self.share:g} % of the buckets of gradients"
        return f"{which} are those of {self.delay} {'step' if self.delay == 1 else 'steps'} earlier"

    def late(
        self, kept: Sequence[Gradients], buckets: Sequence[Sequence[int]], generator: torch.Generator
    ) -> Gradients:
        """Return the gradients that the optimizer receives: the newest ones, or the oldest ones for delayed buckets."""
        is_late = torch.rand(len(buckets), generator=generator) < self.share
        gradients = list(kept[-1])
        for b, bucket in enumerate(buckets):
            if is_late[b]:
                for i in bucket:
                    gradients[i] = kept[0][i]
        return gradients


def in_buckets(sizes: Sequence[int], n_buckets: int) -> list[list[int]]:
    """Assign parameters, given by their sizes, to buckets of similar size, from the last parameter to the first."""
    buckets: list[list[int]] = [[]]
    n_left, n_taken = sum(sizes), 0
    for n_unassigned, i in zip(range(len(sizes), 0, -1), reversed(range(len(sizes))), strict=True):
        n_to_come = n_buckets - len(buckets)
        is_full = n_taken >= n_left / (n_to_come + 1) if buckets[-1] else False
        if buckets[-1] and n_to_come and (is_full or n_unassigned <= n_to_come):
            n_left, n_taken = n_left - n_taken, 0
            buckets.append([])
        buckets[-1].append(i)
        n_taken += sizes[i]
    return buckets
