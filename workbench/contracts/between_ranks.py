"""Experiments of several processes: their messages have a limit of time, and their passes send none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import SnapshotError
from workbench.io.memory import free_memory
from workbench.models.calling import is_shared
from workbench.models.readable_weights import whole_tensors

#: Seconds for which a rank waits for the others.
PATIENCE = 30
#: Operations on tensors that are split over ranks that need no other rank.
_LOCAL = ("detach", "alias", "clone", "_to_copy", "zero_", "fill_")


def of_all_ranks(own: Any, what: str) -> list[Any]:
    """Return the values of all ranks; alone, after a while, if others have none to send.

    They go through the store of the process group instead of a collective operation, so that no rank waits for ever.
    """
    if not is_shared():
        return [own]
    try:
        store, rank = distributed.distributed_c10d._get_default_store(), distributed.get_rank()
        n, limit = distributed.get_world_size(), timedelta(seconds=PATIENCE)
        number = store.add(f"workbench/{what} of {rank}", 1)
        keys = [f"workbench/{what} {number} of {each}" for each in range(n)]
        store.set(keys[rank], json.dumps(own))
        store.wait(keys, limit)
        found = [json.loads(store.get(key)) for key in keys]
        # The rank that holds the store stays until all have read.
        if store.add(f"workbench/{what} {number} were read", 1) == n:
            store.set(f"workbench/{what} {number} are done", "")
        store.wait([f"workbench/{what} {number} are done"], limit)
    except Exception:  # noqa: BLE001  (a store may fail in any way; the others are then unknown)
        return [own]
    return found


def gather(models: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return the whole of each tensor that FSDP2 or tensor parallelism splits over ranks, by the id of its part.

    Nothing is gathered unless every rank comes to this point, has split models of the same sizes, and has the memory.
    """
    n_bytes = [_bytes_to_gather(each) for each in models]
    device = next((p.device for each in models for p in each.parameters()), "cpu")
    own = {"sizes": n_bytes, "fits": sum(n_bytes) <= free_memory(device)}
    if not is_shared():
        return {}
    ranks = of_all_ranks(own, "sizes")
    if not sum(n_bytes) or any(each != ranks[0] or not each["fits"] for each in ranks) or len(ranks) < 2:
        return {}
    return {key: whole for each in models for key, whole in whole_tensors(each, casts=True).items()}


def _bytes_to_gather(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if hasattr(p, "to_local"))


@contextmanager
def without_messages() -> Iterator[None]:
    """Raise SnapshotError in place of a message between ranks, which might have nobody to answer it."""
    if not is_shared():
        yield
        return
    with _Silence():
        yield


class _Silence(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "name", str)() if not hasattr(func, "namespace") else f"{func.namespace}::{func.__name__}"
        space, _, operation = name.partition("::")
        is_split = any(issubclass(each, Tensor) and hasattr(each, "full_tensor") for each in types)
        if space in ("c10d", "_c10d_functional") or (is_split and operation.split(".")[0] not in _LOCAL):
            raise SnapshotError("It would need messages between ranks, which may not all make it.")
        return func(*args, **kwargs or {})
