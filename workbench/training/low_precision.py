"""Automatic mixed precision that is as fast as float32 on processors without bfloat16 arithmetic."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Products that torch's autocast computes in low precision.
_PRODUCTS = frozenset(
    (
        functional.linear, functional.bilinear, functional.conv1d, functional.conv2d, functional.conv3d, torch.matmul,
        torch.mm, torch.mv, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm, torch.einsum, Tensor.matmul,
        Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm)
)  # fmt: skip


@contextmanager
def autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enable torch's autocast, with fast products on processors without bfloat16 arithmetic.

    On these, torch needs 5 to 30 times as long for a product of bfloat16 matrices as for one in float32. bfloat16
    numbers are float32 numbers, and hardware that multiplies them also accumulates in float32. Therefore the factors
    are rounded to bfloat16 and multiplied in float32, and the result is rounded, also in the backward pass. The only
    difference is the order of summation.
    """
    if dtype is None:
        yield
        return
    is_slow = device == "cpu" and not _knows_bfloat16()
    with torch.autocast(device, dtype), _ProductsInFloat32() if is_slow else nullcontext():
        yield


class _ProductsInFloat32(TorchFunctionMode):
    """Round the factors of products to bfloat16, multiply them in float32, and round the result."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if func not in _PRODUCTS or not casts or any(each.device.type != "cpu" for each in tensors):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            product = func(*map(_rounded, args), **{name: _rounded(value) for name, value in kwargs.items()})
        return product.bfloat16() if product.dtype is torch.float32 else product


def _rounded(value: Any) -> Any:
    """Round tensors and lists of them to bfloat16 and return them in float32; other values are unchanged."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)(map(_rounded, value))
    is_cast = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return value.bfloat16().float() if is_cast else value


@cache
def _knows_bfloat16() -> bool:
    """Return whether the processor has bfloat16 products; assumed for processors other than x86."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))
