"""Options of a recorder, the metrics that a loop logs, and their exchange between processes that train one model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn

from workbench.errors import OptionError, SnapshotError, require_listed
from workbench.formatting import listed
from workbench.io.run_output import issue_warning
from workbench.models.calling import is_shared, message_device
from workbench.models.readable_weights import read_numbers
from workbench.probes.precision import broken_arithmetic

#: Default number of steps between two measurements of each part; None if it is not measured.
CADENCE: dict[str, int | None] = {
    "attention": 10,
    "router": 10,
    "optimizer": 10,
    "activations": 50,
    "precision": 20,
    "reduction": 5,
    "update": 50,
    "curvature": None,
    "spectra": None,
}
#: Smallest recommended number of updates in a window of queries and keys; with fewer, noise outweighs their sum.
_SHORTEST_WINDOW = 10


def checked_cadence(every: Mapping[str, int | None] | int | None) -> tuple[dict[str, int | None], frozenset[str]]:
    """Return the updates between two measurements of each part, and the parts for which the caller has fixed them."""
    if every is None:
        return dict.fromkeys(CADENCE), frozenset(CADENCE)
    if isinstance(every, Mapping):
        require_listed("every", every, CADENCE)
        given = dict(every)
    else:
        given = {name: every for name, default in CADENCE.items() if default is not None}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError.of(f"every['{name}']", value, "a whole number of steps, at least 1, or None")
    cadence = CADENCE | given
    if cadence["attention"] is not None and cadence["attention"] < _SHORTEST_WINDOW:
        issue_warning(
            f"Updates of queries and keys are compared over {cadence['attention']} steps, too few to detect their "
            "common direction: it grows with the number of updates, and noise only with its square root. Use "
            f"{_SHORTEST_WINDOW} steps or more."
        )
    return cadence, frozenset(given)


def plain(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return values as float64 arrays."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


@dataclass(frozen=True)
class RecorderOptions:
    """Options of a recorder that its measurements need; see `workbench.Recorder`."""

    every: Mapping[str, int | None]
    alpha: float
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
    planned: Mapping[str, Any] = field(default_factory=dict)
    n_probe_tokens: int = 512
    budget: float | None = None
    fixed: frozenset[str] = frozenset()


def in_pipeline(options: RecorderOptions) -> tuple[RecorderOptions, list[str]]:
    """Return the options of a stage of a pipeline, and the parts that are left out.

    No budget changes the cadence: stages exchange no messages, and have to measure at the same updates.
    """
    left_out = [part for part in _OF_WHOLE if options.every[part] is not None]
    return replace(options, every={**options.every, **dict.fromkeys(_OF_WHOLE)}, budget=None), left_out


@dataclass
class RecorderMemory:
    """What a recorder keeps from one attachment to the next."""

    step: int = 0
    probe: Any = None
    recent_examples: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)


#: Metrics of every update, in the order in which they are stored; NaN if unknown.
NUMBERS = (
    "loss", "auxiliary_loss", "accuracy", "grad_norm", "learning_rate", "batch_size", "n_tokens", "token_entropy",
    "label_entropy", "label_agreement", "largest_losses", "ignored_labels", "repeated_examples", "loss_weight",
    "is_training", "loss_scale", "is_skipped", "repeated_batch", "lookahead", "update_ratio", "spike_score",
    "examined",
)  # fmt: skip
#: Further ones of a stage of a pipeline: norms of its gradients, and of change and values of its sampled entries.
OF_STAGE = ("stage_grad_norm", "stage_change_norm", "stage_weight_norm")
#: Parts that need all stages at once, or gradients as a backward pass leaves them.
_OF_WHOLE = ("precision", "update", "curvature", "spectra", "reduction")


def as_number(name: str, value: Any) -> float | Tensor:
    """Return a metric as a number, or as a 0-dim tensor that may not be computed yet."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, np.ndarray) and value.size == 1:
        return float(value.item())
    if isinstance(value, Real):
        return float(value)
    raise OptionError.of(name, value, "one number", remedy="log its mean or another number")


