"""Faults of data parallel training, emulated in one process: errors in the reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.callbacks.faults.fault import Fault, require_share
from workbench.callbacks.faults.flash_attention_mode import cut_low_bits
from workbench.errors import OptionError
from workbench.tasks.task import require_whole

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Gradients of one rank, one for each parameter; None where a parameter got none.
Gradients = list[Tensor | None]


@dataclass(kw_only=True, eq=False)
class DroppedBucket(Fault):
    """Buckets of gradients get lost: in each step each bucket is drawn with probability ``share``, and counts as zero.

    Attributes:
        share: Share of the buckets, on average; above 0, at most 1.
        n_buckets: Number of parts of the parameters, ordered from last to first as in PyTorch's DDP, of about one
            size.
        lost_from: ``"all_ranks"``: the bucket's whole gradient is zero. ``"one_rank"``: the part of one rank, drawn
            too, is missing in the mean; then the batch is actually split over the ranks, which takes ``n_ranks``
            backward passes, each over its share of the examples.
        n_ranks: Number of processes, for ``"one_rank"``.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.DroppedBucket(share=0.5, start=1)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault])
        >>> [record.active_faults for record in run]
        [(), ('dropped_bucket',)]
    """

    kind: ClassVar[str] = "dropped_bucket"
    meaning: ClassVar[str] = "buckets of gradients get lost on their way between processes"
    share: float = 0.25
    n_buckets: int = 4
    lost_from: str = "all_ranks"
    n_ranks: int = 4

    def __post_init__(self) -> None:
        require_share(self.share)
        require_whole(1, n_buckets=self.n_buckets)
        require_whole(2, n_ranks=self.n_ranks)
        if self.lost_from not in ("all_ranks", "one_rank"):
            raise OptionError(f"lost_from is '{self.lost_from}', expected 'all_ranks' or 'one_rank'.")
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        what = "lost" if self.lost_from == "all_ranks" else f"lost from one of {self.n_ranks} processes"
        return f"each of {self.n_buckets} buckets of gradients is {what} with probability {self.share:g}"

    @property
    def needs_ranks(self) -> bool:
        """Whether the batch has to be split."""
        return self.lost_from == "one_rank"

    def drop(self, ranks: Sequence[Gradients], buckets: Sequence[Sequence[int]], generator: torch.Generator) -> None:
        """Set to zero, in place, the gradients that are lost in this step."""
        is_lost = torch.rand(len(buckets), generator=generator) < self.share
        loser = torch.randint(self.n_ranks, (len(buckets),), generator=generator)
        for b, bucket in enumerate(buckets):
            if is_lost[b]:
                losers = [ranks[int(loser[b])]] if self.needs_ranks else ranks
                for gradients in losers:
                    for i in bucket:
                        gradient = gradients[i]
                        gradients[i] = None if gradient is None else torch.zeros_like(gradient)


@dataclass(kw_only=True, eq=False)
class LowPrecisionReduction(Fault):
    """Gradients of several processes are added up in low precision, around a ring.

    The batch is actually split over ``n_ranks``: as many backward passes, each over its share of the examples, and
    memory for as many gradients. As in a ring all-reduce, the gradients are cut into ``n_ranks`` chunks; chunk c starts
    as the part of rank c and is rounded after adding that of each further rank. The mean is then taken in float32.
    Every rank counts alike, as in PyTorch's DDP, also where its examples have fewer targets.

    Attributes:
        n_ranks: Number of processes, at least 2.
        dtype: Type of the sums: ``"bfloat16"``, ``"float16"``, or ``"float32"`` as the control.
        n_bits: Number of further bits that are cut off, 0 to 8, for bfloat16; see `workbench.faults.cut_low_bits`.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> fault = wb.faults.LowPrecisionReduction(dtype="bfloat16", n_bits=4)
        >>> fault.sent(torch.tensor([1.2345])).item()
        1.125
    """

    kind: ClassVar[str] = "low_precision_reduction"
    meaning: ClassVar[str] = "gradients of several processes are added up in low precision"
    n_ranks: int = 4
    dtype: str = "bfloat16"
    n_bits: int = 0

    def __post_init__(self) -> None:
        require_whole(2, n_ranks=self.n_ranks)
        require_whole(0, n_bits=self.n_bits)
        if self.dtype not in _DTYPES:
            raise OptionError(f"dtype is '{self.dtype}', expected one of {', '.join(_DTYPES)}.")
        if self.n_bits > 8:
            raise OptionError(f"n_bits is {self.n_bits}, expected 0 to 8: seven bits of mantissa, one of exponent.")
        if self.n_bits and self.dtype != "bfloat16":
            raise OptionError(f"n_bits cuts bits of bfloat16, but dtype is '{self.dtype}'; leave one of them out.")
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        cut = f" less {self.n_bits} {'bit' if self.n_bits == 1 else 'bits'}" if self.n_bits else ""
        return f"gradients of {self.n_ranks} processes are added up in {self.dtype}{cut}"

    def sent(self, gradient: Tensor) -> Tensor:
        """A gradient, or a sum of gradients, as it is received, in its dtype."""
        return cut_low_bits(gradient, self.n_bits).to(_DTYPES[self.dtype]).to(gradient.dtype)


def ring_sum(ranks: Sequence[Tensor], fault: LowPrecisionReduction) -> Tensor:
    """The sum over ranks as a ring makes it.

    Args:
        ranks: Flat gradient of each rank, all of the same length.
        fault: Fault that defines the rounding.
    """
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
    """The optimizer gets gradients of earlier steps.

    The gradients of the last ``delay`` steps are kept while it is on, and go into checkpoints. Until there are that
    many, the oldest is used: the first step is not late, the next one by one step, and so on.

    Attributes:
        delay: Delay in steps.
        share: Share of the buckets that are late, drawn in each step; above 0, at most 1.
        n_buckets: Number of buckets, as in `DroppedBucket`.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.StaleReduction(delay=2, start=50)
        >>> fault.effect
        'all gradients are those of 2 steps before'
    """

    kind: ClassVar[str] = "stale_reduction"
    meaning: ClassVar[str] = "the optimizer gets gradients of earlier steps"
    delay: int = 1
    share: float = 1.0
    n_buckets: int = 4

    def __post_init__(self) -> None:
        require_whole(1, delay=self.delay, n_buckets=self.n_buckets)
        require_share(self.share)
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        which = "all gradients" if self.share == 1 else f"{100 * self.share:g} % of the buckets of gradients"
        return f"{which} are those of {self.delay} {'step' if self.delay == 1 else 'steps'} before"

    def late(
        self, kept: Sequence[Gradients], buckets: Sequence[Sequence[int]], generator: torch.Generator
    ) -> Gradients:
        """The newest gradients of each bucket in ``kept``, or the oldest if the bucket is late."""
        is_late = torch.rand(len(buckets), generator=generator) < self.share
        gradients = list(kept[-1])
        for b, bucket in enumerate(buckets):
            if is_late[b]:
                for i in bucket:
                    gradients[i] = kept[0][i]
        return gradients


def in_buckets(sizes: Sequence[int], n_buckets: int) -> list[list[int]]:
    """Parameters in buckets of about one size, the last parameter first.

    Args:
        sizes: Number of elements of each parameter.
        n_buckets: Number of buckets; at most as many as there are parameters.

    Returns:
        Numbers of the parameters in each bucket; none is empty.
    """
    buckets: list[list[int]] = [[]]
    n_left, n_taken = sum(sizes), 0
    for n_unplaced, i in zip(range(len(sizes), 0, -1), reversed(range(len(sizes))), strict=True):
        n_to_come = n_buckets - len(buckets)
        is_full = n_taken >= n_left / (n_to_come + 1) if buckets[-1] else False
        if buckets[-1] and n_to_come and (is_full or n_unplaced <= n_to_come):
            n_left, n_taken = n_left - n_taken, 0
            buckets.append([])
        buckets[-1].append(i)
        n_taken += sizes[i]
    return buckets
