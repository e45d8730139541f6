"""Measures of outliers in the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.monitors.matrices import widened


def activation_max(states: Tensor) -> Tensor:
    """Return the largest magnitude of any entry, max |h|.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), in the unit of the states; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.activation_max(torch.tensor([[1.0, -3.0], [2.0, 0.5]])).item()
        3.0

    See Also:
        `workbench.monitors.outlier_ratio`: The same relative to the median.
        `workbench.monitors.ModelProbe`: Measures it in every block of a model.
    """
    return widened(states).abs().amax((-2, -1))


def outlier_ratio(states: Tensor) -> Tensor:
    """Return the ratio of largest to median magnitude over all entries of all tokens, max |h| / median |h|.

    Defined by Sun et al. 2024 (arXiv:2402.17762).

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), at least 1. The median of an even number of entries is the lower of the two in the middle. inf if
        the median is 0; NaN if all entries are 0 or a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.outlier_ratio(torch.tensor([[1.0, -2.0, 2.0], [2.0, 100.0, 1.0]])).item()
        50.0

    See Also:
        `workbench.monitors.massive_activations`: Counts the outliers.
        `workbench.monitors.activation_max`: The largest magnitude itself.
    """
    size = widened(states).abs().flatten(-2)
    return size.amax(-1) / _median(size)


def massive_activations(states: Tensor, *, least: float = 100.0, ratio: float = 1000.0) -> Tensor:
    """Count the entries above 100 and above 1,000 times the median in magnitude (Sun et al. 2024, arXiv:2402.17762).

    Args:
        states: Shape (..., token, feature).
        least: Magnitude that an entry must exceed, in the unit of the states.
        ratio: Multiple of the median magnitude of all entries that it must exceed.

    Returns:
        Shape (...), a count; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> states = torch.ones(4, 8)
        >>> states[0, 3] = 2000.0
        >>> wb.monitors.massive_activations(states).item()
        1.0

    See Also:
        `workbench.monitors.outlier_ratio`: Largest over median magnitude.
    """
    size = widened(states).abs().flatten(-2)
    median = _median(size)
    count = ((size > least) & (size > ratio * median[..., None])).sum(-1)
    return count.to(size.dtype).masked_fill(median.isnan(), float("nan"))


def _median(size: Tensor) -> Tensor:
    """Return the lower median along the last dimension, NaN if an entry is NaN.

    `torch.median` raises an error on CUDA if the user asked for deterministic algorithms; sorting does not.
    """
    ordered = size.sort(-1).values  # NaN last
    return torch.where(ordered[..., -1].isnan(), ordered[..., -1], ordered[..., (size.shape[-1] - 1) // 2])


def kurtosis(states: Tensor) -> Tensor:
    """Return Pearson's kurtosis, mean((h - mean)^4) / mean((h - mean)^2)^2, over all entries of all tokens.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), dimensionless: 3 for a normal distribution (nothing is subtracted), about the number of entries if
        a single one dominates. NaN for constant states, and if a state is not finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.kurtosis(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).item()
        1.0

    See Also:
        `workbench.monitors.outlier_ratio`: Largest over median magnitude.
    """
    entries = widened(states).flatten(-2)
    centered = entries - entries.mean(-1, keepdim=True)
    centered = centered / centered.abs().amax(-1, keepdim=True)  # the fourth power of large states would overflow
    squares = centered.square()
    return squares.square().mean(-1) / squares.mean(-1).square()


def state_norm(states: Tensor) -> Tensor:
    """Return the mean over tokens of the Euclidean norm of a token's state.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), in the unit of the states; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.state_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).item()
        3.0

    See Also:
        `workbench.flow.measure`: Signal gains of all blocks of a model.
    """
    return torch.linalg.vector_norm(widened(states), dim=-1).mean(-1)
