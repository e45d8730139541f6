"""Hooks on, moments out, hooks off: the moments of the residual stream at every block, without storing it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import SnapshotError
from workbench.koopman.moments import SnapshotMoments
from workbench.models.anatomy import Anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks, depth_error, refuse_unknown
from workbench.models.calling import on_device_of, run_foreign
from workbench.models.probing import undisturbed, watch
from workbench.models.site import Site
from workbench.models.wrapping import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.models.batches import Batches, TokenSelection


def capture_moments(
    model: nn.Module,
    anatomy: Anatomy,
    batches: Batches,
    selection: TokenSelection,
    *,
    after_batch: Callable[[int], None] = lambda _: None,
) -> list[SnapshotMoments]:
    """Run a model over batches and collect the moments of every block's input and output.

    The model computes what it computes anyway: hooks return None and are always removed; training mode and
    random state are as before.

    Args:
        model: Model in any mode; it is run in eval mode without gradients.
        anatomy: Anatomy of the model.
        batches: Batches of inputs.
        selection: Selection of token states, the same in every layer.
        after_batch: Function called with the number of states chosen so far.

    Returns:
        One object a site, on the device of the states (on the host where that device has no float64). Where the depth
        of a forward depends on the data, layers have seen different numbers of snapshots.

    Raises:
        SnapshotError: If the stream holds NaN or infinite values (the message names the layer), or if blocks run that
            the anatomy does not know.
    """
    model = unwrap(model)
    selection.begin(batches)
    moments: dict[int, SnapshotMoments] = {}

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if i not in moments:
            moments[i] = empty_moments(anatomy, i, x)
        moments[i].update(x.detach(), y.detach())

    watcher = StreamWatcher(anatomy, selection, add)
    others = _other_members(model, anatomy)
    unknown = [(module, _refuse_unknown(name), True) for name, module in others.items()]
    with undisturbed(model), watcher, watch(unknown):
        for batch in batches.items:
            if selection.is_complete:
                break
            batch = on_device_of(model, batch)
            watcher.begin(batch)
            run_foreign(model, batch)
            after_batch(selection.n_chosen)
    silent = [site.name for layer, site in enumerate(anatomy.sites) if layer not in moments]
    if silent:
        raise SnapshotError(f"No states passed {silent[0]}; pass inputs that reach every block.")
    return [moments[layer] for layer in range(len(anatomy.sites))]


def _other_members(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """Members of the container of the blocks that did not run when the anatomy was read."""
    containers = {site.name.split("#")[0].rpartition(".")[0] for site in anatomy.sites}
    known = {id(site.module) for site in anatomy.sites}
    kinds = {type(site.module) for site in anatomy.sites}
    return {
        f"{path}.{name}": member
        for path in containers
        for name, member in model.get_submodule(path).named_children()
        if type(member) in kinds and id(member) not in known
    }


def _refuse_unknown(name: str) -> Callable[..., None]:
    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        raise depth_error(name)

    return refuse


def empty_moments(anatomy: Anatomy, layer: int, states: Tensor) -> SnapshotMoments:
    """Moments for the states of one layer, on their device (on the host where that device has no float64)."""
    device = states.device if states.device.type in ("cpu", "cuda") else "cpu"
    name = f"layer {layer} ({anatomy.sites[layer].name})"
    return SnapshotMoments(states.shape[-1], device=device, name=name)


class StreamWatcher(BlockHooks):
    """Passes on the states that enter and leave each block; the hooks of one capture share it.

    Args:
        anatomy: Anatomy of the model.
        selection: Selection of token states, the same in every layer.
        take: Function called with the layer, and the states entering and leaving it, each (snapshot, feature); they
            still belong to the graph of the forward, if it keeps one.
        layers: Layers to follow; None: all.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        selection: TokenSelection,
        take: Callable[[int, Tensor, Tensor], None],
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        super().__init__(anatomy.sites, layers=layers, on_unknown=refuse_unknown)
        self.selection, self.take = selection, take
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """Forget the last batch."""
        self.begin_pass()
        self.batch, self.leading = batch, torch.Size()
        self._chosen: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def on_enter(self, call: BlockCall) -> None:
        """Keep what enters until the block is through."""
        self._waiting[call.layer] = self._chosen_of(call.state_in, call.site)

    def on_leave(self, call: BlockCall) -> None:
        """Pass on both states."""
        self.take(call.layer, self._waiting.pop(call.layer), self._chosen_of(call.state_out, call.site))

    def _chosen_of(self, state: Tensor, site: Site) -> Tensor:
        """The chosen states, shape (snapshot, feature); a copy, as the block may write into its input."""
        if self._chosen is None:
            self.leading = state.shape[:-1]
            self._chosen = self.selection.choose(self.leading, self.batch)
        if state.shape[:-1] != self.leading:
            raise SnapshotError(
                f"States at {site.name} have leading shape {tuple(state.shape[:-1])}, those before "
                f"{tuple(self.leading)}; only stacks that keep their tokens can be profiled."
            )
        # Moved once, not for each block; the host need not wait for it.
        self._chosen = self._chosen.to(state.device, non_blocking=state.device.type == "cuda")
        return state.flatten(0, -2)[self._chosen]
