"""Capture of the moments of the residual stream at every block, by temporary hooks and without storing the states."""

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
from workbench.models.block_hooks import BlockCall, BlockHooks, depth_error, raise_on_unknown
from workbench.models.calling import on_device_of, run_model
from workbench.models.device_numbers import read_numbers
from workbench.models.probing import HookRequest, undisturbed, watch
from workbench.models.site import Site
from workbench.models.wrapping import runnable

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.models.batches import Batches
    from workbench.models.token_selection import TokenSelection

    Moments = SnapshotMoments | SnapshotSketch


#: Width up to which the moments of all layers are small compared with the model.
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
    """Run a model over batches and pass the moments of every block's input and output to a function.

    The computation of the model is unchanged, except that its language-model head is skipped. Hooks return None and
    are always removed; training mode and random state are restored.

    Args:
        model: Model in any mode; it is run in eval mode without gradients.
        anatomy: Anatomy of the model.
        batches: Batches of inputs.
        selection: Selection of token states, the same in every layer.
        take: Function called with each layer and its moments, on the device of the states (on the host where that
            device has no float64). If there is a single batch, it is called when the batch has passed the layer,
            otherwise at the end. Where the depth of a forward pass depends on the data, the numbers of snapshots differ
            between layers.
        options: Options of the spectra; with a rank, the leading directions are sufficient.
        layers: Layers to capture; None captures all.
        after_batch: Function called after each batch with the number of states chosen so far.
    """
    model = runnable(model)
    captured = range(len(anatomy.sites)) if layers is None else sorted(layers)
    selection.begin(batches)
    is_single = isinstance(batches.items, list) and len(batches.items) == 1
    moments: dict[int, Moments] = {}

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if i not in moments:
            moments[i] = moments_for(anatomy, i, x, options or DmdOptions(), n_snapshots=selection.n_snapshots)
        moments[i].update(x.detach(), y.detach(), check_finite=False)
        are_finite[i] = moments[i].is_finite
        if is_single:
            seen.add(i)
            take(i, moments.pop(i))

    are_finite: dict[int, Tensor] = {}
    seen: set[int] = set()
    watcher = StreamWatcher(anatomy, selection, add, layers=layers)
    with undisturbed(model), watcher, watch(unknown_block_hooks(model, anatomy)), without_head(model, anatomy):
        for batch in batches.items:
            if selection.is_complete:
                break
            watcher.begin(batch)  # before the batch is moved to the device, because its masks are read on the host
            run_model(model, on_device_of(model, batch))
            require_finite(anatomy, are_finite)
            after_batch(selection.n_chosen)
    require_reached(anatomy, [layer for layer in captured if layer not in seen and layer not in moments])
    for layer in sorted(moments):
        take(layer, moments.pop(layer))


