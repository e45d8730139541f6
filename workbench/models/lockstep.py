"""Several passes of one model, one block at a time: each block is read from disk once for all batches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.models.calling import run_foreign
from workbench.models.probing import HookRequest, watch

if TYPE_CHECKING:
    from workbench.models.site import Site
    from workbench.models.streaming import StreamedWeights


class _Cancelled(BaseException):
    """Ends a pass that nobody waits for; no Exception, so that no model catches it."""


class Pass:
    """One forward pass in a thread of its own, which runs only while the others wait.

    Attributes:
        batch: Inputs of the pass.
        layer: Layer in front of which it waits; None before the first, and when it has ended.
        arguments: Arguments of the block in front of which it waits.
        output: What the last block returned.
        watcher: What follows its blocks.
    """

    def __init__(self, batch: Any, run: Callable[[Pass], None]) -> None:
        self.batch = batch
        self.layer: int | None = None
        self.arguments: Any = None
        self.output: Any = None
        self.watcher: Any = None
        self.n_left, self.has_early_exit = 0, False
        self.n_calls: Counter[nn.Module] = Counter()
        self.running: list[int | None] = []
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Run until the next block, or the end.

        Raises:
            BaseException: What the pass raises.
        """
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, layer: int) -> None:
        """Wait in front of a layer; called in the thread of the pass."""
        self.layer = layer
        self._back.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _Cancelled
        self.layer = None

    def cancel(self) -> None:
        """End the pass, at its next block at the latest."""
        self._is_cancelled = True
        self._go.release()
        self._thread.join()

    def _run(self, run: Callable[[Pass], None]) -> None:
        self._go.acquire()
        try:
            if not self._is_cancelled:
                run(self)
        except _Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 it is raised where the pass is waited for
            self._error = error
        self.layer = None
        self._back.release()


class Lockstep:
    """Passes of one model over several batches, each of which waits in front of every block for the others.

    Args:
        model: Model, in eval mode.
        weights: Its weights on disk.
        sites: Sites of its blocks, in order.
        current: What the thread of each pass keeps for itself: ``current.one``, the pass.
        head: Module in front of which a pass ends, if all blocks have run; None: it runs to its end.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: StreamedWeights,
        sites: Sequence[Site],
        current: threading.local,
        *,
        head: nn.Module | None = None,
    ) -> None:
        self._model, self._weights, self._sites, self._current = model, weights, sites, current
        self._head, self._first = head, 0
        self._layers = {(site.module, site.call): layer for layer, site in enumerate(sites)}
        self._passes: list[Pass] = []

    def run(
        self,
        batches: Iterable[Any],
        begin: Callable[[Any], Any],
        *,
        hooks: Sequence[HookRequest],
        is_enough: Callable[[], bool],
        after_start: Callable[[Pass], None],
        before_first: Callable[[Sequence[Pass]], None],
        after_layer: Callable[[int, Sequence[Pass]], None],
        first: int,
        last: int,
        outputs: Sequence[Any] = (),
    ) -> None:
        """Run all batches through all blocks.

        Args:
            batches: Inputs of the passes.
            begin: Function that makes what a pass needs from its batch, kept as `Pass.watcher`.
            hooks: Hooks that see the calls of blocks when they run.
            is_enough: Whether no more batches are wanted; asked before each.
            after_start: Function called with each pass when it waits in front of its first layer.
            before_first: Function called when all passes wait in front of the first layer.
            after_layer: Function called when all passes are through a layer, and wait in front of the next.
            first: First layer that runs; those before return what they did earlier.
            last: Last layer that runs.
            outputs: Output of the block before the first layer, one a pass.
        """
        with ExitStack() as stack:
            stack.callback(self._cancel)
            stack.enter_context(self._hooked())
            stack.enter_context(watch(hooks))
            if first:
                stack.enter_context(self._bypassed(first))
            for i, batch in enumerate(batches):
                if is_enough():
                    break
                one = Pass(batch, self._in_thread(begin))
                one.output = outputs[i] if first else None
                self._passes.append(one)
                one.step()
                after_start(one)
            before_first(self._passes)
            for layer in range(first, last + 1):
                waiting = [one for one in self._passes if one.layer == layer]
                if waiting:
                    with self._weights.hold(self._sites[layer].module):
                        for one in waiting:
                            one.step()
                after_layer(layer, self._passes)

    def _in_thread(self, begin: Callable[[Any], Any]) -> Callable[[Pass], None]:
        device = self._weights.device.type
        is_mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def run(one: Pass) -> None:
            self._current.one, one.watcher = one, begin(one.batch)
            with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=is_mixed):
                run_foreign(self._model, one.batch)

        return run

    def _cancel(self) -> None:
        for one in self._passes:
            one.cancel()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Hooks that wait in front of each block, before its weights are read."""
        handles = []
        for module in dict.fromkeys(site.module for site in self._sites):
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        if self._head is not None:
            handles.append(self._head.register_forward_pre_hook(self._stop, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        one: Pass = self._current.one
        layer = self._layers.get((module, one.n_calls[module]))
        one.n_calls[module] += 1
        one.running.append(layer)
        if layer is not None and layer >= self._first:
            one.arguments = (args, kwargs)
            one.pause(layer)
            one.arguments = None

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        one: Pass = self._current.one
        if one.running.pop() is not None:
            one.output = output
            one.n_left += 1

    def _stop(self, module: nn.Module, args: tuple) -> None:
        one: Pass = self._current.one
        one.has_early_exit |= 0 < one.n_left < len(self._sites)
        if one.n_left == len(self._sites) and not one.has_early_exit:
            raise _Cancelled

    @contextmanager
    def _bypassed(self, first: int) -> Iterator[None]:
        """Let the blocks before a layer return what the last of them did, without their weights."""
        modules = dict.fromkeys(site.module for site in self._sites[:first])
        still_needed = {site.module for site in self._sites[first:]}
        forwards = {module: module.forward for module in modules}
        own = [module for module in modules if "forward" in vars(module)]

        def bypass(module: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                one: Pass = self._current.one
                layer = one.running[-1]
                if layer is not None and layer < first:
                    return one.output
                return forwards[module](*args, **kwargs)

            return forward

        self._first = first
        try:
            for module in modules:
                module.forward = bypass(module)
            with self._weights.without([module for module in modules if module not in still_needed]):
                yield
        finally:
            self._first = 0
            for module in modules:
                del module.forward
            for module in own:
                module.forward = forwards[module]
