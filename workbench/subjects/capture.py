"""Hooks on, moments out, hooks off: the residual stream of every block, never kept as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.errors import SnapshotError
from workbench.spectral.moments import SnapshotMoments
from workbench.subjects.anatomy import Anatomy, Site
from workbench.subjects.probing import call_model, undisturbed, unwrap, watch

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
    collector = _Collector(anatomy, selection)
    blocks = {id(site.module): site.module for site in anatomy.sites}.values()
    hooks = [
        request for block in blocks for request in ((block, collector.enter, True), (block, collector.leave, False))
    ]
    with undisturbed(model), watch(hooks):
        for batch in batches.items:
            if selection.is_complete:
                break
            collector.begin(batch)
            call_model(model, batch)
            after_batch(selection.n_chosen)
    return collector.moments()


class _Collector:
    """What the hooks of one capture share."""

    def __init__(self, anatomy: Anatomy, selection: TokenSelection) -> None:
        self.sites = anatomy.sites
        self.index = {(id(site.module), site.call): i for i, site in enumerate(anatomy.sites)}
        self.selection = selection
        self._moments: list[SnapshotMoments | None] = [None] * len(anatomy.sites)
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """Forget the last batch."""
        self.batch, self.chosen, self.leading = batch, None, None
        self.n_entered, self.n_left = Counter(), Counter()
        self.waiting: dict[int, Tensor] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        i = self._site(module, self.n_entered)
        if i is not None:
            self.waiting[i] = self._rows(self.sites[i].state_in(args, kwargs), self.sites[i])

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        i = self._site(module, self.n_left)
        if i is None:
            return
        site = self.sites[i]
        x, y = self.waiting.pop(i), self._rows(site.state_out(output), site)
        if self._moments[i] is None:
            device = x.device if x.device.type in ("cpu", "cuda") else "cpu"
            self._moments[i] = SnapshotMoments(x.shape[1], device=device, name=f"layer {i} ({site.name})")
        self._moments[i].update(x, y)

    def moments(self) -> list[SnapshotMoments]:
        """The moments of all sites, once every batch has run."""
        silent = [site.name for site, moments in zip(self.sites, self._moments, strict=True) if moments is None]
        if silent:
            raise SnapshotError(f"No states passed {silent[0]}; pass inputs that reach every block.")
        return self._moments

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
        return state.detach().flatten(0, -2)[self.chosen.to(state.device)]