def unknown_block_hooks(model: nn.Module, anatomy: Anatomy) -> list[HookRequest]:
    """Return hooks that raise an exception if a block runs that did not run when the anatomy was read."""
    containers = {site.name.split("#")[0].rpartition(".")[0] for site in anatomy.sites}
    known = {id(site.module) for site in anatomy.sites}
    kinds = {type(site.module) for site in anatomy.sites}

    def failing(name: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise depth_error(name)

        return fail

    return [
        (member, failing(f"{path}.{name}"), True)
        for path in containers
        for name, member in model.get_submodule(path).named_children()
        if type(member) in kinds and id(member) not in known
    ]


def require_reached(anatomy: Anatomy, layers: Sequence[int]) -> None:
    """Raise SnapshotError if the inputs did not reach some layers."""
    if layers:
        name = anatomy.sites[layers[0]].name
        raise SnapshotError(f"No states passed {name}; pass inputs that reach every block.")


def require_finite(anatomy: Anatomy, are_finite: Mapping[int, Tensor]) -> None:
    """Raise SnapshotError for the first layer with values that are not finite, in the order in which the stream passes.

    The host waits for the device once for all layers.
    """
    numbers = read_numbers(list(are_finite.values()))
    for layer, is_finite in zip(are_finite, numbers, strict=True):
        if not is_finite:
            raise not_finite(_name_of(anatomy, layer))


@contextmanager
def without_head(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    """Replace the output of the language-model head by zeros without memory once all blocks have run.

    A head that the model calls between blocks, to decide whether to continue, is kept.
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
    """Return the linear map to the vocabulary, with one output per entry of the embedding; None unless it is unique."""
    inside = {id(part) for site in anatomy.sites for part in site.module.modules()}
    size = max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == size and id(module) not in inside
    ]
    return heads[0] if len(heads) == 1 else None


def moments_for(
    anatomy: Anatomy, layer: int, states: Tensor, options: DmdOptions, *, n_snapshots: int | None
) -> Moments:
    """Create the moments that collect the states of one layer; a sketch if those would be large and not all needed."""
    width = states.shape[-1]
    if not is_sketched(width, options.rank, n_snapshots):
        return empty_moments(anatomy, layer, states)
    name = _name_of(anatomy, layer)
    return SnapshotSketch(width, rank=options.rank, seed=options.seed, device=states.device, name=name)


def is_sketched(width: int, rank: int | None, n_snapshots: int | None) -> bool:
    """Return whether a layer of this width is collected in a sketch rather than in moments."""
    is_few = n_snapshots is not None and n_snapshots <= width
    return width > _NARROW and (is_few or (rank is not None and OVERSAMPLING * rank < width))


def empty_moments(anatomy: Anatomy, layer: int, states: Tensor) -> SnapshotMoments:
    """Create moments for the states of one layer, on their device (on the host where that has no float64)."""
    return SnapshotMoments(states.shape[-1], device=states.device, name=_name_of(anatomy, layer))


def _name_of(anatomy: Anatomy, layer: int) -> str:
    return f"layer {layer} ({anatomy.sites[layer].name})"


class StreamWatcher(BlockHooks):
    """Hooks that pass the chosen states that enter and leave each block to a function.

    The function receives the layer and the states entering and leaving it, each of shape (snapshot, feature). They
    remain part of the autograd graph of the forward pass, if there is one.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        selection: TokenSelection,
        take: Callable[[int, Tensor, Tensor], None],
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        super().__init__(anatomy.sites, layers=layers, on_unknown=raise_on_unknown)
        self.selection, self.take = selection, take
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """Prepare for the next batch."""
        self.begin_pass()
        self.batch, self.leading = batch, torch.Size()
        self._chosen: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def on_enter(self, call: BlockCall) -> None:
        """Keep the states that enter until the block has run."""
        self._waiting[call.layer] = self._chosen_of(call.state_in, call.site)

    def on_leave(self, call: BlockCall) -> None:
        """Pass the states that entered and left to ``take``."""
        self.take(call.layer, self._waiting.pop(call.layer), self._chosen_of(call.state_out, call.site))

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """Return the indices of the chosen tokens of a state, chosen once per pass, in which their number stays."""
        if self._chosen is None:
            self.leading = state.shape[:-1]
            self._chosen = self.selection.choose(self.leading, self.batch)
        if state.shape[:-1] != self.leading:
            raise SnapshotError(
                f"States at {site.name} have leading shape {tuple(state.shape[:-1])}, previous ones "
                f"{tuple(self.leading)}; only stacks that keep their tokens can be profiled."
            )
        # Moved once, not for each block; the copy may be asynchronous.
        self._chosen = self._chosen.to(state.device, non_blocking=state.device.type == "cuda")
        return self._chosen

    def _chosen_of(self, state: Tensor, site: Site) -> Tensor:
        """Return a copy of the chosen states, shape (snapshot, feature); the block may overwrite its input."""
        return state.flatten(0, -2)[self.choose(state, site)]
