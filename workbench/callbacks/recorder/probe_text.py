"""The probe as JSON values, so that a resumed run measures on the same examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
