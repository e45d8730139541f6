"""Attention and routing of the block that is running, read from its torch calls without changing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workbench.models.probing import storage_pointer
from workbench.models.readable_weights import on_device
from workbench.models.router_weights import Router
from workbench.models.tracing import CASTS, Arguments
from workbench.monitors.attention_health import AttentionQueries, measure_attention, measure_logits


@dataclass(frozen=True)
class Products:
    """Self-attention of a block's tokens, given by arguments of `scaled_dot_product_attention`."""

    q: Tensor  # queries, shape (batch, query head, token, head_dim)
    k: Tensor  # keys, shape (batch, key head, token, head_dim)
    rows: Tensor | None  # mask of the querying tokens to include, shape (batch, token); None for all
    scale: float | None = None  # scale, as in that function
    is_causal: bool = False  # whether attention is causal, as in that function
    mask: Tensor | None = None  # mask, as in that function; broadcast to (batch, head, token, token)

    def measure(self) -> AttentionQueries:
        """Measure the attention, see `measure_attention`."""
        return measure_attention(
            self.q, self.k, scale=self.scale, is_causal=self.is_causal, mask=self.mask, rows=self.rows
        )


@dataclass(frozen=True)
class Logits:
    """Self-attention of a block's tokens, given by the input of its softmax."""

    logits: Tensor  # shape (batch, head, token, token), or with a sink as last column
    rows: Tensor | None  # mask of the querying tokens to include, shape (batch, token); None for all

    def measure(self) -> AttentionQueries:
        """Measure the attention, see `measure_logits`."""
        return measure_logits(self.logits, rows=self.rows)


