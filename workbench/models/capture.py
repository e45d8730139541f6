"""Hooks on, moments out, hooks off: the residual stream of every block, never kept as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from workbench.errors import SnapshotError
from workbench.koopman.moments import SnapshotMoments
from workbench.models.anatomy import Anatomy
from workbench.models.probing import HookRequest, on_device_of, run_foreign, undisturbed, unwrap, watch
from workbench.models.site import Site

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

    The model computes what it computes anyway: hooks return None and are removed whatever happens; training mode and
    random state are as before.

    Args:
        model: In any mode; run in eval mode without gradients.
        anatomy: Where its residual stream is.
        batches: The inputs.
        selection: Which token states to use; the same in every layer.
        after_batch: Called with the number of states chosen so far.

    Returns:
        One object a site, on the device of the states (on the host where that device has no float64). Where the depth
        of a forward depends on the data, layers have seen different numbers of snapshots.

    Raises:
        SnapshotError: If the stream holds NaN or infinite values (the message names the layer), or if blocks run that
            the anatomy does not know.
    """
    model = unwrap(model)
    selection.begin(batches)
    moments: list[SnapshotMoments | None] = [None] * len(anatomy.sites)

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if moments[i] is None:
            moments[i] = empty_moments(anatomy, i, x)
        moments[i].update(x.detach(), y.detach())

    watcher = StreamWatcher(anatomy, selection, add)
    others = _other_members(model, anatomy)
    unknown = [(module, _refuse_unknown(name), True) for name, module in others.items()]
    with undisturbed(model), watch([*watcher.hooks(), *unknown]):
        for batch in batches.items:
            if selection.is_complete:
                break
            batch = on_device_of(model, batch)
            watcher.begin(batch)
            run_foreign(model, batch)
            after_batch(selection.n_chosen)
    silent = [site.name for site, of_site in zip(anatomy.sites, moments, strict=True) if of_site is None]
    if silent:
        raise SnapshotError(f"No states passed {silent[0]}; pass inputs that reach every block.")
    return moments


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
        raise _unknown_block(name)

    return refuse


def _unknown_block(name: str) -> SnapshotError:
    return SnapshotError(
        f"{name} runs on these inputs but did not when the anatomy was read, so that depth depends on the data; pass "
        "anatomy=wb.read_anatomy(model, inputs) of inputs that reach every block."
    )


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
        self.n_calls = Counter(id(site.module) for site in anatomy.sites)
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
        elif self.n_entered[id(module)] > self.n_calls[id(module)]:
            raise _unknown_block(f"Another call of {next(s.name for s in self.sites if s.module is module)}")

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
