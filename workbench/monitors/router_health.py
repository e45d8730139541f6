"""Measures of a router: similarity of its experts, entropy of its choices, balance of the load, changes of choices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.monitors.matrices import widened


def router_similarity(weight: Tensor) -> Tensor:
    """Return the mean cosine between the weight rows of two experts, (E |mean w_i/|w_i||^2 - 1) / (E - 1).

    It rises towards 1 as experts become similar (Huang et al. 2026, arXiv:2606.28116).

    Args:
        weight: Router weights, shape (..., expert, feature).

    Returns:
        Shape (...), between -1 / (E - 1) and 1; NaN if there is only one expert, a row is zero, or a weight is not
        finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.router_similarity(torch.eye(3)).item(), 3)
        0.0
        >>> round(wb.monitors.router_similarity(torch.ones(3, 4)).item(), 3)
        1.0

    See Also:
        `workbench.monitors.router_conditioning`: Distance of the rows from their mean.
    """
    weight = widened(weight)
    n_experts = weight.shape[-2]
    direction = weight / torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
    squared = direction.mean(-2).square().sum(-1)
    if n_experts == 1:
        return torch.full_like(squared, float("nan"))
    return (n_experts * squared - 1) / (n_experts - 1)


def router_conditioning(weight: Tensor) -> Tensor:
    """Return the largest relative distance of the weight rows from their mean, max_i |w_i - mean| / |mean|.

    Defined by Huang et al. 2026 (arXiv:2606.28116).

    Args:
        weight: Router weights, shape (..., expert, feature).

    Returns:
        Shape (...), from 0 (all experts equal, or only one) to inf (mean zero); NaN if all weights are zero or a weight
        is not finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.router_conditioning(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).item()
        0.5

    See Also:
        `workbench.monitors.router_similarity`: Mean cosine between the rows.
    """
    weight = widened(weight)
    mean = weight.mean(-2, keepdim=True)
    reach = torch.linalg.vector_norm(weight - mean, dim=-1).amax(-1)
    return reach / torch.linalg.vector_norm(mean, dim=-1).squeeze(-1)


def routing_entropy(logits: Tensor) -> Tensor:
    """Return the mean over tokens of -sum_i p_i log p_i, where p is the softmax over all experts, not only the chosen.

    Args:
        logits: Shape (..., token, expert); -inf excludes an expert.

    Returns:
        Shape (...), in nat, between 0 and log(number of experts); NaN if all experts of a token are excluded or a logit
        is NaN or +inf.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.routing_entropy(torch.zeros(5, 4)).item(), 3)
        1.386

    See Also:
        `workbench.monitors.routing_entropy_share`: The same over its largest value.
    """
    return torch.special.entr(widened(logits).softmax(-1)).sum(-1).mean(-1)


def routing_entropy_share(logits: Tensor) -> Tensor:
    """Return `routing_entropy` over its largest value, log(number of experts).

    Args:
        logits: Shape (..., token, expert).

    Returns:
        Shape (...), between 0 (all probability on one expert) and 1 (uniform); NaN as in `routing_entropy`, and if
        there is only one expert.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.routing_entropy_share(torch.zeros(5, 4)).item(), 3)
        1.0

    See Also:
        `workbench.monitors.routing_entropy`: The entropy in nat.
    """
    entropy, n_experts = routing_entropy(logits), logits.shape[-1]
    return entropy / math.log(n_experts) if n_experts > 1 else torch.full_like(entropy, float("nan"))


def expert_load(choices: Tensor, n_experts: int) -> Tensor:
    """Return the fraction of the choices that each expert receives.

    Args:
        choices: Indices of the experts of each token, shape (..., token, k).
        n_experts: Number of experts to choose from.

    Returns:
        Shape (..., expert), with sum 1; NaN if there are no tokens.

    Raises:
        OptionError: If an index is not one of the experts.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> choices = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]])
        >>> wb.monitors.expert_load(choices, n_experts=4).tolist()
        [0.5, 0.375, 0.125, 0.0]

    See Also:
        `workbench.monitors.max_violation`: Imbalance of the load.
        `workbench.monitors.dead_experts`: Number of experts without a token.
    """
    if choices.numel() and not (int(choices.min()) >= 0 and int(choices.max()) < n_experts):
        raise OptionError(
            f"choices go from {int(choices.min())} to {int(choices.max())}, expected indices of {n_experts} experts; "
            "pass the number of experts of this router."
        )
    flat = choices.flatten(-2).long()
    ones = widened(torch.ones_like(flat))
    count = ones.new_zeros(*flat.shape[:-1], n_experts).scatter_add(-1, flat, ones)
    return count / count.sum(-1, keepdim=True)


def max_violation(load: Tensor) -> Tensor:
    """Return MaxVio, (max - mean) / mean of the load of the experts (Wang et al. 2024, arXiv:2408.15664).

    Args:
        load: Fractions or counts, shape (..., expert).

    Returns:
        Shape (...), from 0 (equal loads) to the number of experts minus 1 (one expert receives all tokens); NaN if
        there is no load.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.max_violation(torch.tensor([0.5, 0.25, 0.25, 0.0])).item()
        1.0

    See Also:
        `workbench.monitors.expert_load`: Computes the load.
    """
    load = widened(load)
    return load.amax(-1) / load.mean(-1) - 1


def dead_experts(load: Tensor) -> Tensor:
    """Return the number of experts without a token.

    Args:
        load: Fractions or counts, shape (..., expert).

    Returns:
        Shape (...), a count; NaN if a load is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.dead_experts(torch.tensor([0.5, 0.0, 0.5, 0.0])).item()
        2.0

    See Also:
        `workbench.monitors.expert_load`: Computes the load.
    """
    load = widened(load)
    return (load == 0).sum(-1).to(load.dtype).masked_fill(load.isnan().any(-1), float("nan"))


def routing_change(before: Tensor, after: Tensor) -> Tensor:
    """Return the fraction of the choices that are new; the order of a token's choices does not matter.

    Args:
        before: Indices of the experts of each token, shape (..., token, k).
        after: Indices for the same tokens later, of the same shape.

    Returns:
        Shape (...), between 0 (all tokens keep their experts) and 1; NaN if there are no tokens.

    Raises:
        OptionError: If the shapes differ.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> before, after = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 0], [2, 0]])
        >>> wb.monitors.routing_change(before, after).item()
        0.25

    See Also:
        `workbench.monitors.expert_load`: Load of the experts by the same choices.
    """
    if before.shape != after.shape:
        raise OptionError(f"Choices of shape {tuple(before.shape)} and {tuple(after.shape)} differ; pass equal tokens.")
    is_kept = (after[..., :, None] == before[..., None, :]).any(-1)
    return widened(~is_kept).mean((-2, -1))
