"""One pass forward and one backward through a model, and the measurements of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.flow.attention_sharpness import FlowCalls, Sharpness
from workbench.flow.branch_reader import BlockStream, BranchReader, WatchedState
from workbench.flow.collapse import effective_rank_share, token_cosine
from workbench.flow.gradient_targets import Loss, end_of
from workbench.models.anatomy import Anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import run_foreign
from workbench.models.config_options import Option, config_options, known_options, visible_attention
from workbench.models.probing import undisturbed, watch
from workbench.models.router_weights import Router
from workbench.models.token_selection import TokenSelection
from workbench.monitors.attention_calls import BlockNotes

#: Options of a Hugging Face config: no keys, values or states are kept for tokens to come, and experts are called one
#: by one (their fused kernel has no second derivative, nor float64). The suffix: without it, configs inside of this one
#: are set as well, and would not get their own value back.
_PLAIN = {"use_cache": False, "_experts_implementation_internal": "eager"}


@dataclass
class BlockRecord:
    """The measurements of one call of a block.

    Attributes:
        entering: State that entered.
        leaving: State that left.
        cosine: `token_cosine` of the two.
        rank: `effective_rank_share` of the two.
        stream: Additions inside the block.
        notes: Measurements of attention and routing.
        sharpness: Sharpness of its attention; None: not seen.
    """

    entering: WatchedState
    leaving: WatchedState
    cosine: list[float]
    rank: list[float]
    stream: BlockStream
    notes: BlockNotes
    sharpness: Sharpness | None


class FlowPass:
    """Runs a model on one batch, forward and back to the state that enters its first block.

    The model runs in eval mode; parameters get no gradients, and everything is left as it was.

    Args:
        model: Module to run.
        anatomy: Anatomy of its blocks.
        batch: Batch as `call_model` takes it.
        targets: Targets as for `end_of`.
        loss: Loss as for `end_of`.
        routers: Map from layer to router.
        seed: Seed as for `end_of`.

    Attributes:
        blocks: Records, one per layer.
        cotangent: Quantity that is differentiated. Where the loss has none, as with an output head of zeros, it is a
            random direction at the states that leave the last block.
        n_tokens: Number of token states that count at each boundary.
        failure: Reason why there are no gradients; empty if there are.

    Raises:
        SnapshotError: If a block is not reached, or the output gives no gradient.
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
        with undisturbed(model), config_options(plain_options(model)), torch.enable_grad():
            hooks = BlockHooks(self.sites, self._enter, self._leave)
            parts = watch((part, self._branches.leave, False) for part in hooks.parts)
            with hooks, parts, self._calls, self._branches:
                output = run_foreign(model, batch)
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
        if first is None or last is None:  # no block ran, which is refused before
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
            # A tensor of the block's own: it may write into it, and the alias is distinct from the previous state.
            state = state.clone()
            router = self.routers.get(call.layer)
            weight = self.model.get_parameter(router.name) if router else None
            notes = BlockNotes(state.shape[:-1], rows, True, router, weight, batch_axis=self.layout.states or 0)
            stream = self._branches.begin(call.site.module, state, entering, rows)
            cosine, rank = self._cosine(state, rows), effective_rank_share(state, rows)
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
                record.rank.append(effective_rank_share(state, stream.rows))
        self._records[call.layer] = record

    def _cosine(self, state: Tensor, rows: Tensor | None) -> float:
        axis = self.layout.states or 0
        return token_cosine(state.movedim(axis, 0), None if rows is None else rows.movedim(axis, 0))

    def _rows_of(self, leading: torch.Size) -> Tensor | None:
        """Which tokens are no padding, boolean, of that shape; None: all."""
        chosen = TokenSelection(None, layout=self.layout).choose(leading, self.batch)
        self.n_tokens = len(chosen)
        if len(chosen) == leading.numel():
            return None
        rows = torch.zeros(leading.numel(), dtype=torch.bool)
        rows[chosen] = True
        return rows.view(leading)


def plain_options(model: nn.Module) -> list[Option]:
    """Context that keeps a Hugging Face model from using optimized kernels.

    They hide their intermediate values, and most have neither a second derivative nor float64.
    """
    return [*known_options(model, _PLAIN), *visible_attention(model)]
