"""Attention with the backward pass of flash attention, in which low bits of two tensors may be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from workbench.callbacks.faults.fault import Fault
from workbench.errors import OptionError
from workbench.models.calling import call_model
from workbench.models.probing import undisturbed, watch
from workbench.option_checks import checked
from workbench.option_kinds import at_least, at_most, below, one_of

#: Functions during which torch disables the mode.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
#: Bits of bfloat16: seven are the mantissa, and the eighth is of the exponent.
Bits = Annotated[int, at_least(0), at_most(8)]
ROUNDINGS = ("truncate", "nearest", "cast")


@dataclass(frozen=True)
class Cut:
    """The tensors of the backward pass whose low bits are cut, and the number of bits.

    Attributes:
        n_bits: Number of bits, see `cut_low_bits`.
        rounding: Kind of rounding, see `cut_low_bits`.
        output: Whether the saved output O is cut.
        gradient: Whether the incoming gradient dO is cut, which affects all that is computed from it.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> cut = wb.faults.Cut(n_bits=8, output=True)
        >>> q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
        >>> tuple(wb.faults.flash_attention(q, q, q, cut=cut).shape)
        (1, 1, 4, 8)

    See Also:
        `workbench.faults.flash_attention`: Takes the cut.
        `workbench.faults.LowPrecisionAttention`: Injects it into training.
    """

    n_bits: Bits = 0
    rounding: str = "truncate"
    output: bool = False
    gradient: bool = False


NO_CUT = Cut()


@checked
def cut_low_bits(x: Tensor, n_bits: Bits, rounding: Annotated[str, one_of(ROUNDINGS)] = "truncate") -> Tensor:
    """Round values to bfloat16 and set their lowest bits to zero.

    Args:
        x: Floating-point values.
        n_bits: Number k of the 16 bits to set to zero, 0 to 8. The lowest seven are the mantissa, the eighth is the
            lowest bit of the exponent. With 0 and ``"truncate"`` or ``"nearest"``, ``x`` is returned without a cast.
        rounding: Kind of rounding. ``"truncate"`` casts to bfloat16 (round to nearest, as torch does) and then applies
            ``int16 & (-1 << k)``, which moves every value towards zero and is therefore biased. ``"nearest"`` rounds to
            the nearest value without these bits, ties to even, with almost no bias for k up to 6. ``"cast"`` is the
            cast alone.

    Returns:
        Values of the shape and dtype of ``x``; values that are not finite are unchanged.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.faults.cut_low_bits(torch.tensor([1.2345, -1.2345]), n_bits=4).tolist()
        [1.125, -1.125]

    See Also:
        `workbench.faults.LowPrecisionAttention`: Cuts bits in the backward pass of attention.
        `workbench.faults.LowPrecisionReduction`: Cuts bits in the reduction of gradients.
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
    dropout_p: Annotated[float, at_least(0), below(1)] = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cut: Cut = NO_CUT,
) -> Tensor:
    """Compute attention like ``torch.nn.functional.scaled_dot_product_attention``, optionally with a cut of bits.

    The backward pass is that of flash attention (Dao et al. 2022, arXiv:2205.14135): delta = rowsum(dO * O) and
    dS = P * (dP - delta), with the output O of the forward pass. All internal computations are in float32 (in float64
    for float64 inputs). P is stored, so the memory grows with the square of the number of tokens.

    Args:
        query: Queries, shape (..., token, feature).
        key: Keys, shape (..., key token, feature).
        value: Values, shape (..., key token, value feature).
        attn_mask: Mask as in torch: bool (True: the token is attended to), or numbers that are added to the scores.
        dropout_p: Dropout probability of the attention weights, drawn from torch's generator.
        is_causal: Whether each token attends only to tokens up to itself.
        scale: Factor on the scores; None for 1 / sqrt(feature).
        enable_gqa: Whether there may be fewer heads of keys and values than of queries.
        cut: Tensors whose low bits are cut in the backward pass. Without a cut the gradients are exact.

    Returns:
        Output of shape (..., token, value feature), in the dtype of the inputs, or in that of autocast.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
        >>> plain = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(wb.faults.flash_attention(q, q, q, is_causal=True), plain, atol=1e-5)
        True

    See Also:
        `workbench.faults.FlashAttentionMode`: Replaces the attention of torch by this one.
        `workbench.faults.Cut`: Describes the cut of bits.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    dtype = torch.promote_types(query.dtype, torch.float32)
    n_tokens, n_keys = query.shape[-2], key.shape[-2]
    bias = None
    if attn_mask is not None:
        bias = _bias_of(attn_mask, dtype) if attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if is_causal:
        is_past = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=query.device).tril()
        bias = _bias_of(is_past, dtype) if bias is None else bias + _bias_of(is_past, dtype)
    keep = None
    if dropout_p:
        shape = (*query.shape[:-1], n_keys)
        keep = (torch.rand(shape, dtype=dtype, device=query.device) >= dropout_p) / (1 - dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _FlashAttention.apply(query, key, value, bias, keep, scale, cut)


class FlashAttentionMode(TorchFunctionMode):
    """Context in which `flash_attention` replaces torch's ``scaled_dot_product_attention``, without patching torch.

    Torch disables a mode inside its own Python functions. The mode therefore does not apply to attention inside
    ``torch.nn.MultiheadAttention``. For gradient checkpointing, which runs modules again within the backward pass, it
    needs `register_recomputation_hooks`.

    Attributes:
        cut: Tensors whose low bits are cut in the backward passes of the following forward passes.
        n_calls: Number of times that attention was computed.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> q = torch.randn(1, 1, 4, 8)
        >>> with wb.faults.FlashAttentionMode() as mode:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> mode.n_calls
        1

    See Also:
        `workbench.faults.flash_attention`: The attention that is used.
        `workbench.faults.LowPrecisionAttention`: The fault that uses the mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = NO_CUT
        self.n_calls = 0
        self._is_in_backward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention; call all other functions unchanged."""
        if func is functional.scaled_dot_product_attention:
            self.n_calls += 1
            return flash_attention(*args, **(kwargs or {}), cut=self.cut)
        if func in _BACKWARD:
            return self._backward(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def register_recomputation_hooks(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Activate the mode also while modules are recomputed within a backward pass.

        Returns:
            Handles of the hooks, which the caller removes.
        """
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(self._enter))
            # always_call, as an exception ends a recomputation early once it has all tensors.
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
    """Find the modules that call torch's ``scaled_dot_product_attention`` directly, by running the model once."""
    mode = FlashAttentionMode()
    running: list[tuple[nn.Module, int]] = []
    found: dict[nn.Module, None] = {}

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.append((module, mode.n_calls))

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        _, n_calls_before = running.pop()
        if mode.n_calls > n_calls_before:
            found.setdefault(module)
            # These calls do not count for the enclosing modules.
            running[:] = [(outer, n_calls + mode.n_calls - n_calls_before) for outer, n_calls in running]

    requests = [(module, hook, hook is enter) for module in model.modules() for hook in (enter, leave)]
    with undisturbed(model), watch(requests), mode:
        call_model(model, inputs)
    return list(found)


