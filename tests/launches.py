"""Counts what a measurement asks of a device: operations, bytes written, and waits of the host."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.models.readable_weights import finish, read_arrays

#: Operations whose result depends on values, which the host has to wait for, and factorizations that it waits for.
WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "linalg_", "_linalg", "bincount")
#: Operations that launch nothing.
FREE = ("empty", "new_empty", "_unsafe_view", "promote_types")


class Launches(TorchDispatchMode):
    """Counts operations by name within the context; views and allocations do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE):
            self.operations[name] += 1
            is_by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
            self.operations["index by mask"] += is_by_mask
            for each in out if isinstance(out, tuple | list) else [out]:
                self.n_bytes += each.numel() * each.element_size() if isinstance(each, torch.Tensor) else 0
        return out

    @property
    def n_operations(self) -> int:
        """Number of operations that are not views."""
        return sum(self.operations.values())

    @property
    def waits(self) -> dict[str, int]:
        """Operations that the host waits for, with their number."""
        allowed = ("linalg_vector_norm", "linalg_matrix_norm")
        return {
            name: n
            for name, n in self.operations.items()
            if n and name not in allowed and (name == "index by mask" or name.startswith(WAITS))
        }


def launched(measurement):
    """Return what a measurement launches before it yields, and its result."""
    with Launches() as launches:
        tensors = next(measurement)
    return launches, finish(measurement, read_arrays(tensors))