def as_floats(numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return metrics as floats in their order; the host waits once for those that are still being computed."""
    late = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    read = {name: value.item() for name, value in late.items()} if len(late) == 1 else {}
    read = read or dict(zip(late, read_numbers([*late.values()]), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in numbers.items()}


#: A probe with more numbers, such as images, is not stored with the run.
_MOST_NUMBERS = 1 << 16


def to_plain(probe: Any) -> Any:
    """Return a probe as JSON values; None if it contains floating-point tensors or is large."""
    try:
        plain, n_numbers = _plain(probe)
    except TypeError:
        return None
    return plain if n_numbers <= _MOST_NUMBERS else None


def of_plain(plain: Any) -> Any:
    """Return the probe from the result of `to_plain`; None for None."""
    if not isinstance(plain, Mapping):
        return plain
    if "dtype" in plain:
        return torch.tensor(plain["values"], dtype=getattr(torch, plain["dtype"]))
    if "mapping" in plain:
        return {name: of_plain(value) for name, value in plain["mapping"].items()}
    return tuple(of_plain(value) for value in plain["tuple"])


def _plain(value: Any) -> tuple[Any, int]:
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}, value.numel()
    if isinstance(value, Mapping):
        named = {name: _plain(part) for name, part in value.items()}
        return {"mapping": {name: part for name, (part, _) in named.items()}}, sum(n for _, n in named.values())
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return {"tuple": [part for part, _ in parts]}, sum(n for _, n in parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value, 1
    raise TypeError(f"{type(value).__name__} is not stored")


#: A setting that has changed: its name, the ratio of the new to the previous value, and a sentence.
Change = tuple[str, float, str]
#: Values of the variables of each part that was measured.
Measured = dict[str, dict[str, np.ndarray]]

T = TypeVar("T")
#: Seconds after which a rank says that it waits for others, and after which it gives up.
PATIENCE, LIMIT = 10.0, 120.0

#: Metrics of an update that are summed over the ranks that have them; all others that are shared are averaged.
SUMS = ("batch_size", "n_tokens")
MEANS = tuple(name for name in NUMBERS if name not in (*SUMS, "repeated_batch", "spike_score", "examined"))


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


def of_all_ranks(
    rows: Sequence[Mapping[str, float]], n_changes: int, n_unmade: int
) -> tuple[list[dict[str, float]], int, int]:
    """Combine the metrics of some updates over all ranks, in one message whose length does not depend on the metrics.

    The metrics in `MEANS` and `SUMS` are averaged or summed; others keep their value on each rank. The numbers of
    changed settings and of updates that were not made are summed.
    """
    names = MEANS + SUMS
    own = np.array([[float(row.get(name, math.nan)) for name in names] for row in rows])
    is_given = np.array([[name in row for name in names] for row in rows])
    is_known = is_given & ~np.isnan(own)
    # A loss that is NaN on one rank is NaN for all.
    is_broken = is_given & np.isnan(own) & (np.array(names) != "lookahead")
    message = [np.where(is_known, own, 0.0), is_known, is_broken]
    sums = summed_over_ranks(np.r_[np.array(message, dtype=np.float64).ravel(), n_changes, n_unmade])
    total, count, n_broken = sums[:-2].reshape(3, *own.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        combined = np.where([name in MEANS for name in names], total / count, total)
    combined[n_broken > 0] = math.nan
    is_found = (count > 0) | (n_broken > 0)
    found = [
        dict(row) | {name: float(value) for name, value, is_one in zip(names, *of_row, strict=True) if is_one}
        for row, *of_row in zip(rows, combined, is_found, strict=True)
    ]
    return found, int(sums[-2]), int(sums[-1])


def mean_over_ranks(numbers: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the means of numbers over the ranks that have them, by name; a collective operation."""
    if not is_shared():
        return dict(numbers)
    own = np.array([numbers.get(name, math.nan) for name in names])
    total, count = summed_over_ranks(np.array([np.nan_to_num(own), ~np.isnan(own)], dtype=np.float64))
    return {name: float(total[i] / count[i]) for i, name in enumerate(names) if count[i]}


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