class _FlashAttention(torch.autograd.Function):
    """Autograd function of `flash_attention`."""

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
            if torch.is_grad_enabled():  # second derivatives need the graph of the attention weights
                weights = _softmax(q, k, bias, ctx.scale)
            out = _lossy(out, cut) if cut.output else out
            d_out = _lossy(d_out, cut) if cut.gradient else d_out
            out, d_out = out.to(dtype), d_out.to(dtype)
            delta = (d_out * out).sum(-1, keepdim=True)
            d_weights = d_out @ v.to(dtype).mT
            dropped_weights = weights
            if keep is not None:
                dropped_weights, d_weights = weights * keep, d_weights * keep
            d_scores = weights * (d_weights - delta)
            d_bias = d_scores.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None
            d_scores = d_scores * ctx.scale
            d_q, d_k = (d_scores @ k.to(dtype)).to(q.dtype), (d_scores.mT @ q.to(dtype)).to(k.dtype)
            return d_q, d_k, (dropped_weights.mT @ d_out).to(v.dtype), d_bias, None, None, None


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return the attention weights, with rows that sum to 1, or are 0 for tokens that attend to nothing."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * scale) @ k.to(dtype).mT
    if bias is None:
        return scores.softmax(-1)
    is_fully_masked = (bias == -math.inf).all(-1, keepdim=True)
    return (scores + bias).softmax(-1).masked_fill(is_fully_masked, 0.0)


