"""Measures of a matrix from its singular values."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.option_kinds import PositiveFloat


def frobenius_norm(s: Tensor) -> Tensor:
    """Return the Frobenius norm of a matrix from its singular values, sqrt(sum s^2).

    Args:
        s: Singular values, shape (..., n), in any order.

    Returns:
        Shape (...), in the unit of the matrix; NaN where a singular value is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.frobenius_norm(torch.tensor([4.0, 3.0])).item()
        5.0

    See Also:
        `workbench.monitors.singular_values`: Computes the singular values.
    """
    return torch.linalg.vector_norm(widened(s), dim=-1)


def stable_rank(s: Tensor) -> Tensor:
    """Return the stable rank |M|_F^2 / |M|_2^2 of a matrix from its singular values.

    It lies between 1 and the rank (Rudelson and Vershynin 2007, arXiv:math/0503442).

    Args:
        s: Singular values, shape (..., n), in any order.

    Returns:
        Shape (...), dimensionless; NaN for a zero matrix and where a singular value is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.stable_rank(torch.tensor([2.0, 2.0, 0.0])).item()
        2.0

    See Also:
        `workbench.monitors.effective_rank`: Rank by the entropy of the singular values.
    """
    return _scaled(s).square().sum(-1)


def effective_rank(s: Tensor, *, alpha: PositiveFloat = 2.0) -> Tensor:
    """Return the effective rank exp(H) of a matrix, where H is the `spectral_entropy`.

    It lies between 1 and the rank (Huang et al. 2026, arXiv:2606.28116).

    Args:
        s: Singular values, shape (..., n), in any order.
        alpha: Power of the singular values: 2 weights by energy; 1 is the effective rank of Roy and Vetterli (2007).

    Returns:
        Shape (...), dimensionless; NaN for a zero matrix and where a singular value is NaN.

    Raises:
        OptionError: If ``alpha`` is not a positive number.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.effective_rank(torch.tensor([2.0, 2.0, 0.0])).item(), 3)
        2.0

    See Also:
        `workbench.monitors.spectral_entropy`: Its logarithm.
        `workbench.monitors.stable_rank`: Rank by the norms of the matrix.
    """
    return spectral_entropy(s, alpha=alpha).exp()


def spectral_entropy(s: Tensor, *, alpha: PositiveFloat = 2.0) -> Tensor:
    """Return the entropy -sum p log p of p_i = s_i^alpha / sum s^alpha (Huang et al. 2026, arXiv:2606.28116).

    Args:
        s: Singular values, shape (..., n), in any order; zeros do not contribute.
        alpha: Power of the singular values.

    Returns:
        Shape (...), in nat; NaN for a zero matrix and where a singular value is NaN.

    Raises:
        OptionError: If ``alpha`` is not a positive number.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.spectral_entropy(torch.tensor([1.0, 1.0])).item(), 3)
        0.693

    See Also:
        `workbench.monitors.effective_rank`: Its exponential.
    """
    if not 0 < alpha < float("inf"):
        raise OptionError.of("alpha", alpha, "positive and finite", remedy="pass a number such as 2")
    weight = _scaled(s) ** alpha
    return torch.special.entr(weight / weight.sum(-1, keepdim=True)).sum(-1)


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix in decreasing order; those that are zero within rounding are 0.

    Args:
        matrix: Shape (..., row, column).

    Returns:
        Shape (..., min(row, column)), in the unit of the matrix; NaN for a matrix whose Frobenius norm is not finite
        (it is never passed to LAPACK). Values below max(row, column) * (rounding unit of float64) * (largest) are set
        to 0, as is customary for a numerical rank; otherwise noise would contribute to an effective rank with a small
        alpha.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.singular_values(torch.diag(torch.tensor([1.0, 3.0, 0.0]))).tolist()
        [3.0, 1.0, 0.0]

    See Also:
        `workbench.monitors.effective_rank`: A measure of the singular values.
    """
    matrix = widened(matrix)
    is_finite = torch.isfinite(torch.linalg.matrix_norm(matrix))
    # On the host: CUDA's Jacobi method takes ten times as long for many small matrices, and its approximate method
    # (gesvda) does not converge for singular matrices (benchmarks/gpu.md).
    s = torch.linalg.svdvals(matrix.masked_fill(~is_finite[..., None, None], 0).cpu()).to(matrix.device)
    s = without_rounding(s, max(matrix.shape[-2:]))
    return s.masked_fill(~is_finite[..., None], float("nan"))


def without_rounding(s: Tensor, size: int, eps: float | None = None, *, largest: Tensor | None = None) -> Tensor:
    """Set singular values, or squares, below 0 or within rounding (``eps`` times ``largest`` times ``size``) to 0."""
    largest = s.amax(-1) if largest is None else largest
    floor = size * (torch.finfo(s.dtype).eps if eps is None else eps) * largest
    return s.masked_fill(s <= floor.clamp_min(0)[..., None], 0)


def widened(x: Tensor) -> Tensor:
    """Return the tensor in float64, or in float32 on a device without float64, such as Apple's."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own format if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(s: Tensor) -> Tensor:
    """Return singular values over the largest, whose powers neither overflow nor vanish; NaN for a zero matrix."""
    s = widened(s)
    return s / s.amax(-1, keepdim=True)
