"""Matrices that are no parameters: of adapters that are not merged, of quantized maps, of tensor subclasses.

A module that is one linear map says what its matrix is when it is run on the unit vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.probing import undisturbed

#: Share of its outputs by which a module may miss those of the matrix that it was found to be.
_LARGEST_GAP = 1e-3


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of inputs and outputs of a module that calls itself a linear map or adapts one; None for others."""
    inner: Any = getattr(module, "base_layer", module)
    n_inputs, n_outputs = getattr(inner, "in_features", None), getattr(inner, "out_features", None)
    return (n_inputs, n_outputs) if isinstance(n_inputs, int) and isinstance(n_outputs, int) else None


def matrix_of(module: nn.Module, n_inputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix (output, input) and bias (output,) that a module applies, if it is linear.

    Args:
        module: Module, run in eval mode; it is not changed.
        n_inputs: Number of its inputs.
        like: Tensor of the dtype and on the device of its inputs.
    """
    with undisturbed(module):
        bias = module(like.new_zeros(1, n_inputs))
        rows = module(torch.eye(n_inputs, dtype=like.dtype, device=like.device)) - bias
    return rows.T.detach().clone(), bias[0].detach().clone()


def effective_map(module: nn.Module, into: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Matrix and bias of a module that turned inputs into outputs; None if it is no linear map."""
    try:
        weight, bias = matrix_of(module, into.shape[-1], into)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None
    expected = into.double() @ weight.double().T + bias.double()
    rounding = max(_LARGEST_GAP, 4 * torch.finfo(out.dtype).eps)
    gap = float((expected - out.double()).norm())
    return (weight, bias) if gap <= rounding * float(out.double().norm()) else None