def _lossy(x: Tensor, cut: Cut) -> Tensor:
    """Return a tensor with its low bits cut."""
    lossy = cut_low_bits(x.detach(), cut.n_bits, cut.rounding)
    # Rounding has no useful derivative; in second derivatives the cut is treated as the identity.
    return x + (lossy - x).detach() if torch.is_grad_enabled() and x.requires_grad else lossy


def _bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a Boolean mask as numbers to add to the scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_TARGETS = {"output": "O", "gradient": "dO"}
_WHAT = {"truncate": "are cut", "nearest": "are rounded off"}


@dataclass(kw_only=True, eq=False)
class LowPrecisionAttention(Fault):
    """Fault: the backward pass of attention uses its output O and its gradient dO with fewer bits.

    Truncation towards zero makes delta = rowsum(dO * O) too small, which biases the gradients of queries and keys.
    In a run with this fault, attention is computed by `workbench.faults.flash_attention` in every step, with k = 0
    while the fault is off. Switching therefore changes only the bits. A control run has the same list of faults with
    this one off, or with ``n_bits=0``, which yields the same numbers.

    The fault replaces ``torch.nn.functional.scaled_dot_product_attention``, which is used by the models of the zoo and
    by Hugging Face models loaded with ``attn_implementation="sdpa"``. It also acts in the gradient checkpointing of
    modules. It does not act in the recomputation of a function inside the attention module, nor within
    ``torch.nn.MultiheadAttention``; a model without any other attention raises an error.

    Attributes:
        n_bits: Number k of bits that are cut, 0 to 8; see `workbench.faults.cut_low_bits`.
        targets: Tensors that are cut: ``"output"`` (O), ``"gradient"`` (dO and all that is computed from it), or both.
        rounding: ``"truncate"`` is the fault. ``"nearest"`` is a control that cuts as many bits with almost no bias.
            ``"cast"`` (with ``n_bits=0``) is the cast to bfloat16 alone.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LowPrecisionAttention(n_bits=8, start=1)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault]):
        ...     print(record.step, record.active_faults)
        0 ()
        1 ('low_precision_attention',)

    See Also:
        `workbench.faults.flash_attention`: The attention of a run with this fault.
        `workbench.probes.precision_errors`: Detects errors of the arithmetic.
    """

    kind: ClassVar[str] = "low_precision_attention"
    meaning: ClassVar[str] = "bits of O and dO are lost in the backward pass of attention"
    n_bits: Bits = 8
    targets: str | Collection[str] = ("output", "gradient")
    rounding: Annotated[str, one_of(ROUNDINGS)] = "truncate"

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not targets or any(target not in _TARGETS for target in targets):
            raise OptionError.of("targets", self.targets, "'output', 'gradient' or both")
        self.targets = tuple(name for name in _TARGETS if name in targets)
        if self.rounding == "cast" and self.n_bits:
            raise OptionError.of("n_bits", self.n_bits, "0 with rounding='cast', which cuts no bits")
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        which = " and ".join(_TARGETS[target] for target in self.targets)
        if self.rounding == "cast":
            return f"{which} are cast to bfloat16 in the backward pass"
        n_bits = f"{self.n_bits} {'bit' if self.n_bits == 1 else 'bits'}"
        return f"{n_bits} of {which} {_WHAT[self.rounding]} in the backward pass"

    @property
    def cut(self) -> Cut:
        """The cut of bits while the fault is on."""
        return Cut(self.n_bits, self.rounding, "output" in self.targets, "gradient" in self.targets)
