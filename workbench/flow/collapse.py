"""Similarity of the tokens of a sequence, and sizes of states."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor

from workbench.monitors.matrices import effective_rank, widened


def rms(x: Tensor, rows: Tensor | None = None) -> float:
    """Root mean square of all entries, in float64.

    Args:
        x: States, shape (..., feature).
        rows: Boolean mask of the tokens that count, shape (...); None, or of another shape than the tokens: all.
    """
    norm = norm_of(x, rows)
    n = int(rows.sum()) * x.shape[-1] if _fits(rows, x) else x.numel()
    return norm / math.sqrt(n) if n else math.nan


def norm_of(x: Tensor, rows: Tensor | None = None) -> float:
    """Euclidean norm of all entries, in float64; arguments as in `rms`."""
    x = x.detach()
    if _fits(rows, x):
        x = x[rows.to(x.device)]
    return float(torch.linalg.vector_norm(widened(x)))


def token_cosine(states: Tensor, rows: Tensor | None = None) -> float:
    """Mean cosine between two different tokens of a sequence; its rise to 1 is the collapse of representations.

    Args:
        states: Shape (sequence, ..., feature); of shape (token, feature) they are one sequence.
        rows: Boolean mask of the tokens that count, shape (sequence, ...); None: all. States that are zero never count.

    Returns:
        Between -1 and 1; NaN where no sequence has two tokens that count.
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


def effective_rank_share(states: Tensor, rows: Tensor | None = None) -> float:
    """Effective rank of the token states (Roy and Vetterli 2007) over the largest possible, min(tokens, features).

    The states are not centred, so that tokens with the same state count as one direction.

    Args:
        states: Shape (..., feature).
        rows: Boolean mask of the tokens that count, shape (...); None: all.

    Returns:
        Between 0 and 1; NaN where all states are zero or one is not finite.
    """
    states = widened(states.detach())
    states = states.flatten(0, -2) if rows is None else states[rows.to(states.device)]
    if not len(states) or not bool(torch.isfinite(states).all()):
        return math.nan
    # The smaller Gram matrix has the squares: quicker, and what it loses below 1e-8 of the largest hardly counts.
    gram = states.T @ states if len(states) >= states.shape[-1] else states @ states.T
    squares = torch.linalg.eigvalsh(gram)
    floor = squares[-1] * len(gram) * torch.finfo(squares.dtype).eps
    s = squares.masked_fill(squares <= floor, 0).sqrt()
    return float(effective_rank(s, alpha=1.0)) / len(gram)


def _fits(rows: Tensor | None, x: Tensor) -> TypeGuard[Tensor]:
    return rows is not None and rows.shape == x.shape[:-1]
