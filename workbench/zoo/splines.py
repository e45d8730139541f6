"""KAN layers, which have a learned function of one variable, SiLU plus a B-spline, on every edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.zoo.architecture_config import ArchitectureConfig


class KanLayer(nn.Module):
    """One layer of a Kolmogorov-Arnold network (Liu et al. 2024, arXiv:2404.19756).

    Output j is the sum over inputs i of w_ji silu(x_i) + s_ji sum_b c_jib B_b(x_i), with B-splines B_b on a uniform
    grid. The grid is fixed: it is not adapted to the inputs during training, as by the optional grid extension of the
    paper. Outside the grid a spline decreases to zero, and only SiLU remains.

    Args:
        n_in: Number of inputs.
        n_out: Number of outputs.
        n_grid: Number of grid intervals.
        order: Degree of the splines.
        half_range: Half the range of the grid, -half_range .. half_range.
    """

    def __init__(self, n_in: int, n_out: int, *, n_grid: int, order: int, half_range: float) -> None:
        super().__init__()
        self.n_grid, self.order, self.half_range = n_grid, order, half_range
        self.base_weight = nn.Parameter(torch.empty(n_out, n_in))
        self.spline_weight = nn.Parameter(torch.empty(n_out, n_in))
        self.coefficient = nn.Parameter(torch.empty(n_out, n_in, n_grid + order))

    @classmethod
    def of(cls, config: ArchitectureConfig, n_in: int, n_out: int) -> KanLayer:
        """Create a layer with the splines of a configuration."""
        return cls(n_in, n_out, n_grid=config.n_grid, order=config.spline_order, half_range=config.spline_range)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (..., n_out), of inputs (..., n_in)."""
        bases = b_spline_bases(x, n_grid=self.n_grid, order=self.order, half_range=self.half_range)
        weight = self.spline_weight[..., None] * self.coefficient
        spline = functional.linear(bases.flatten(-2), weight.flatten(1))
        return functional.linear(functional.silu(x), self.base_weight) + spline

    def extra_repr(self) -> str:
        """Return sizes and grid as text, for printing."""
        n_out, n_in = self.base_weight.shape
        return f"{n_in}, {n_out}, n_grid={self.n_grid}, order={self.order}, half_range={self.half_range}"


def b_spline_bases(x: Tensor, *, n_grid: int, order: int, half_range: float) -> Tensor:
    """Return the values of all B-splines of one degree on a uniform grid.

    The knots extend beyond both ends of the grid, so that the basis functions sum to 1 everywhere on the grid and
    decrease to zero outside. Only the ``order + 1`` functions that are nonzero at a point are computed (the recursion
    of Cox and de Boor for uniform knots), which needs little memory for autograd.

    Args:
        x: Points, any shape.
        n_grid: Number of intervals between -half_range and half_range.
        order: Degree of the splines, at least 1.
        half_range: Half the width of the grid.

    Returns:
        Values, shape (..., n_grid + order); NaN at points that are NaN.
    """
    n_intervals = n_grid + 2 * order
    place = (x + half_range) * (
        n_grid / (2 * half_range)
    ) + order  # in units where the knots are 0, 1, ..., n_intervals
    is_outside = (place < 0) | (place >= n_intervals)
    place = torch.where(is_outside, torch.zeros_like(place), place)  # all basis functions are zero at the first knot
    interval = place.detach().nan_to_num().floor()
    t = place - interval
    zero, values = torch.zeros_like(t), [torch.ones_like(t)]  # values of the nonzero basis functions, in order
    for degree in range(1, order + 1):
        padded = [zero, *values, zero]
        values = [((t + degree - i) * padded[i] + (i + 1 - t) * padded[i + 1]) / degree for i in range(degree + 1)]
    index = interval.long()[..., None] + torch.arange(order + 1, device=x.device)
    dense = torch.zeros(*x.shape, n_intervals + order, dtype=x.dtype, device=x.device).scatter(
        -1, index, torch.stack(values, dim=-1)
    )
    return dense[..., order : order + n_grid + order]
