"""One forward and one backward pass through a model, with the measurements of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.flow.attention_sharpness import FlowCalls, Sharpness
from workbench.flow.branch_reader import BlockStream, BranchReader, WatchedState
from workbench.flow.collapse import relative_effective_rank, token_cosine
from workbench.flow.gradient_targets import Loss, end_of
from workbench.models.anatomy import Anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import run_model
from workbench.models.config_options import Option, config_options, known_options, visible_attention
from workbench.models.probing import undisturbed, watch
from workbench.models.router_weights import Router
from workbench.models.token_selection import TokenSelection
from workbench.monitors.attention_calls import BlockNotes

#: Options of a Hugging Face config. Nothing is cached for later tokens, and experts are called separately, because
#: their fused kernel has no second derivative and does not support float64. Without the suffix "_internal", nested
#: configs would be set as well, and their own values would not be restored.
_PLAIN = {"use_cache": False, "_experts_implementation_internal": "eager"}


@dataclass
class BlockRecord:
    """Measurements of one call of a block.

    Attributes:
        entering: State that entered.
        leaving: State that left.
        cosine: `token_cosine` of the state that entered and, in the last block, of the state that left.
        rank: `relative_effective_rank` of the same states.
        stream: Additions inside the block.
        notes: Measurements of attention and routing.
        sharpness: Sharpness of the attention; None if it was not observed.
    """

    entering: WatchedState
    leaving: WatchedState
    cosine: list[float]
    rank: list[float]
    stream: BlockStream
    notes: BlockNotes
    sharpness: Sharpness | None


class FlowPass:
    """Forward pass of a model on one batch, and backward pass to the state that enters its first block.

    The model runs in eval mode. Gradients of parameters are not computed, and the model is not changed.

    Attributes:
        blocks: Records, one per layer.
        cotangent: Description of the quantity that is differentiated. If the loss has no gradient, as with an output
            head of zeros, it is the output of the last block along a random direction.
        n_tokens: Number of token states that are measured at each boundary.
        failure: Reason why there are no gradients; empty if there are.
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
    """Return the options that keep a Hugging Face model from using optimized kernels.

    Such kernels hide their intermediate values, and most support neither second derivatives nor float64.
    """
    return [*known_options(model, _PLAIN), *visible_attention(model)]
