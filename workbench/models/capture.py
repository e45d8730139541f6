"""Hooks on, moments out, hooks off: the moments of the residual stream at every block, without storing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import SnapshotError
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.moments import SnapshotMoments, not_finite
from workbench.koopman.sketch import OVERSAMPLING, SnapshotSketch
from workbench.models.anatomy import Anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks, depth_error, refuse_unknown
from workbench.models.calling import on_device_of, run_foreign
from workbench.models.device_numbers import read_numbers
from workbench.models.probing import HookRequest, undisturbed, watch
from workbench.models.site import Site
from workbench.models.wrapping import runnable

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.models.batches import Batches
    from workbench.models.token_selection import TokenSelection

    Moments = SnapshotMoments | SnapshotSketch


#: Width up to which the moments of all layers are small beside everything else.
_NARROW = 1024


def capture_layers(
    model: nn.Module,
    anatomy: Anatomy,
    batches: Batches,
    selection: TokenSelection,
    take: Callable[[int, Moments], None],
    *,
    options: DmdOptions | None = None,
    layers: Collection[int] | None = None,
    after_batch: Callable[[int], None] = lambda _: None,
) -> None:
    """Run a model over batches and pass on the moments of every block's input and output.

    The model computes what it computes anyway, but for its language-model head. Hooks return None and are always
    removed; training mode and random state are as before.

    Args:
        model: Model in any mode; it is run in eval mode without gradients.
        anatomy: Anatomy of the model.
        batches: Batches of inputs.
        selection: Selection of token states, the same in every layer.
        take: Function called with each layer and its moments, on the device of the states (on the host where that
            device has no float64): as soon as a single batch has passed the layer, else at the end. Where the depth of
            a forward depends on the data, layers have seen different numbers of snapshots.
        options: Options of the spectra that are wanted: with a rank, leading directions are enough.
        layers: Layers wanted; None: all.
        after_batch: Function called with the number of states chosen so far.

    Raises:
        SnapshotError: If the stream holds NaN or infinite values (the message names the layer), or if blocks run that
            the anatomy does not know.
    """
    model = runnable(model)
    wanted = range(len(anatomy.sites)) if layers is None else sorted(layers)
    selection.begin(batches)
    is_single = isinstance(batches.items, list) and len(batches.items) == 1
    moments: dict[int, Moments] = {}

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if i not in moments:
            moments[i] = moments_for(anatomy, i, x, options or DmdOptions(), n_snapshots=selection.n_snapshots)
        moments[i].update(x.detach(), y.detach(), refuses=False)
        are_finite[i] = moments[i].is_finite
        if is_single:
            seen.add(i)
            take(i, moments.pop(i))

    are_finite: dict[int, Tensor] = {}
    seen: set[int] = set()
    watcher = StreamWatcher(anatomy, selection, add, layers=layers)
    with undisturbed(model), watcher, watch(refusals(model, anatomy)), without_head(model, anatomy):
        for batch in batches.items:
            if selection.is_complete:
                break
            watcher.begin(batch)  # whose masks are read: before it is moved to the device
            run_foreign(model, on_device_of(model, batch))
            refuse_not_finite(anatomy, are_finite)
            after_batch(selection.n_chosen)
    refuse_silent(anatomy, [layer for layer in wanted if layer not in seen and layer not in moments])
    for layer in sorted(moments):
        take(layer, moments.pop(layer))


def refusals(model: nn.Module, anatomy: Anatomy) -> list[HookRequest]:
    """Hooks that refuse blocks which did not run when the anatomy was read."""
    return [(module, _refuse_unknown(name), True) for name, module in _other_members(model, anatomy).items()]


def refuse_silent(anatomy: Anatomy, layers: Sequence[int]) -> None:
    """Refuse inputs that do not reach some layers.

    Raises:
        SnapshotError: If there are such layers.
    """
    if layers:
        name = anatomy.sites[layers[0]].name
        raise SnapshotError(f"No states passed {name}; pass inputs that reach every block.")


def refuse_not_finite(anatomy: Anatomy, are_finite: Mapping[int, Tensor]) -> None:
    """Refuse values that are not finite; the host waits for the device once for all layers.

    Args:
        anatomy: Anatomy of the model.
        are_finite: Whether the values of each layer are finite, in the order in which the stream passes.

    Raises:
        SnapshotError: If a layer holds others; the message names the first.
    """
    numbers = read_numbers(list(are_finite.values()))
    for layer, is_finite in zip(are_finite, numbers, strict=True):
        if not is_finite:
            raise not_finite(_name_of(anatomy, layer))


@contextmanager
def without_head(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    """Let the language-model head give zeros, which take no memory, once all blocks have run: it adds no states.

    A model that runs its head between blocks, to decide whether to go on, keeps it.
    """
    head = head_of(model, anatomy)
    if head is None or "forward" in vars(head):
        yield
        return
    n_left, is_early = 0, False
    forward = head.forward

    def begin(*_: Any) -> None:
        nonlocal n_left, is_early
        n_left, is_early = 0, False
        blocks.begin_pass()

    def leave(call: BlockCall) -> None:
        nonlocal n_left
        n_left += 1

    def zeros(x: Tensor) -> Tensor:
        nonlocal is_early
        is_early = is_early or 0 < n_left < len(anatomy.sites)
        if is_early or n_left < len(anatomy.sites):
            return forward(x)
        return x.new_zeros(1).expand(*x.shape[:-1], head.out_features)

    blocks = BlockHooks(anatomy.sites, on_leave=leave)
    vars(head)["forward"] = zeros
    try:
        with blocks, watch([(model, begin, True)]):
            yield
    finally:
        del vars(head)["forward"]


def head_of(model: nn.Module, anatomy: Anatomy) -> nn.Linear | None:
    """The linear map to the vocabulary, if there is exactly one: it has an output for each entry of the embedding."""
    inside = {id(part) for site in anatomy.sites for part in site.module.modules()}
    size = max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == size and id(module) not in inside
    ]
    return heads[0] if len(heads) == 1 else None


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


def moments_for(
    anatomy: Anatomy, layer: int, states: Tensor, options: DmdOptions, *, n_snapshots: int | None
) -> Moments:
    """What collects the states of one layer: the moments, or where they are large and not needed whole, a sketch.

    Args:
        anatomy: Anatomy of the model.
        layer: Index of the layer.
        states: States of the layer, for their width and device.
        options: Options of the spectra that are wanted.
        n_snapshots: Most snapshots that will come; None: unknown.
    """
    width = states.shape[-1]
    if not is_sketched(width, options.rank, n_snapshots):
        return empty_moments(anatomy, layer, states)
    name = _name_of(anatomy, layer)
    return SnapshotSketch(width, rank=options.rank, seed=options.seed, device=states.device, name=name)


def is_sketched(width: int, rank: int | None, n_snapshots: int | None) -> bool:
    """Whether a layer of this width is collected in a sketch rather than in moments."""
    is_few = n_snapshots is not None and n_snapshots <= width
    return width > _NARROW and (is_few or (rank is not None and OVERSAMPLING * rank < width))


def empty_moments(anatomy: Anatomy, layer: int, states: Tensor) -> SnapshotMoments:
    """Moments for the states of one layer, on their device (on the host where that device has no float64)."""
    return SnapshotMoments(states.shape[-1], device=states.device, name=_name_of(anatomy, layer))


def _name_of(anatomy: Anatomy, layer: int) -> str:
    return f"layer {layer} ({anatomy.sites[layer].name})"


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

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """The indices of the chosen tokens of a state; chosen once a pass.

        Raises:
            SnapshotError: If the states of the pass do not keep their tokens.
        """
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
        return self._chosen

    def _chosen_of(self, state: Tensor, site: Site) -> Tensor:
        """The chosen states, shape (snapshot, feature); a copy, as the block may write into its input."""
        return state.flatten(0, -2)[self.choose(state, site)]
