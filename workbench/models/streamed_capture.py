"""Capture of moments from a model whose weights stay on disk: all batches pass through one block before the next.

Each batch has a forward pass in a thread, of which one runs at a time and all wait before every block. Only the code of
the model knows what it passes to each block, and how often a block runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.io.memory import give_back
from workbench.models.anatomy import Anatomy
from workbench.models.calling import config_options, configs_of, on_device_of, run_model
from workbench.models.capture import (
    StreamWatcher,
    digest_of,
    head_of,
    moments_for,
    require_finite,
    require_reached,
    unknown_block_hooks,
)
from workbench.models.probing import undisturbed, watch

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.koopman.dmd import DmdOptions
    from workbench.models.batches import Batches, TokenSelection
    from workbench.models.block_calls import Site
    from workbench.models.capture import LayerResults, Moments
    from workbench.models.subject import Subject

#: Prefixes of options that only models with recurrent layers have.
_RECURRENT = ("mamba", "ssm", "state_size", "conv", "linear_", "recurrent", "lru", "attention_hidden_size")
#: Types of layers whose cache holds only keys and values.
_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention"}


def capture_streamed(
    subject: Subject,
    anatomy: Anatomy,
    batches: Batches,
    selection: TokenSelection,
    results: LayerResults,
    options: DmdOptions,
    layers: Sequence[int],
) -> None:
    """Run batches through a model block by block, and pass on the moments of each block when all batches have passed.

    Each block is read from disk once. Layers in the journal are not measured again. If the journal also holds the
    states that enter the first missing layer, and the model passes nothing else from block to block, the earlier blocks
    do not run again either. If residuals are added outside of modules, every part of the model is read once, and the
    moments of all layers are in memory at the same time. Errors are those of `capture_layers`.
    """
    missing = [layer for layer in layers if layer not in results.layers]
    if not missing or subject.streamed is None:
        return
    given = subject, anatomy, batches, selection, results, options, missing
    first = missing[0]
    states = results.journal.states(first - 1) if results.journal is not None and first else None
    if states is not None:
        try:
            _Lockstep(*given).run(first, states["outputs"], states["inputs"])
        except _OtherStatesError:
            selection.reset()
        else:
            return
    _Lockstep(*given).run()


class _OtherStatesError(Exception):
    """The states that enter the first layer differ from those in the journal."""


class _CancelledPass(BaseException):
    """Ends a pass that is no longer needed; not an Exception, so that no model catches it."""


class _Pass:
    """One forward pass in a separate thread, which runs only while the others wait."""

    watcher: StreamWatcher

    def __init__(self, run: Callable[[_Pass], None], output: Any) -> None:
        self.layer: int | None = None  # before which it waits; None before the first layer and after the end
        self.part: nn.Module | None = None  # ahead of the first layer before which it waits, as a block of an encoder
        self.arguments: Any = None  # of the block before which it waits
        self.output = output  # of the block that ran last
        self.n_left, self.has_early_exit, self.has_begun = 0, False, False
        self.n_calls: Counter[nn.Module] = Counter()
        self.running: list[int | None] = []
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Run until the next block or the end, and raise the exception of the pass, if there is one."""
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
            raise _CancelledPass
        self.layer = self.part = None

    def cancel(self) -> None:
        """End the pass at its next block or before."""
        self._is_cancelled = True
        self._go.release()
        self._thread.join()

    def _run(self, run: Callable[[_Pass], None]) -> None:
        self._go.acquire()
        try:
            if not self._is_cancelled:
                run(self)
        except _CancelledPass:
            pass
        except BaseException as error:  # noqa: BLE001 `step` raises it
            self._error = error
        self.layer = self.part = None
        self._back.release()


