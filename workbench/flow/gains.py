"""One forward and one backward pass through a model, with the measurements of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.flow.branch_reader import BlockStream, BranchReader, WatchedState, relative_effective_rank, token_cosine
from workbench.models.anatomy import Anatomy
from workbench.models.batches import TokenSelection
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import Option, config_options, known_options, run_model, visible_attention
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed, watch
from workbench.models.router_weights import Router
from workbench.monitors.attention_calls import BlockCalls, BlockNotes, Logits, Products
from workbench.monitors.matrices import widened

#: Function from logits and targets to a 0-dim tensor.
Loss = Callable[[Tensor, Tensor], Tensor]


def end_of(output: Any, inputs: Any, targets: Any, loss: Loss | None, *, seed: int) -> tuple[Tensor, str]:
    """Return the scalar whose gradient is computed, and a description of it.

    Without targets these are the next tokens, if the model returns logits of its tokens; otherwise the scalar is the
    output along a random direction. Without a loss it is `token_loss`.
    """
    result = _result_in(output)
    if result is None:
        raise SnapshotError("The model returned no floating-point tensor that depends on blocks; pass one that does.")
    what = "given targets"
    if targets is None and (tokens := _tokens_in(inputs)) is not None and _predicts(result, tokens):
        targets, what = _next_tokens(tokens, inputs), "next tokens"
    if targets is None:
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(result.shape, generator=generator).to(result)
        return (result * direction).sum(), f"random direction at the output, seed {seed}"
    try:
        value = (loss or token_loss)(result if loss is None else prediction_of(output), targets.to(result.device))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SnapshotError(
            f"The loss of an output of shape {tuple(result.shape)} on targets of shape {tuple(targets.shape)} failed "
            f"({first}); pass targets that fit these inputs, or the loss for them."
        ) from error
    if value.numel() != 1:
        raise SnapshotError(f"The loss has shape {tuple(value.shape)}, expected a single number; return its mean.")
    return value.squeeze(), f"loss on {what}"


def _result_in(output: Any) -> Tensor | None:
    """Return the logits of an output, or its first tensor that has a gradient; None if there is none."""
    if isinstance(output, Mapping):
        candidates = [output.get("logits"), *output.values()]
    elif isinstance(output, tuple | list):
        candidates = list(output)
    else:
        candidates = [getattr(output, "logits", None), output]
    fitting = [t for t in candidates if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    return fitting[0] if fitting else None


def _tokens_in(inputs: Any) -> Tensor | None:
    """Return the token ids of inputs, shape (sequence, token); of an encoder and decoder, those of the decoder."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    elif isinstance(inputs, tuple | list):
        inputs = inputs[0] if inputs else None
    is_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point() and inputs.ndim == 2
    return inputs if is_tokens and inputs.shape[1] > 1 else None


def _predicts(result: Tensor, tokens: Tensor) -> bool:
    """Return whether an output may be logits of the next token at every position."""
    return result.ndim == 3 and result.shape[:2] == tokens.shape and result.shape[2] > int(tokens.max())


def _next_tokens(tokens: Tensor, inputs: Any) -> Tensor:
    """Return the tokens shifted by one; -100 after the last token and for padding."""
    targets = torch.full_like(tokens, -100, dtype=torch.int64)
    targets[:, :-1] = tokens[:, 1:]
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        hidden = mask[:, 1:] == 0
        targets[:, :-1][hidden] = -100
    return targets


#: Scores at or below this value are due to a mask.
_MASKED = -1e4


@dataclass(frozen=True)
class Sharpness:
    """Deviation of the attention of one layer from uniform attention."""

    #: Standard deviation of a token's logits over the tokens that it attends to, RMS over tokens, (head,).
    logit_std: Tensor
    #: Attention to the first token of the sequence, mean over the tokens that can attend to it and to at least one
    #: other token, (head,); NaN if there are none.
    sink_fraction: Tensor


