"""Hooks that identify the calls of blocks; the basis of everything that follows the residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.models.block_calls import Place, Site
from workbench.models.probing import HookRequest, watch


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, as a hook sees it; the output is None before it has run."""

    layer: int
    site: Site
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None

    @property
    def state_in(self) -> Tensor:
        """State that enters the block, see `Site.state_in`."""
        return self.site.state_in(self.args, self.kwargs)

    @property
    def state_out(self) -> Tensor:
        """State that leaves the block, see `Site.state_out`."""
        return self.site.state_out(self.output)


class BlockHooks:
    """Context manager that calls functions as the residual stream enters and leaves blocks.

    Calls are counted from 0 in every pass, which begins with `begin_pass` after the first, so that a block that is
    called several times counts as several layers. A call without a site, such as an additional call of a shared block
    or the recomputation of a checkpointed one, is ignored or passed to ``on_unknown`` (see `raise_on_unknown`). If a
    block raises and the model continues, the call is counted, but ``on_leave`` is not called for it. A tensor that
    ``on_enter`` returns replaces the state that enters. Where residuals are added outside of modules, a layer ends when
    the next module receives its state, and ``on_enter`` must return None.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        on_enter: Callable[[BlockCall], Tensor | None] | None = None,
        on_leave: Callable[[BlockCall], None] | None = None,
        *,
        layers: Collection[int] | None = None,
        on_unknown: Callable[[Site], None] | None = None,
    ) -> None:
        self.sites = sites
        self._on_enter, self._on_leave, self._on_unknown = on_enter, on_leave, on_unknown
        followed = range(len(sites)) if layers is None else layers
        inside = [layer for layer in followed if sites[layer].exit is None]
        self._layers = {(id(sites[layer].module), sites[layer].call): layer for layer in inside}
        self._known = {(id(site.module), site.call) for site in sites}
        self._outside = [layer for layer in followed if sites[layer].exit is not None]
        self._called = tuple(dict.fromkeys(sites[layer].module for layer in inside))
        self.blocks = tuple(dict.fromkeys(sites[layer].module for layer in followed))
        self._attached: AbstractContextManager[None] | None = None
        self.begin_pass()

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Modules inside the blocks, each once."""
        inside = dict.fromkeys(part for block in self.blocks for part in block.modules())
        return tuple(part for part in inside if part not in self.blocks)

    def hooks(self, acting: Callable[[], BlockHooks] | None = None) -> list[HookRequest]:
        """Return the hooks that `watch` attaches; ``acting`` returns the object that handles a call."""

        def of(name: str) -> Callable[..., Any]:
            return getattr(self, name) if acting is None else lambda *call: getattr(acting(), name)(*call)

        requests: list[HookRequest] = [(block, of("_enter"), True) for block in self._called]
        requests += [(block, of("_leave"), False) for block in self._called]
        places = [place for layer in self._outside for place in (self.sites[layer].entry, self.sites[layer].exit)]
        ends = dict.fromkeys(place.module for place in places if place is not None and place.is_output)
        starts = dict.fromkeys(place.module for place in places if place is not None and not place.is_output)
        requests += [(module, of("_pass"), True) for module in starts]
        return requests + [(module, of("_end"), False) for module in ends]

    def on_enter(self, call: BlockCall) -> Tensor | None:
        """Handle a call of a followed block before it runs."""
        return None if self._on_enter is None else self._on_enter(call)

    def on_leave(self, call: BlockCall) -> None:
        """Handle a call of a followed block after it has run."""
        if self._on_leave is not None:
            self._on_leave(call)

    def begin_pass(self) -> None:
        """Restart the count of calls at 0."""
        self._n_calls: Counter[int] = Counter()
        self._running: list[tuple[nn.Module, int | None]] = []
        self._open: dict[int, BlockCall] = {}
        self._n_ended: Counter[int] = Counter()

    def __enter__(self) -> BlockHooks:
        self.begin_pass()
        self._attached = watch(self.hooks())
        self._attached.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._attached is not None:
            self._attached.__exit__(*exception)
        self._attached = None

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        key = id(module), self._n_calls[id(module)]
        self._n_calls[id(module)] += 1
        layer = self._layers.get(key)
        self._running.append((module, layer))
        if layer is None:
            if self._on_unknown is not None and key not in self._known:
                self._on_unknown(next(site for site in self.sites if site.module is module))
            return None
        site = self.sites[layer]
        state = self.on_enter(BlockCall(layer, site, args, kwargs))
        return None if state is None else site.with_state(args, kwargs, state)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        while self._running:  # a call that raised inside the model never left
            running, layer = self._running.pop()
            if running is module:
                if layer is not None:
                    self.on_leave(BlockCall(layer, self.sites[layer], args, kwargs, output))
                return

    def _pass(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Handle a call at which states are read: here one layer may end and the next begin."""
        number = self._n_calls[id(module)]
        self._n_calls[id(module)] += 1

        def is_here(place: Place | None) -> bool:
            return place is not None and not place.is_output and place.module is module and place.call == number

        for layer in self._outside:
            place = self.sites[layer].exit
            if place is not None and is_here(place) and layer in self._open:
                self._close(layer, place.state_in(args, kwargs, self.sites[layer].name))
        for layer in self._outside:
            site = self.sites[layer]
            if is_here(site.entry):
                self._open[layer] = call = BlockCall(layer, site, args, kwargs)
                state = self.on_enter(call)
                if state is not None:
                    site.with_state(args, kwargs, state)
                continue
            is_entered = site.entry is not None and site.entry.module is module and number >= site.entry.n_calls
            if is_entered and self._on_unknown is not None:
                self._on_unknown(site)

    def _end(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Handle the end of a call whose output is the state that leaves a layer."""
        number = self._n_ended[id(module)]
        self._n_ended[id(module)] += 1
        for layer in list(self._open):
            place = self.sites[layer].exit
            if place is not None and place.is_output and place.module is module and place.call == number:
                self._close(layer, place.state_out(output, self.sites[layer].name))

    def _close(self, layer: int, state: Tensor) -> None:
        call = self._open.pop(layer)
        self.on_leave(BlockCall(layer, call.site, call.args, call.kwargs, state))


def raise_on_unknown(site: Site) -> None:
    """Raise an exception for a block that is called more often than when the anatomy was read; for ``on_unknown``."""
    raise depth_error(f"Another call of {site.name}")


def depth_error(name: str) -> SnapshotError:
    """Return the exception for a block that runs but is not in the anatomy."""
    return SnapshotError(
        f"{name} runs on these inputs but did not run when the anatomy was read, so the depth depends on the data; "
        "pass wb.profile(..., anatomy=), read by wb.read_anatomy on inputs that reach every block."
    )
