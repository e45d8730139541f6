"""Sharpness of attention and routing margins, which `workbench.monitors.attention_calls` does not measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.monitors.attention_calls import BlockCalls, BlockNotes, Logits, Products
from workbench.monitors.matrices import widened

#: Scores at or below this value are due to a mask.
_MASKED = -1e4


@dataclass(frozen=True)
class Sharpness:
    """Deviation of the attention of one layer from uniform attention.

    Attributes:
        logit_std: Standard deviation of a token's logits over the tokens that it attends to, RMS over tokens, (head,).
        sink_fraction: Attention to the first token of the sequence, mean over the tokens that can attend to it and to
            at least one other token, (head,); NaN if there are none.
    """

    logit_std: Tensor
    sink_fraction: Tensor


def sharpness(logits: Tensor, is_visible: Tensor, rows: Tensor | None = None) -> Sharpness:
    """Compute the scale of the logits and the attention to the first token.

    Args:
        logits: Input of the softmax, shape (batch, head, token, token).
        is_visible: Boolean mask of visible tokens, broadcastable to ``logits``.
        rows: Boolean mask of the tokens to include, shape (batch, token); None for all.
    """
    logits, is_visible = widened(logits), is_visible.expand(logits.shape)
    n_seen = is_visible.sum(-1)
    counts = n_seen > 1 if rows is None else (n_seen > 1) & rows[:, None].to(logits.device)
    kept = torch.where(is_visible, logits, 0.0)
    mean = kept.sum(-1, keepdim=True) / n_seen.clamp_min(1)[..., None]
    variance = torch.where(is_visible, logits - mean, 0.0).square().sum(-1) / n_seen.clamp_min(1)
    std = (variance.masked_fill(~counts, 0).sum((0, -1)) / counts.sum((0, -1))).sqrt()
    weights = logits.masked_fill(~is_visible, -torch.inf).softmax(-1)
    first = _first_token(is_visible, rows)
    index = first[:, None, None, None].expand(*logits.shape[:3], 1)
    sees_first = counts & is_visible.gather(-1, index)[..., 0]
    on_first = weights.gather(-1, index)[..., 0].masked_fill(~sees_first, 0)
    return Sharpness(std, on_first.sum((0, -1)) / sees_first.sum((0, -1)))


def routing_margin(logits: Tensor, choices: Tensor) -> Tensor:
    """Compute the margin of the choice of experts.

    Args:
        logits: Logits of the router, shape (token, expert).
        choices: Chosen experts, shape (token, k).

    Returns:
        Softmax probability of the least probable chosen expert minus that of the most probable other expert, mean over
        tokens, 0-dim. Negative where a correction changes the choice; NaN if all experts are chosen.
    """
    probability = widened(logits).softmax(-1)
    if choices.shape[-1] >= probability.shape[-1]:
        return probability.new_full((), torch.nan)
    is_chosen = torch.zeros_like(probability, dtype=torch.bool).scatter(-1, choices.long(), True)
    last = probability.masked_fill(~is_chosen, torch.inf).amin(-1)
    first = probability.masked_fill(is_chosen, -torch.inf).amax(-1)
    return (last - first).mean()


class FlowCalls(BlockCalls):
    """`BlockCalls` that also measures the sharpness of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness: dict[int, Sharpness] = {}

    def measure(self, block: BlockNotes, call: Products | Logits) -> None:
        """Measure attention and sharpness of a block."""
        super().measure(block, call)
        with torch._C.DisableTorchFunction():
            self.sharpness[id(block)] = _sharpness_of(call)


def _sharpness_of(call: Products | Logits) -> Sharpness:
    """Return the sharpness of an attention call, given by its logits or by queries and keys."""
    if isinstance(call, Logits):
        return sharpness(call.logits, call.logits > _MASKED, call.rows)
    q, mask = call.q, call.mask
    k = call.k.repeat_interleave(q.shape[1] // call.k.shape[1], dim=1)
    logits = widened(q) @ widened(k).mT * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    is_visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
    if call.is_causal:
        is_visible = is_visible.tril()
    if mask is not None:
        is_choice = mask.dtype == torch.bool
        logits = logits if is_choice else logits + mask
        is_visible = is_visible & (mask if is_choice else mask > _MASKED)
    return sharpness(logits, is_visible, call.rows)


def _first_token(is_visible: Tensor, rows: Tensor | None) -> Tensor:
    """Return the position of the first token of each sequence that is no padding, shape (batch,)."""
    if rows is not None:
        return rows.to(torch.uint8).argmax(-1).to(is_visible.device)
    return torch.zeros(len(is_visible), dtype=torch.int64, device=is_visible.device)
