"""Exchange of values between the recorders of several processes that train one model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from workbench.callbacks.recorder.options import NUMBERS
from workbench.errors import OptionError, SnapshotError
from workbench.formatting import listed
from workbench.io.run_output import issue_warning
from workbench.models.calling import is_shared, message_device
from workbench.probes.precision import broken_arithmetic

#: A setting that has changed: its name, the ratio of the new to the previous value, and a sentence.
Change = tuple[str, float, str]
#: Values of the variables of each part that was measured.
Measured = dict[str, dict[str, np.ndarray]]

T = TypeVar("T")
#: Seconds after which a rank says that it waits for others, and after which it gives up.
PATIENCE, LIMIT = 10.0, 120.0

#: Metrics of an update that are summed over the ranks that have them; all others that are shared are averaged.
SUMS = ("batch_size", "n_tokens", "n_changes", "n_unmade")
MEANS = tuple(name for name in NUMBERS if name not in (*SUMS, "repeated_batch", "spike_score"))


def is_first() -> bool:
    """Return whether this process writes the record."""
    return not is_shared() or distributed.get_rank() == 0


def meet(call: str) -> None:
    """Wait until every rank has made a call; no message of the training is sent meanwhile."""
    if not is_shared():
        return
    store, n_ranks, rank = (
        distributed.distributed_c10d._get_default_store(),
        distributed.get_world_size(),
        distributed.get_rank(),
    )
    number = store.add(f"workbench/calls of {rank}", 1)
    here, begin, is_told = f"workbench/call {number}", time.monotonic(), False
    n_here = store.add(here, 1)
    while n_here < n_ranks:
        time.sleep(0.05)
        n_here, waited = store.add(here, 0), time.monotonic() - begin
        if n_here == n_ranks or waited < (LIMIT if is_told else PATIENCE):
            continue
        missing = [other for other in range(n_ranks) if store.add(f"workbench/calls of {other}", 0) < number]
        sentence = (
            f"{call} was called on rank {rank} but not on {_in_words(missing)} within {waited:.0f} seconds; call it on "
            "every rank, outside of conditions such as `if rank == 0`: only rank 0 writes the store."
        )
        if is_told and missing:
            store.add(here, -1)
            store.add(f"workbench/calls of {rank}", -1)
            raise OptionError(sentence)
        if missing:
            issue_warning(f"{sentence} It waits for {LIMIT:.0f} seconds.")
        is_told = True


class PeerError(SnapshotError):
    """A failure of another rank, which reports it."""


def failures(own: str) -> dict[int, str]:
    """Return why something failed, by rank, given the reason of this rank or ""; a collective operation."""
    if not is_shared():
        return {0: own} if own else {}
    if on_every_rank(not own):
        return {}
    return {rank: reason for rank, reason in enumerate(of_each_rank(own)) if reason}


def jointly(action: Callable[[], T]) -> T:
    """Run an action without collective operations on every rank, and raise on every rank if it fails on one."""
    value, problem = None, None
    try:
        value = action()
    except Exception as error:
        if not is_shared():
            raise
        problem = error
    failed = failures("" if problem is None else str(problem) or type(problem).__name__)
    if problem is not None:
        raise problem
    if failed:
        raise PeerError(on_ranks(failed))
    return value  # type: ignore[return-value]


def on_ranks(failed: Mapping[int, str]) -> str:
    """Return the reasons of a failure with the ranks where it occurred, unless that is the only rank."""
    reason = next(iter(failed.values()))
    return f"on {_in_words([*failed])}: {reason}" if is_shared() else reason


def of_all_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Combine the metrics of an update over all ranks, in one message whose length does not depend on the metrics.

    The metrics in `MEANS` and `SUMS` are averaged or summed; others keep their value on each rank.
    """
    if not is_shared():
        return dict(numbers)
    names = MEANS + SUMS
    own = [float(numbers.get(name, math.nan)) for name in names]
    is_known = [name in numbers and not math.isnan(value) for name, value in zip(names, own, strict=True)]
    # A loss that is NaN on one rank is NaN for all.
    is_broken = [
        name in numbers and name != "lookahead" and math.isnan(value) for name, value in zip(names, own, strict=True)
    ]
    sums = summed_over_ranks(np.array([np.where(is_known, own, 0.0), is_known, is_broken], dtype=np.float64))
    found = dict(numbers)
    for name, total, count, n_broken in zip(names, *sums, strict=True):
        if n_broken:
            found[name] = math.nan
        elif count:
            found[name] = float(total / count if name in MEANS else total)
    return found


def summed_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return values summed over all ranks, in float64."""
    if not is_shared():
        return values
    device = message_device()
    message = torch.as_tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(message)
    return message.cpu().numpy()


def of_first_rank(value: Any) -> Any:
    """Return the value of rank 0 on every rank; tensors are on the host."""
    if not is_shared():
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0, device=message_device())
    return box[0]


def on_every_rank(is_so: bool) -> bool:
    """Return whether a condition holds on every rank; a collective operation."""
    return bool(summed_over_ranks(np.array([not is_so], dtype=np.float64))[0] == 0)


def measured_by_all(measured: Measured) -> Measured:
    """Return measurements of one step that are the same on every rank, so that all raise the same alarms.

    They are those of rank 0, since all ranks have the same parameters and examples. Only the arithmetic is that of the
    first rank where it is broken, if it is sound on others.
    """
    if not is_shared():
        return measured
    ranks = of_each_rank(measured)
    found = dict(ranks[0])
    known = [rank for rank, values in enumerate(ranks) if "precision" in values]
    broken = [rank for rank in known if broken_arithmetic(ranks[rank]["precision"]) is not None]
    if broken and len(broken) < len(known):
        found["precision"] = ranks[broken[0]]["precision"] | {"broken_rank": np.array(float(broken[0]))}
    return found


def changed_on_any(own: list[Change]) -> list[Change]:
    """Return the settings that have changed on any rank, given those of this rank; a collective operation."""
    if not is_shared():
        return own
    ranks = of_each_rank(own)
    found: dict[str, tuple[Change, list[int]]] = {}
    for rank, changes in enumerate(ranks):
        for change in changes:
            found.setdefault(change[0], (change, []))[1].append(rank)
    changed = []
    for name, ((_, factor, sentence), where) in found.items():
        if len(where) < len(ranks):
            sentence = f"On {_in_words(where)} {sentence[0].lower()}{sentence[1:]}"
        changed.append((name, factor, sentence))
    return changed


def _in_words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def of_each_rank(value: Any) -> list[Any]:
    """Return the values of all ranks; a collective operation."""
    if not is_shared():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
