"""Norms of states, and measures of the similarity of a sequence's tokens."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor

from workbench.monitors.matrices import effective_rank, widened


def rms(x: Tensor, rows: Tensor | None = None) -> float:
    """Return the root mean square of all entries, computed in float64.

    Args:
        x: States, shape (..., feature).
        rows: Boolean mask of the tokens to include, shape (...); all are included if it is None or has another shape.
    """
    norm = norm_of(x, rows)
    n = int(rows.sum()) * x.shape[-1] if _fits(rows, x) else x.numel()
    return norm / math.sqrt(n) if n else math.nan


def norm_of(x: Tensor, rows: Tensor | None = None) -> float:
    """Return the Euclidean norm of all entries, computed in float64; arguments as for `rms`."""
    x = x.detach()
    if _fits(rows, x):
        x = x[rows.to(x.device)]
    return float(torch.linalg.vector_norm(widened(x)))


def token_cosine(states: Tensor, rows: Tensor | None = None) -> float:
    """Return the mean cosine between two different tokens of a sequence, which tends to 1 in representation collapse.

    Args:
        states: Shape (sequence, ..., feature); (token, feature) for a single sequence.
        rows: Boolean mask of the tokens to include, shape (sequence, ...); None for all. States that are zero are
            never included.

    Returns:
        Value between -1 and 1; NaN if no sequence has two included tokens.
    """
    states = widened(states.detach())
    states = states[None] if states.ndim == 2 else states.flatten(1, -2)
    counts = torch.ones(states.shape[:2], dtype=torch.bool) if rows is None else rows.reshape(states.shape[:2])
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    counts = counts.to(states.device) & (length[..., 0] > 0)
    direction = torch.where(counts[..., None], states / length, 0.0)
    n = counts.sum(1).to(direction.dtype)
    pairs = direction.sum(1).square().sum(-1) - direction.square().sum((1, 2))
    n_pairs = (n * (n - 1)).sum()
    return float(pairs.sum() / n_pairs)


def relative_effective_rank(states: Tensor, rows: Tensor | None = None) -> float:
    """Return the effective rank of token states (Roy and Vetterli 2007) over its maximum, min(tokens, features).

    The states are not centered, so that tokens with the same state count as one direction.

    Args:
        states: Shape (..., feature).
        rows: Boolean mask of the tokens to include, shape (...); None for all.

    Returns:
        Value between 0 and 1; NaN if all states are zero or one is not finite.
    """
    states = widened(states.detach())
    states = states.flatten(0, -2) if rows is None else states[rows.to(states.device)]
    if not len(states) or not bool(torch.isfinite(states).all()):
        return math.nan
    # The eigenvalues of the smaller Gram matrix are the squared singular values. This is faster than a singular value
    # decomposition, and the loss of those below 1e-8 of the largest hardly matters.
    gram = states.T @ states if len(states) >= states.shape[-1] else states @ states.T
    squares = torch.linalg.eigvalsh(gram)
    floor = squares[-1] * len(gram) * torch.finfo(squares.dtype).eps
    s = squares.masked_fill(squares <= floor, 0).sqrt()
    return float(effective_rank(s, alpha=1.0)) / len(gram)


def _fits(rows: Tensor | None, x: Tensor) -> TypeGuard[Tensor]:
    return rows is not None and rows.shape == x.shape[:-1]
