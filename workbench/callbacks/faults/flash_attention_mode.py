"""Attention with the backward pass of flash attention, in which two tensors may lose bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from workbench.models.calling import call_model
from workbench.models.probing import undisturbed, watch

#: Torch disables the mode while these functions, and those that they call, run.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
ROUNDINGS = ("truncate", "nearest", "cast")


@dataclass(frozen=True)
class Cut:
    """The tensors of the backward pass that lose bits, and how many.

    Attributes:
        n_bits: Number k of bits, see `cut_low_bits`.
        rounding: Kind of rounding, see `cut_low_bits`.
        output: Whether the saved output O is cut.
        gradient: Whether the incoming gradient dO is cut, and with it everything computed from it.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> cut = wb.faults.Cut(n_bits=8, output=True)
        >>> q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
        >>> tuple(wb.faults.flash_attention(q, q, q, cut=cut).shape)
        (1, 1, 4, 8)
    """

    n_bits: int = 0
    rounding: str = "truncate"
    output: bool = False
    gradient: bool = False


NO_CUT = Cut()


def cut_low_bits(x: Tensor, n_bits: int, rounding: str = "truncate") -> Tensor:
    """Values as bfloat16 without their lowest bits.

    Args:
        x: Floating-point values.
        n_bits: Number k in 0..8 of the 16 bits that become 0; the lowest seven are the mantissa, the eighth is the
            lowest bit of the exponent. 0 with ``"truncate"`` or ``"nearest"``: ``x`` itself, not even cast.
        rounding: Kind of rounding. ``"truncate"``: cast to bfloat16 (to the nearest, as torch does), then ``int16 & (-1
            << k)``, so that every value moves towards zero, which is a bias. ``"nearest"``: to the nearest value
            without these bits, a tie to the even one; nearly without bias for k up to 6. ``"cast"``: the cast alone.

    Returns:
        Like ``x``, in its dtype; values that are not finite are unchanged.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.faults.cut_low_bits(torch.tensor([1.2345, -1.2345]), n_bits=4).tolist()
        [1.125, -1.125]
    """
    if n_bits == 0 and rounding != "cast":
        return x
    short = x.to(torch.bfloat16)
    if n_bits == 0:
        return short.to(x.dtype)
    bits = short.view(torch.int16)
    if rounding == "nearest":
        bits = bits + ((1 << (n_bits - 1)) - 1) + ((bits >> n_bits) & 1)
    bits = bits & (-1 << n_bits)
    return torch.where(short.isfinite(), bits.view(torch.bfloat16), short).to(x.dtype)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cut: Cut = NO_CUT,
) -> Tensor:
    """Attention as by ``torch.nn.functional.scaled_dot_product_attention``, with its arguments and ``cut``.

    The backward pass is that of flash attention (Dao et al. 2022, arXiv:2205.14135): delta = rowsum(dO * O),
    dS = P * (dP - delta), with O as the forward pass left it. Inside, everything is float32 (float64 for float64),
    whatever the inputs' dtype; P is kept, so memory grows with the square of the number of tokens.

    Args:
        query: Queries, shape (..., token, feature).
        key: Keys, shape (..., token seen, feature).
        value: Values, shape (..., token seen, feature of values).
        attn_mask: Mask as in torch: bool (True: is seen), or numbers added to the scores.
        dropout_p: Share of the attention weights to leave out, drawn from torch's generator.
        is_causal: Whether each token sees only those up to itself.
        scale: Factor on the scores; None: 1 / sqrt(feature).
        enable_gqa: Whether there may be fewer heads of keys and values than of queries.
        cut: Tensors that lose bits in the backward pass. Without a cut the gradients are exact.

    Returns:
        Shape (..., token, feature of values), in the dtype of the inputs, or autocast's.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
        >>> plain = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(wb.faults.flash_attention(q, q, q, is_causal=True), plain, atol=1e-5)
        True
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    dtype = torch.promote_types(query.dtype, torch.float32)
    n_tokens, n_seen = query.shape[-2], key.shape[-2]
    bias = None
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        bias = _bias_of(attn_mask, dtype) if is_choice else attn_mask.to(dtype)
    if is_causal:
        seen = torch.ones(n_tokens, n_seen, dtype=torch.bool, device=query.device).tril()
        bias = _bias_of(seen, dtype) if bias is None else bias + _bias_of(seen, dtype)
    keep = None
    if dropout_p:
        shape = (*query.shape[:-1], n_seen)
        keep = (torch.rand(shape, dtype=dtype, device=query.device) >= dropout_p) / (1 - dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _FlashAttention.apply(query, key, value, bias, keep, scale, cut)


class FlashAttentionMode(TorchFunctionMode):
    """Context in which torch's ``scaled_dot_product_attention`` is `flash_attention`; nothing is patched.

    Torch disables a mode inside its own functions that are written in Python. That is why attention inside
    ``torch.nn.MultiheadAttention`` is out of reach, and why gradient checkpointing, which runs modules again within the
    backward pass, needs `reaches_recomputation`.

    Attributes:
        cut: Tensors that lose bits in the backward passes of the following forward passes.
        n_calls: Number of times that attention was computed.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> q = torch.randn(1, 1, 4, 8)
        >>> with wb.faults.FlashAttentionMode() as mode:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> mode.n_calls
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = NO_CUT
        self.n_calls = 0
        self._is_in_backward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute attention here, and everything else unchanged."""
        if func is functional.scaled_dot_product_attention:
            self.n_calls += 1
            return flash_attention(*args, **(kwargs or {}), cut=self.cut)
        if func in _BACKWARD:
            return self._backward(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def reaches_recomputation(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Be active also when these modules run again within a backward pass.

        Args:
            modules: Modules that call attention themselves; see `attention_modules`.

        Returns:
            Handles of the hooks that do it, which the caller removes.
        """
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(self._enter))
            # always_call: recomputation is cut short by an exception once it has what it needs.
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        return handles

    def _backward(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        outer, self._is_in_backward = self._is_in_backward, True
        try:
            return func(*args, **kwargs)
        finally:
            self._is_in_backward = outer

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if self._is_in_backward:
            self.__enter__()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._is_in_backward:
            self.__exit__(None, None, None)


def attention_modules(model: nn.Module, inputs: Any) -> list[nn.Module]:
    """Modules that call torch's ``scaled_dot_product_attention`` themselves, found by running the model once.

    Args:
        model: Model to run; it is left unchanged.
        inputs: A few examples, on the model's device.
    """
    mode = FlashAttentionMode()
    running: list[tuple[nn.Module, int]] = []
    found: dict[nn.Module, None] = {}

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.append((module, mode.n_calls))

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        _, n_calls_before = running.pop()
        if mode.n_calls > n_calls_before:
            found.setdefault(module)
            # Enclosing modules did not make these calls themselves.
            running[:] = [(outer, n_calls + mode.n_calls - n_calls_before) for outer, n_calls in running]

    requests = [(module, hook, hook is enter) for module in model.modules() for hook in (enter, leave)]
    with undisturbed(model), watch(requests), mode:
        call_model(model, inputs)
    return list(found)


class _FlashAttention(torch.autograd.Function):
    """Softmax attention; see `flash_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, keep: Any, scale: float, cut: Cut) -> Tensor:
        with _without_autocast(q):
            weights = _softmax(q, k, bias, scale)
            out = ((weights if keep is None else weights * keep) @ v.to(weights.dtype)).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, keep, weights, out)
        ctx.scale, ctx.cut = scale, cut
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, keep, weights, out = ctx.saved_tensors
        dtype, cut = weights.dtype, ctx.cut
        with _without_autocast(q):
            if torch.is_grad_enabled():  # for a second derivative, the weights need their graph
                weights = _softmax(q, k, bias, ctx.scale)
            out = _lossy(out, cut) if cut.output else out
            d_out = _lossy(d_out, cut) if cut.gradient else d_out
            out, d_out = out.to(dtype), d_out.to(dtype)
            delta = (d_out * out).sum(-1, keepdim=True)
            d_weights = d_out @ v.to(dtype).mT
            mixing = weights
            if keep is not None:
                mixing, d_weights = weights * keep, d_weights * keep
            d_scores = weights * (d_weights - delta)
            d_bias = d_scores.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None
            d_scores = d_scores * ctx.scale
            d_q, d_k = (d_scores @ k.to(dtype)).to(q.dtype), (d_scores.mT @ q.to(dtype)).to(k.dtype)
            return d_q, d_k, (mixing.mT @ d_out).to(v.dtype), d_bias, None, None, None


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention weights, rows adding up to 1; rows of tokens that see nothing are 0."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * scale) @ k.to(dtype).mT
    if bias is None:
        return scores.softmax(-1)
    is_blind = (bias == -math.inf).all(-1, keepdim=True)
    return (scores + bias).softmax(-1).masked_fill(is_blind, 0.0)


def _lossy(x: Tensor, cut: Cut) -> Tensor:
    lossy = cut_low_bits(x.detach(), cut.n_bits, cut.rounding)
    # Rounding has no useful derivative; for a second derivative, the cut counts as the identity.
    return x + (lossy - x).detach() if torch.is_grad_enabled() and x.requires_grad else lossy


def _bias_of(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill(~is_seen, -math.inf)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