def sharpness(logits: Tensor, is_visible: Tensor, rows: Tensor | None = None) -> Sharpness:
    """Return scale of the logits (batch, head, token, token) of a softmax, and attention to the first token."""
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
    """Return the margin of the choice of experts from logits (token, expert) and choices (token, k), mean over tokens.

    It is the softmax probability of the least probable chosen expert minus that of the most probable other expert:
    negative where a correction changes the choice, NaN if all experts are chosen.
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


#: Options of a Hugging Face config. Nothing is cached for later tokens, and experts are called separately, because
#: their fused kernel has no second derivative and does not support float64. Without the suffix "_internal", nested
#: configs would be set as well, and their own values would not be restored.
_PLAIN = {"use_cache": False, "_experts_implementation_internal": "eager"}


@dataclass
class BlockRecord:
    """Measurements of one call of a block."""

    entering: WatchedState  # state that entered
    leaving: WatchedState  # state that left
    cosine: list[float]  # `token_cosine` of the state that entered and, in the last block, of the state that left
    rank: list[float]  # `relative_effective_rank` of the same states
    stream: BlockStream  # additions inside the block
    notes: BlockNotes  # measurements of attention and routing
    sharpness: Sharpness | None  # sharpness of the attention; None if it was not observed


class FlowPass:
    """Forward pass of a model on one batch, and backward pass to the state that enters its first block.

    The model runs in eval mode. Gradients of parameters are not computed, and the model is not changed. ``cotangent``
    describes the quantity that is differentiated: if the loss has no gradient, as with an output head of zeros, it is
    the output of the last block along a random direction. ``failure`` is why there are no gradients; empty if there
    are. ``n_tokens`` counts the token states that are measured at each boundary.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        batch: Any,
        *,
        targets: Any = None,
        loss: Loss | None = None,
        routers: Mapping[int, Router] | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.sites, self.batch, self.routers = model, anatomy.sites, batch, routers or {}
        self.layout = anatomy.layout
        self.n_tokens, self.failure = 0, ""
        self._records: dict[int, BlockRecord] = {}
        self._begun: dict[int, tuple[WatchedState, BlockStream, BlockNotes, float, float]] = {}
        self._calls, self._branches = FlowCalls(), BranchReader()
        self._start: Tensor | None = None
        self._end: Tensor | None = None
        with undisturbed(model), config_options(eager_options(model)), torch.enable_grad():
            hooks = BlockHooks(self.sites, self._enter, self._leave)
            parts = watch((part, self._branches.leave, False) for part in hooks.parts)
            with hooks, parts, self._calls, self._branches:
                output = run_model(model, batch)
            silent = [site.name for layer, site in enumerate(self.sites) if layer not in self._records]
            if silent:
                raise SnapshotError(f"No states passed {silent[0]}; pass inputs that reach every block.")
            end, self.cotangent = end_of(output, batch, targets, loss, seed=seed)
            try:
                self._walk_back(end, seed)
            except (RuntimeError, NotImplementedError) as error:  # such as a state that is overwritten
                self.failure = str(error).strip().splitlines()[0].rstrip(".")
            self._start = self._end = None
        self.blocks = [self._records[layer] for layer in range(len(self.sites))]

    def _walk_back(self, end: Tensor, seed: int) -> None:
        """Run the backward pass through all watched states."""
        first, last = self._start, self._end
        if first is None or last is None:  # no block ran, which raised an exception before
            return
        torch.autograd.grad(end, first, allow_unused=True, retain_graph=True)
        if self._records[len(self.sites) - 1].leaving.gradient_norm > 0 or not last.requires_grad:
            return
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(last.shape, generator=generator).to(last)
        torch.autograd.grad(last, first, direction, allow_unused=True)
        self.cotangent = f"random direction at the last block, seed {seed} (no gradient of {self.cotangent})"

    def _enter(self, call: BlockCall) -> Tensor:
        state = call.state_in
        if self._start is None:  # the first block that runs: nothing before it needs a gradient
            self._start = state.detach().requires_grad_()
            state = self._start
        with torch._C.DisableTorchFunction():
            rows = self._rows_of(state.shape[:-1])
            entering = WatchedState(state, rows)
            # The block receives its own copy, which it may write to and which differs from the previous state.
            state = state.clone()
            router = self.routers.get(call.layer)
            weight = self.model.get_parameter(router.name) if router else None
            notes = BlockNotes(state.shape[:-1], rows, True, router, weight, batch_axis=self.layout.states or 0)
            stream = self._branches.begin(call.site.module, state, entering, rows)
            cosine, rank = self._cosine(state, rows), relative_effective_rank(state, rows)
        self._begun[call.layer] = entering, stream, notes, cosine, rank
        self._calls.block = notes
        return state

    def _leave(self, call: BlockCall) -> None:
        self._calls.block = None
        entering, stream, notes, cosine, rank = self._begun.pop(call.layer)
        state = call.state_out
        with torch._C.DisableTorchFunction():
            self._branches.end(state)
            leaving = WatchedState(state, stream.rows)
            sharpness = self._calls.sharpness.pop(id(notes), None)
            record = BlockRecord(entering, leaving, [cosine], [rank], stream, notes, sharpness)
            if call.layer == len(self.sites) - 1:
                self._end = state
                record.cosine.append(self._cosine(state, stream.rows))
                record.rank.append(relative_effective_rank(state, stream.rows))
        self._records[call.layer] = record

    def _cosine(self, state: Tensor, rows: Tensor | None) -> float:
        axis = self.layout.states or 0
        return token_cosine(state.movedim(axis, 0), None if rows is None else rows.movedim(axis, 0))

    def _rows_of(self, leading: torch.Size) -> Tensor | None:
        """Return a boolean mask of the tokens that are no padding, of the given shape; None if all are."""
        chosen = TokenSelection(None, layout=self.layout).choose(leading, self.batch)
        self.n_tokens = len(chosen)
        if len(chosen) == leading.numel():
            return None
        rows = torch.zeros(leading.numel(), dtype=torch.bool)
        rows[chosen] = True
        return rows.view(leading)


def eager_options(model: nn.Module) -> list[Option]:
    """Return the options that keep a Hugging Face model from optimized kernels, which hide intermediate values."""
    return [*known_options(model, _PLAIN), *visible_attention(model)]
