"""Hooks that identify the calls of blocks, for everything that follows the residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.models.probing import HookRequest, watch
from workbench.models.site import Site


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, as a hook sees it.

    Attributes:
        layer: Index of the site.
        site: Site of the call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Output of the block; None before it has run.
    """

    layer: int
    site: Site
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None

    @property
    def state_in(self) -> Tensor:
        """The state that enters, see `Site.state_in`."""
        return self.site.state_in(self.args, self.kwargs)

    @property
    def state_out(self) -> Tensor:
        """The state that leaves, see `Site.state_out`."""
        return self.site.state_out(self.output)


class BlockHooks:
    """Calls functions as the residual stream enters and leaves blocks; a context manager.

        with BlockHooks(anatomy.sites, lambda call: print(call.layer, call.state_in.shape)):
            model(tokens)

    Calls are counted from 0 in every pass, so that a block that is called several times is several layers. Within one
    context, a further pass begins with `begin_pass`. A call that the sites do not have, such as one more of a shared
    block or the recomputation of a checkpointed one, is ignored or passed to ``on_unknown``. Where a block raises and
    the model goes on, its call is counted and its end is not waited for.

    Args:
        sites: Sites of an `Anatomy`, or some of them.
        on_enter: Function that gets each call before it runs. A tensor that it returns enters the block instead of the
            state; None leaves it.
        on_leave: Function that gets each call when it has run.
        layers: Indices of the sites to follow; None: all.
        on_unknown: Function that gets the first site of a block that is called more often than the sites say; see
            `refuse_unknown`.

    Attributes:
        sites: Sites as given.
        blocks: Modules that are followed, each once.
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
        wanted = range(len(sites)) if layers is None else layers
        self._layers = {(id(sites[layer].module), sites[layer].call): layer for layer in wanted}
        self._known = {(id(site.module), site.call) for site in sites}
        self.blocks = tuple(dict.fromkeys(sites[layer].module for layer in wanted))
        self._attached: AbstractContextManager[None] | None = None
        self.begin_pass()

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """All modules inside the blocks, each once."""
        inside = dict.fromkeys(part for block in self.blocks for part in block.modules())
        return tuple(part for part in inside if part not in self.blocks)

    def hooks(self, acting: Callable[[], BlockHooks] | None = None) -> list[HookRequest]:
        """The hooks, for `watch`, which attaches them.

        Args:
            acting: Function that gives what acts at a call, for passes that take turns; None: this object.
        """
        if acting is None:
            before: list[HookRequest] = [(block, self._enter, True) for block in self.blocks]
            return before + [(block, self._leave, False) for block in self.blocks]

        def enter(*call: Any) -> Any:
            return acting()._enter(*call)

        def leave(*call: Any) -> None:
            acting()._leave(*call)

        return [
            (block, hook, is_before) for block in self.blocks for hook, is_before in ((enter, True), (leave, False))
        ]

    def on_enter(self, call: BlockCall) -> Tensor | None:
        """Called before a followed block runs."""
        return None if self._on_enter is None else self._on_enter(call)

    def on_leave(self, call: BlockCall) -> None:
        """Called after a followed block has run."""
        if self._on_leave is not None:
            self._on_leave(call)

    def begin_pass(self) -> None:
        """Count calls from 0 again."""
        self._n_calls: Counter[int] = Counter()
        self._running: list[tuple[nn.Module, int | None]] = []

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


def refuse_unknown(site: Site) -> None:
    """For ``on_unknown``: a block is called more often than when the anatomy was read."""
    raise depth_error(f"Another call of {site.name}")


def depth_error(name: str) -> SnapshotError:
    """An error that says that a block runs which the anatomy does not know."""
    return SnapshotError(
        f"{name} runs on these inputs but did not when the anatomy was read, so that depth depends on the data; pass "
        "anatomy=wb.read_anatomy(model, inputs) of inputs that reach every block."
    )
