"""Hooks on, moments out, hooks off: the residual stream of every block, never kept as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from workbench.errors import SnapshotError
from workbench.spectral.moments import SnapshotMoments
from workbench.subjects.anatomy import Anatomy, Site
from workbench.subjects.probing import HookRequest, call_model, undisturbed, unwrap, watch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.subjects.batches import Batches, TokenSelection


def capture_moments(
    model: nn.Module,
    anatomy: Anatomy,
    batches: Batches,
    selection: TokenSelection,
    *,
    after_batch: Callable[[int], None] = lambda _: None,
) -> list[SnapshotMoments]:
    """Run a model over batches and collect the moments of every block's input and output.

    The model computes what it computes anyway: hooks return None and are removed whatever happens; training mode and
    random state are as before.

    Args:
        model: In any mode; run in eval mode without gradients.
        anatomy: Where its residual stream is.
        batches: The inputs.
        selection: Which token states to use; the same in every layer.
        after_batch: Called with the number of states chosen so far.

    Returns:
        One object a site, on the device of the states (on the host where that device has no float64).

    Raises:
        SnapshotError: If the stream holds NaN or infinite values; the message names the layer.
    """
    model = unwrap(model)
    selection.begin(batches)
    moments: list[SnapshotMoments | None] = [None] * len(anatomy.sites)

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if moments[i] is None:
            moments[i] = empty_moments(anatomy, i, x)
        moments[i].update(x.detach(), y.detach())

    watcher = StreamWatcher(anatomy, selection, add)
    with undisturbed(model), watch(watcher.hooks()):
        for batch in batches.items:
            if selection.is_complete:
                break
            watcher.begin(batch)
            call_model(model, batch)
            after_batch(selection.n_chosen)
    silent = [site.name for site, of_site in zip(anatomy.sites, moments, strict=True) if of_site is None]
    if silent:
        raise SnapshotError(f"No states passed {silent[0]}; pass inputs that reach every block.")
    return moments


def empty_moments(anatomy: Anatomy, layer: int, states: Tensor) -> SnapshotMoments:
    """Moments for the states of one layer, on their device (on the host where that device has no float64)."""
    device = states.device if states.device.type in ("cpu", "cuda") else "cpu"
    name = f"layer {layer} ({anatomy.sites[layer].name})"
    return SnapshotMoments(states.shape[-1], device=device, name=name)


class StreamWatcher:
    """Hands over the states that enter and leave each block; the hooks of one capture share it.

    Args:
        anatomy: Where the residual stream is.
        selection: Which token states to use; the same in every layer.
        take: Called with the layer, and the states entering and leaving it, each (snapshot, feature); they still
            belong to the graph of the forward, if it keeps one.
        layers: Layers to look at; None: all.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        selection: TokenSelection,
        take: Callable[[int, Tensor, Tensor], None],
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        self.sites = anatomy.sites
        wanted = range(len(anatomy.sites)) if layers is None else layers
        self.index = {(id(anatomy.sites[i].module), anatomy.sites[i].call): i for i in wanted}
        self.selection = selection
        self.take = take
        self.begin(None)

    def hooks(self) -> list[HookRequest]:
        """For `watch`: before and after each block."""
        blocks = {id(self.sites[i].module): self.sites[i].module for i in self.index.values()}.values()
        return [request for block in blocks for request in ((block, self.enter, True), (block, self.leave, False))]

    def begin(self, batch: Any) -> None:
        """Forget the last batch."""
        self.batch, self.chosen, self.leading = batch, None, None
        self.n_entered, self.n_left = Counter(), Counter()
        self.waiting: dict[int, Tensor] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Hook before a block."""
        i = self._site(module, self.n_entered)
        if i is not None:
            self.waiting[i] = self._rows(self.sites[i].state_in(args, kwargs), self.sites[i])

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Hook after a block."""
        i = self._site(module, self.n_left)
        if i is None:
            return
        site = self.sites[i]
        self.take(i, self.waiting.pop(i), self._rows(site.state_out(output), site))

    def _site(self, module: nn.Module, counter: Counter) -> int | None:
        call = counter[id(module)]
        counter[id(module)] += 1
        return self.index.get((id(module), call))

    def _rows(self, state: Tensor, site: Site) -> Tensor:
        """The chosen states, shape (snapshot, feature); a copy, as the block may write into its input."""
        if self.chosen is None:
            self.leading = state.shape[:-1]
            self.chosen = self.selection.choose(self.leading, self.batch)
        if state.shape[:-1] != self.leading:
            raise SnapshotError(
                f"States at {site.name} have leading shape {tuple(state.shape[:-1])}, those before "
                f"{tuple(self.leading)}; only stacks that keep their tokens can be profiled."
            )
        return state.flatten(0, -2)[self.chosen.to(state.device)]
