"""Several passes of one model in lockstep, so that each block is read from disk once for all batches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.models.calling import run_model
from workbench.models.probing import HookRequest, watch

if TYPE_CHECKING:
    from workbench.models.site import Site
    from workbench.models.streaming import StreamedWeights


class CancelledPass(BaseException):
    """Ends a pass that is no longer needed; not an Exception, so that no model catches it."""


class Pass:
    """One forward pass in a separate thread, which runs only while the others wait.

    Attributes:
        batch: Inputs of the pass.
        layer: Layer before which it waits; None before the first layer and after the end.
        part: Part ahead of the first layer, such as a block of an encoder, before which it waits; None if there is
            none.
        arguments: Arguments of the block before which it waits.
        output: Output of the block that ran last.
        watcher: Object that observes its blocks.
    """

    def __init__(self, batch: Any, run: Callable[[Pass], None]) -> None:
        self.batch = batch
        self.layer: int | None = None
        self.part: nn.Module | None = None
        self.arguments: Any = None
        self.output: Any = None
        self.watcher: Any = None
        self.n_left, self.has_early_exit, self.has_begun = 0, False, False
        self.n_calls: Counter[nn.Module] = Counter()
        self.running: list[int | None] = []
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Run until the next block or the end.

        Raises:
            BaseException: The exception of the pass, if there is one.
        """
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, layer: int | None, part: nn.Module | None = None) -> None:
        """Wait before a layer or a part; called in the thread of the pass."""
        self.layer, self.part = layer, part
        self.has_begun |= layer is not None
        self._back.release()
        self._go.acquire()
        if self._is_cancelled:
            raise CancelledPass
        self.layer = self.part = None

    def cancel(self) -> None:
        """End the pass at its next block or before."""
        self._is_cancelled = True
        self._go.release()
        self._thread.join()

    def _run(self, run: Callable[[Pass], None]) -> None:
        self._go.acquire()
        try:
            if not self._is_cancelled:
                run(self)
        except CancelledPass:
            pass
        except BaseException as error:  # noqa: BLE001 `step` raises it
            self._error = error
        self.layer = self.part = None
        self._back.release()


class Lockstep:
    """Passes of one model over several batches, each of which waits before every block for the others.

    Ahead of the first block they wait before every part, so that the parts of an encoder are read only once as well;
    without sites they do so until the end. Batches from an iterator, of which only the necessary ones are read, pass
    the parts ahead of the first block one by one.

    Args:
        model: Model, in eval mode.
        weights: Weights of the model on disk.
        sites: Sites of its blocks, in order.
        current: Thread-local storage; ``current.one`` is the pass of the thread.
        head: Module before which a pass ends if all blocks have run; None runs each pass to its end.
        n_layers: Number of layers that a pass must leave before it may end; None is one per site. Where residuals are
            added outside of modules, there are no sites, and the observer of the layers counts them in `Pass.n_left`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: StreamedWeights,
        sites: Sequence[Site],
        current: threading.local,
        *,
        head: nn.Module | None = None,
        n_layers: int | None = None,
    ) -> None:
        self._model, self._weights, self._sites, self._current = model, weights, sites, current
        self._head, self._first = head, 0
        self._n_layers = len(sites) if n_layers is None else n_layers
        self._layers = {(site.module, site.call): layer for layer, site in enumerate(sites)}
        self._parts = weights.other_parts(site.module for site in sites)
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
        is_known: bool = False,
    ) -> None:
        """Run all batches through all blocks.

        Args:
            batches: Inputs of the passes.
            begin: Function that creates the observer of a pass from its batch, kept as `Pass.watcher`.
            hooks: Hooks that observe the calls of blocks.
            is_enough: Function that returns whether enough batches have been read; called before each batch.
            after_start: Function called with each pass when it waits before its first layer.
            before_first: Function called when all passes wait before the first layer.
            after_layer: Function called when all passes have run a layer and wait before the next.
            first: First layer that runs; earlier layers return their previous outputs.
            last: Last layer that runs.
            outputs: Output of the block before the first layer, one per pass.
            is_known: Whether all batches are in memory, rather than read from an iterator.
        """
        with ExitStack() as stack:
            stack.enter_context(self._weights.emptied_after())
            stack.callback(self._cancel)
            stack.enter_context(self._hooked())
            stack.enter_context(watch(hooks))
            if first:
                stack.enter_context(self._bypassed(first))
            for i, batch in enumerate(islice(batches, len(outputs)) if first else batches):
                if is_enough():
                    break
                one = Pass(batch, self._in_thread(begin))
                one.output = outputs[i] if first else None
                self._passes.append(one)
                one.step()
                if not is_known:
                    self._reach_first_layer([one])
                    after_start(one)
            if is_known:
                self._reach_first_layer(self._passes)
                self._passes = list(self._begun(is_enough, after_start))
            before_first(self._passes)
            for layer in range(first, last + 1):
                waiting = [one for one in self._passes if one.layer == layer]
                if waiting:
                    with self._weights.hold(self._sites[layer].module):
                        for one in waiting:
                            one.step()
                after_layer(layer, self._passes)

    def _reach_first_layer(self, passes: Sequence[Pass]) -> None:
        """Run passes until they wait before a layer; run each part on the way for all passes that wait before it."""
        while waiting := [one for one in passes if one.part is not None]:
            part = waiting[0].part
            with self._weights.hold(part) if part is not None else nullcontext():
                for one in waiting:
                    if one.part is part:
                        one.step()

    def _begun(self, is_enough: Callable[[], bool], after_start: Callable[[Pass], None]) -> Iterator[Pass]:
        """Yield the passes that are needed, and end the others."""
        for one in self._passes:
            if is_enough():
                one.cancel()
            else:
                after_start(one)
                yield one

    def _in_thread(self, begin: Callable[[Any], Any]) -> Callable[[Pass], None]:
        device = self._weights.device.type
        is_mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def run(one: Pass) -> None:
            self._current.one, one.watcher = one, begin(one.batch)
            with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=is_mixed):
                run_model(self._model, one.batch)

        return run

    def _cancel(self) -> None:
        for one in self._passes:
            one.cancel()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Attach hooks that wait before each block, before its weights are read."""
        handles = []
        for module in dict.fromkeys(site.module for site in self._sites):
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        handles += [part.register_forward_pre_hook(self._wait, prepend=True) for part in self._parts]
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

    def _wait(self, module: nn.Module, args: tuple) -> None:
        one: Pass = self._current.one
        if not one.has_begun:
            one.pause(None, module)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        one: Pass = self._current.one
        if one.running.pop() is not None:
            one.output = output
            one.n_left += 1

    def _stop(self, module: nn.Module, args: tuple) -> None:
        one: Pass = self._current.one
        one.has_early_exit |= 0 < one.n_left < self._n_layers
        if one.n_left == self._n_layers and not one.has_early_exit:
            raise CancelledPass

    @contextmanager
    def _bypassed(self, first: int) -> Iterator[None]:
        """Let the blocks before a layer return the previous output of the last of them, without their weights."""
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