@dataclass
class BlockNotes:
    """Measurements of one call of a block."""

    leading: torch.Size  # shape of the residual stream without its features, such as (batch, token)
    rows: Tensor | None  # boolean mask of the tokens to include, of that shape; None for all
    measures_attention: bool = True  # whether to measure the attention
    router: Router | None = None  # router of the block; None if there is none or it is not measured
    router_weight: Tensor | None = None  # the parameter that contains the router's weight
    attention: AttentionQueries | None = None  # first self-attention of the block's tokens; None if not seen
    logits: Tensor | None = None  # logits of the router, shape (token, expert); None if not seen
    choices: Tensor | None = None  # experts chosen by the router, shape (token, k); None if not seen
    batch_axis: int = 0  # axis of ``leading`` that counts sequences

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the batch."""
        return self.leading.numel()

    def routing(self, router: Router) -> tuple[Tensor, Tensor | None]:
        """Return logits and choices of the tokens to include; choices are None where they were not seen."""
        assert self.logits is not None
        logits, choices = self.logits, self.choices
        if choices is None and not router.is_corrected:
            choices = logits.topk(router.top_k, dim=-1).indices
        if self.rows is not None and len(logits) == self.n_tokens:
            counts = on_device(self.rows.flatten().nonzero().squeeze(-1), logits.device)  # the mask is on the host
            choices = choices[counts] if choices is not None and len(choices) == len(logits) else choices
            logits = logits[counts]
        return logits, choices

    def rows_as(self, n_rows: int, n_tokens: int) -> Tensor | None:
        """Return the mask of tokens to include, (batch, token); None for all or for another shape."""
        if self.rows is None:
            return None
        rows = self.rows.movedim(self.batch_axis, 0)
        return rows if tuple(rows.shape) == (n_rows, n_tokens) else None


class BlockCalls(TorchFunctionMode):
    """Function mode that records attention and routing of the running `block` (None between blocks)."""

    def __init__(self) -> None:
        super().__init__()
        self.block: BlockNotes | None = None
        self._maximum: tuple[Tensor, Tensor] | None = None  # scores and their maximum, or scores minus that
        self._casts: list[Tensor] = []  # copies of a router's weight; stored so that their addresses are not reused

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.block is not None and (note := _NOTES.get(getattr(func, "__name__", "").strip("_"))):
            with torch.no_grad():  # unlike the call itself, the measurement needs no graph
                note(self, self.block, Arguments(args, kwargs), result)
        return result

    def measure(self, block: BlockNotes, call: Products | Logits) -> None:
        """Measure and store the attention of a block."""
        block.attention = call.measure()

    def on_fused_attention(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a call of `scaled_dot_product_attention`."""
        del result
        if not block.measures_attention or block.attention is not None:
            return
        q, k = given.get(0, "query"), given.get(1, "key")
        if not _is_own_attention(block, q, k):
            return
        n_rows = block.n_tokens // q.shape[-2]
        mask = given.get(3, "attn_mask")
        if mask is not None and mask.ndim == 3 and q.ndim == 3:
            mask = mask.reshape(n_rows, -1, *mask.shape[-2:]) if mask.shape[0] % n_rows == 0 else mask[:, None]
        call = Products(
            q.reshape(n_rows, -1, *q.shape[-2:]),
            k.reshape(n_rows, -1, *k.shape[-2:]),
            block.rows_as(n_rows, q.shape[-2]),
            scale=given.get(6, "scale"),
            is_causal=bool(given.get(5, "is_causal", False)),
            mask=mask,
        )
        self.measure(block, call)

    def on_softmax(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a softmax over as many columns as tokens, or one more for a sink, which counts as a token."""
        del result
        logits, dim = given.get(0, "input"), given.get(1, "dim")
        if not block.measures_attention or block.attention is not None or not isinstance(logits, Tensor):
            return
        if logits.ndim < 3 or dim not in (-1, logits.ndim - 1) or logits.shape[-1] - logits.shape[-2] not in (0, 1):
            return
        if block.logits is not None and logits.numel() == block.logits.numel():  # as many experts as tokens
            return
        scores_and_maximum, self._maximum = self._maximum, None
        if scores_and_maximum is not None:  # gpt_oss and others with sinks subtract the largest logit of each token
            scores, difference = scores_and_maximum
            logits = scores if logits is difference else logits
        n_tokens = logits.shape[-2]
        n_rows = block.n_tokens // n_tokens
        if n_rows * n_tokens == block.n_tokens and logits.shape[0] % n_rows == 0:
            logits = logits.reshape(n_rows, -1, *logits.shape[-2:])
            self.measure(block, Logits(logits, block.rows_as(n_rows, n_tokens)))

    def on_difference(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a difference, and store it in place of the maximum if that is subtracted from its scores."""
        terms = given.get(0, "input"), given.get(1, "other")
        if self._maximum is not None and all(x is y for x, y in zip(self._maximum, terms, strict=True)):
            self._maximum = self._maximum[0], result

    def on_packed_attention(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle the call behind `torch.nn.MultiheadAttention`, whose inner calls are not visible."""
        del result
        if not block.measures_attention or block.attention is not None:
            return
        packed, *weights = given.packed()
        query, key = packed["query"], packed["key"]
        has_extras = packed["bias_k"] is not None or packed["add_zero_attn"] or packed["static_k"] is not None
        if has_extras or query.shape != key.shape or query.ndim != 3:
            return
        bias = packed["in_proj_bias"]
        biases = bias.chunk(3)[:2] if bias is not None else (None, None)
        q, k = (  # (token, batch, feature) -> (batch, head, token, head_dim)
            functional.linear(x, w, b).unflatten(-1, (packed["num_heads"], -1)).permute(1, 2, 0, 3)
            for x, w, b in zip((query, key), weights, biases, strict=True)
        )
        n_tokens, n_rows = query.shape[:2]
        mask = _packed_mask(packed["attn_mask"], packed["key_padding_mask"], n_rows)
        self.measure(block, Products(q, k, block.rows_as(n_rows, n_tokens), mask=mask))

    def on_projection(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a linear map, and store its output if it is the router's."""
        if block.router is None or not isinstance(result, Tensor) or result.shape[-1:] != (block.router.n_experts,):
            return
        if any(self._is_router_weight(block, operand) for operand in (*given.args, *given.kwargs.values())):
            block.logits = result.detach().reshape(-1, block.router.n_experts).clone()

    def on_choice(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a maximum or top-k, and store the choices if it selects the router's experts; the last one counts."""
        scores = given.get(0, "input")
        if block.measures_attention and block.attention is None and isinstance(scores, Tensor) and scores.ndim == 4:
            maximum = getattr(result, "values", None)
            if isinstance(maximum, Tensor) and maximum.shape == (*scores.shape[:-1], 1):
                self._maximum = scores, maximum
        if block.router is None or not isinstance(scores, Tensor):
            return
        chosen = result if isinstance(result, Tensor) else getattr(result, "indices", None)
        if not isinstance(chosen, Tensor) or chosen.is_floating_point():
            return
        router = block.router
        is_of_experts = scores.shape[-1:] == (router.n_experts,)
        if is_of_experts and chosen.numel() * router.n_experts == scores.numel() * router.top_k:
            block.choices = chosen.detach().reshape(-1, router.top_k).clone()

    def on_cast(self, block: BlockNotes, given: Arguments, result: Any) -> None:
        """Handle a cast, and store the result if it is a copy of the router's weight."""
        if block.router is not None and isinstance(result, Tensor) and self._is_router_weight(block, given.args[0]):
            self._casts.append(result)

    def _is_router_weight(self, block: BlockNotes, operand: Any) -> bool:
        pointer = storage_pointer(operand)
        if pointer is None:
            return False
        return any(pointer == storage_pointer(weight) for weight in (block.router_weight, *self._casts))


_NOTES: dict[str, Callable[[BlockCalls, BlockNotes, Arguments, Any], None]] = {
    "scaled_dot_product_attention": BlockCalls.on_fused_attention,
    "softmax": BlockCalls.on_softmax,
    "multi_head_attention_forward": BlockCalls.on_packed_attention,
    **dict.fromkeys(("linear", "matmul", "mm", "addmm"), BlockCalls.on_projection),
    **dict.fromkeys(("topk", "argmax", "max"), BlockCalls.on_choice),
    "sub": BlockCalls.on_difference,
    **dict.fromkeys(CASTS, BlockCalls.on_cast),
}


def _is_own_attention(block: BlockNotes, q: Any, k: Any) -> bool:
    """Return whether queries and keys are those of the block's tokens, head by head."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.ndim not in (3, 4) or q.shape[-2] != k.shape[-2]:
        return False
    n_rows, rest = divmod(block.n_tokens, q.shape[-2])
    return not rest and q.shape[0] % n_rows == 0 and (q.ndim == 3 or q.shape[0] == n_rows)


def _packed_mask(mask: Tensor | None, padding: Tensor | None, n_rows: int) -> Tensor | None:
    """Return the sum of the masks as added to the scores; in boolean masks True marks hidden tokens."""
    parts = []
    if mask is not None:
        mask = mask.reshape(n_rows, -1, *mask.shape[-2:]) if mask.ndim == 3 else mask[None, None]
        parts.append(mask)
    if padding is not None:
        parts.append(padding[:, None, None, :])
    as_added = [
        torch.zeros(part.shape, device=part.device).masked_fill(part, -torch.inf) if part.dtype == torch.bool else part
        for part in parts
    ]
    return sum(as_added[1:], as_added[0]) if as_added else None