class _Lockstep:
    """One run of all batches through a model; the arguments are those of `capture_streamed`.

    Ahead of the first block passes wait before every part, so that the parts of an encoder are read only once as well.
    Where residuals are added outside of modules, no call is a layer, and they do so until the end. Batches from an
    iterator, of which only the necessary ones are read, pass the parts ahead of the first block one by one.
    """

    def __init__(
        self,
        subject: Subject,
        anatomy: Anatomy,
        batches: Batches,
        selection: TokenSelection,
        results: LayerResults,
        options: DmdOptions,
        layers: Sequence[int],
    ) -> None:
        assert subject.streamed is not None
        self._model, self._weights = subject.model, subject.streamed
        self._anatomy, self._batches, self._selection = anatomy, batches, selection
        self._results, self._options, self._layers = results, options, layers
        self._is_outside = any(site.exit is not None for site in anatomy.sites)
        self._sites: Sequence[Site] = () if self._is_outside else anatomy.sites
        self._n_layers = len(layers) if self._is_outside else len(anatomy.sites)
        self._numbers = {(site.module, site.call): layer for layer, site in enumerate(self._sites)}
        self._moments: dict[int, Moments] = {}
        self._silent: list[int] = []
        self._passes: list[_Pass] = []
        self._first = 0
        self._current = threading.local()  # `one` is the pass of the thread

    def run(self, first: int = 0, outputs: Sequence[Any] = (), inputs: Sequence[bytes] = ()) -> None:
        """Run all batches from a layer on; earlier ones return given outputs. _OtherStatesError for other digests."""
        self._first = first
        self._selection.begin(self._batches)
        hooks = unknown_block_hooks(self._model, self._anatomy)
        hooks += self._watcher().hooks(lambda: self._current.one.watcher)
        caches = [(config, "use_cache", False) for config in configs_of(self._model) if _is_cache_idle(config)]
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self._model))
            stack.enter_context(config_options(caches))
            stack.enter_context(self._weights.emptied_after())
            stack.callback(self._cancel)
            stack.enter_context(self._waiting_before_blocks())
            stack.enter_context(watch(hooks))
            if first:
                stack.enter_context(self._bypassed(first))
            self._begin(outputs)
            if inputs and [digest_of(one.arguments) for one in self._passes] != list(inputs):
                raise _OtherStatesError
            for layer in () if self._is_outside else range(first, self._layers[-1] + 1):
                if waiting := [one for one in self._passes if one.layer == layer]:
                    with self._weights.hold(self._sites[layer].module):
                        for one in waiting:
                            one.step()
                self._after_layer(layer)
            if self._is_outside:
                require_finite(self._anatomy, {i: self._moments[i].is_finite for i in sorted(self._moments)})
                self._silent = [layer for layer in self._layers if layer not in self._moments]
                for layer in sorted(self._moments):
                    self._results.add(layer, self._moments.pop(layer))
        require_reached(self._anatomy, self._silent)

    def _cancel(self) -> None:
        for one in self._passes:
            one.cancel()

    def _watcher(self, batch: Any = None) -> StreamWatcher:
        kind = _LastWatcher if self._is_outside else StreamWatcher
        watcher = kind(self._anatomy, self._selection, self._add, layers=self._layers)
        watcher.begin(batch)
        return watcher

    def _add(self, layer: int, x: Tensor, y: Tensor) -> None:
        if layer not in self._moments:
            n = self._selection.n_snapshots
            self._moments[layer] = moments_for(self._anatomy, layer, x, self._options, n_snapshots=n)
        self._moments[layer].update(x.detach(), y.detach(), check_finite=False)
        if self._is_outside:
            self._current.one.n_left += 1

    def _begin(self, outputs: Sequence[Any]) -> None:
        """Start as many passes as are needed, and run them until they wait before the first layer."""
        device = self._weights.device.type
        is_mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def running(batch: Any) -> Callable[[_Pass], None]:
            def run(one: _Pass) -> None:
                self._current.one, one.watcher = one, self._watcher(batch)
                with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=is_mixed):
                    run_model(self._model, batch)

            return run

        for i, item in enumerate(islice(self._batches.items, len(outputs)) if outputs else self._batches.items):
            batch = on_device_of(self._model, item)
            if self._selection.is_complete:
                break
            one = _Pass(running(batch), outputs[i] if outputs else None)
            self._passes.append(one)
            one.step()
            if not self._batches.is_known:
                self._reach_first_layer([one])
        if self._batches.is_known:
            self._reach_first_layer(self._passes)

    def _reach_first_layer(self, passes: Sequence[_Pass]) -> None:
        """Run each part ahead of the first layer for all passes, and choose the tokens; passes not needed end."""
        while waiting := [one for one in passes if one.part is not None]:
            part = waiting[0].part
            assert part is not None
            with self._weights.hold(part):
                for one in waiting:
                    if one.part is part:
                        one.step()
        for one in list(passes):
            if self._batches.is_known and self._selection.is_complete:
                one.cancel()
                self._passes.remove(one)
            elif one.layer is not None:
                site = self._anatomy.sites[one.layer]
                one.watcher.choose(site.state_in(*one.arguments), site)

    def _after_layer(self, layer: int) -> None:
        journal, passes = self._results.journal, self._passes
        give_back(sum(p.nbytes for p in self._sites[layer].module.parameters()))  # work space of the block
        if layer in self._moments:
            require_finite(self._anatomy, {layer: self._moments[layer].is_finite})
        # States are saved first, so that a finished layer never has to run again to compute the inputs of the next.
        if journal is not None and passes and all(one.layer == layer + 1 for one in passes):
            digests = [digest_of(one.arguments) for one in passes]
            if all(digests):
                journal.keep_states(layer, [one.output for one in passes], digests)
        if layer in self._moments:
            self._results.add(layer, self._moments.pop(layer))
        elif layer in self._layers:
            self._silent.append(layer)
        if journal is not None:
            unfinished = [number for number in self._layers if number not in self._results.layers]
            journal.remove_states(min(unfinished, default=layer + 1) - 1)

    @contextmanager
    def _waiting_before_blocks(self) -> Iterator[None]:
        """Attach hooks that wait before each block, before its weights are read, and end passes before the head."""

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            one: _Pass = self._current.one
            layer = self._numbers.get((module, one.n_calls[module]))
            one.n_calls[module] += 1
            one.running.append(layer)
            if layer is not None and layer >= self._first:
                one.arguments = (args, kwargs)
                one.pause(layer)
                one.arguments = None

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            one: _Pass = self._current.one
            if one.running.pop() is not None:
                one.output = output
                one.n_left += 1

        def wait(module: nn.Module, args: tuple) -> None:
            if not self._current.one.has_begun:
                self._current.one.pause(None, module)

        def stop(module: nn.Module, args: tuple) -> None:
            one: _Pass = self._current.one
            one.has_early_exit |= 0 < one.n_left < self._n_layers
            if one.n_left == self._n_layers and not one.has_early_exit:
                raise _CancelledPass

        with ExitStack() as stack:
            blocks = list(dict.fromkeys(site.module for site in self._sites))
            handles = [module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for module in blocks]
            handles += [module.register_forward_hook(leave) for module in blocks]
            handles += [p.register_forward_pre_hook(wait, prepend=True) for p in self._weights.other_parts(blocks)]
            if (head := head_of(self._model, self._anatomy)) is not None:
                handles.append(head.register_forward_pre_hook(stop, prepend=True))
            for handle in handles:
                stack.callback(handle.remove)
            yield

    @contextmanager
    def _bypassed(self, first: int) -> Iterator[None]:
        """Let the blocks before a layer return the previous output of the last of them, without their weights."""
        modules = dict.fromkeys(site.module for site in self._sites[:first])
        still_needed = {site.module for site in self._sites[first:]}
        own = {module: module.forward for module in modules if "forward" in vars(module)}

        def bypass(forward: Callable[..., Any]) -> Callable[..., Any]:
            def bypassing(*args: Any, **kwargs: Any) -> Any:
                layer = self._current.one.running[-1]
                return self._current.one.output if layer is not None and layer < first else forward(*args, **kwargs)

            return bypassing

        try:
            for module in modules:
                module.forward = bypass(module.forward)
            with self._weights.without([module for module in modules if module not in still_needed]):
                yield
        finally:
            for module in modules:
                del module.forward
            for module, forward in own.items():
                module.forward = forward


class _LastWatcher(StreamWatcher):
    """Watcher that ends a pass from which no states are needed when its first layer begins."""

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """Choose tokens as `StreamWatcher.choose` does, or end the pass."""
        if self._chosen is None and self.selection.is_complete:
            raise _CancelledPass
        return super().choose(state, site)


def _is_cache_idle(config: Any) -> bool:
    """Return whether the cache of keys and values, which would keep those of every layer, is not needed in one pass.

    With a cache, recurrent layers compute differently, with other rounding errors, and layers that share keys and
    values may read them from it.
    """
    options = vars(config)
    is_recurrent = any(name.startswith(_RECURRENT) for name in options)
    is_recurrent |= not {*(options.get("layer_types") or ())} <= _WITH_KEYS
    return "use_cache" in options and not is_recurrent and not options.get("num_kv_shared_layers")
