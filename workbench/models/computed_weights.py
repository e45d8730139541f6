"""Matrices that are not parameters, such as those of unmerged adapters, quantized maps and tensor subclasses.

The matrix of a module that is one linear map is computed by running it on the unit vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.probing import undisturbed

#: Largest relative difference between the outputs of a module and those of the matrix computed for it.
_LARGEST_GAP = 1e-3


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear map, or of an adapter of one; None for other modules."""
    inner: Any = getattr(module, "base_layer", module)
    n_inputs, n_outputs = getattr(inner, "in_features", None), getattr(inner, "out_features", None)
    return (n_inputs, n_outputs) if isinstance(n_inputs, int) and isinstance(n_outputs, int) else None


def matrix_of(module: nn.Module, n_inputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix (output, input) and bias (output,) that a linear module applies.

    Args:
        module: Module, run in eval mode; it is not changed.
        n_inputs: Number of its inputs.
        like: Tensor with the dtype and device of its inputs.
    """
    with undisturbed(module):
        bias = module(like.new_zeros(1, n_inputs))
        rows = module(torch.eye(n_inputs, dtype=like.dtype, device=like.device)) - bias
    return rows.T.detach().clone(), bias[0].detach().clone()


def effective_map(module: nn.Module, into: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return matrix and bias of a module with these inputs and outputs; None if it is not a linear map."""
    try:
        weight, bias = matrix_of(module, into.shape[-1], into)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None
    expected = into.double() @ weight.double().T + bias.double()
    rounding = max(_LARGEST_GAP, 4 * torch.finfo(out.dtype).eps)
    gap = float((expected - out.double()).norm())
    return (weight, bias) if gap <= rounding * float(out.double().norm()) else None
