"""Capture of moments from a model whose weights stay on disk: all batches pass through one block before the next."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.io.memory import give_back
from workbench.models.anatomy import Anatomy
from workbench.models.calling import on_device_of, run_model
from workbench.models.capture import (
    StreamWatcher,
    head_of,
    moments_for,
    require_finite,
    require_reached,
    unknown_block_hooks,
)
from workbench.models.config_options import config_options, configs_of
from workbench.models.layer_results import digest_of
from workbench.models.probing import HookRequest, undisturbed, watch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.koopman.dmd import DmdOptions
    from workbench.models.batches import Batches
    from workbench.models.capture import Moments
    from workbench.models.layer_results import LayerResults, ProfileJournal
    from workbench.models.site import Site
    from workbench.models.streaming import StreamedWeights
    from workbench.models.subject import Subject
    from workbench.models.token_selection import TokenSelection


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
    moments of all layers are in memory at the same time.

    Args:
        subject: Subject whose weights are streamed.
        anatomy: Anatomy of its model.
        batches: Batches of inputs.
        selection: Selection of token states, the same in every layer.
        results: Object that receives the moments.
        options: Options of the spectra.
        layers: Layers to measure, in increasing order.

    Raises:
        SnapshotError: See `capture_layers`.
    """
    missing = [layer for layer in layers if layer not in results.layers]
    if not missing or subject.streamed is None:
        return
    first = missing[0]
    run = _Run(subject.model, subject.streamed, anatomy, batches, selection, results, options, missing)
    states = results.journal.states(first - 1) if results.journal is not None and first else None
    if states is not None:
        try:
            run(first, states["outputs"], states["inputs"])
        except _OtherStatesError:
            selection.reset()
        else:
            return
    run()


class _OtherStatesError(Exception):
    """The states that enter the first layer differ from those in the journal."""


@dataclass
class _Run:
    """One run of all batches through a model; attributes as the arguments of `capture_streamed`."""

    model: nn.Module
    weights: StreamedWeights
    anatomy: Anatomy
    batches: Batches
    selection: TokenSelection
    results: LayerResults
    options: DmdOptions
    layers: Sequence[int]
    moments: dict[int, Moments] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    _current: threading.local = field(default_factory=threading.local)

    def __call__(self, first: int = 0, outputs: Sequence[Any] = (), inputs: Sequence[bytes] = ()) -> None:
        """Run all batches through the model from a given layer on.

        Args:
            first: First layer that runs.
            outputs: Output of the block before it, one per batch.
            inputs: Digests of the inputs of the first layer in the journal, one per batch.

        Raises:
            _OtherStatesError: If the inputs of the first layer differ from those in the journal.
        """
        current = self._current
        # If residuals are added outside of modules, no module's call is a layer, and passes wait before every part.
        sites = () if self._is_outside else self.anatomy.sites
        template = StreamWatcher(self.anatomy, self.selection, self._add, layers=self.layers)
        self.selection.begin(self.batches)
        caches = [(config, "use_cache", False) for config in configs_of(self.model) if _is_cache_idle(config)]
        lockstep = Lockstep(
            self.model,
            self.weights,
            sites,
            current,
            head=head_of(self.model, self.anatomy),
            n_layers=len(self.layers) if self._is_outside else None,
        )
        with undisturbed(self.model), config_options(caches), watch(unknown_block_hooks(self.model, self.anatomy)):
            lockstep.run(
                (on_device_of(self.model, batch) for batch in self.batches.items),
                self._begin,
                hooks=template.hooks(lambda: current.one.watcher),
                is_enough=lambda: self.selection.is_complete,
                after_start=self._choose,
                before_first=lambda passes: self._compare(passes, inputs),
                after_layer=self._after_layer,
                first=first,
                last=-1 if self._is_outside else self.layers[-1],
                outputs=outputs,
                is_known=self.batches.is_known,
            )
            if self._is_outside:
                self._add_all()
        require_reached(self.anatomy, self.silent)

    @property
    def _is_outside(self) -> bool:
        return any(site.exit is not None for site in self.anatomy.sites)

    def _add_all(self) -> None:
        """Pass on the moments of all layers after all passes have ended."""
        require_finite(self.anatomy, {layer: self.moments[layer].is_finite for layer in sorted(self.moments)})
        self.silent = [layer for layer in self.layers if layer not in self.moments]
        for layer in sorted(self.moments):
            self.results.add(layer, self.moments.pop(layer))

    def _begin(self, batch: Any) -> StreamWatcher:
        kind = _LastWatcher if self._is_outside else StreamWatcher
        watcher = kind(self.anatomy, self.selection, self._add, layers=self.layers)
        watcher.begin(batch)
        return watcher

    def _add(self, layer: int, x: Tensor, y: Tensor) -> None:
        if layer not in self.moments:
            n = self.selection.n_snapshots
            self.moments[layer] = moments_for(self.anatomy, layer, x, self.options, n_snapshots=n)
        self.moments[layer].update(x.detach(), y.detach(), check_finite=False)
        if self._is_outside:
            self._current.one.n_left += 1

    def _choose(self, one: Pass) -> None:
        """Choose the tokens of a pass before its first block runs, so that no more batches are read than needed."""
        if one.layer is not None:
            site = self.anatomy.sites[one.layer]
            one.watcher.choose(site.state_in(*one.arguments), site)

    def _compare(self, passes: Sequence[Pass], inputs: Sequence[bytes]) -> None:
        if inputs and [digest_of(one.arguments) for one in passes] != list(inputs):
            raise _OtherStatesError

    def _after_layer(self, layer: int, passes: Sequence[Pass]) -> None:
        journal: ProfileJournal | None = self.results.journal
        give_back(sum(p.nbytes for p in self.anatomy.sites[layer].module.parameters()))  # work space of the block
        if layer in self.moments:
            require_finite(self.anatomy, {layer: self.moments[layer].is_finite})
        # States are saved first, so that a finished layer never has to run again to compute the inputs of the next.
        if journal is not None and passes and all(one.layer == layer + 1 for one in passes):
            digests = [digest_of(one.arguments) for one in passes]
            if all(digests):
                journal.keep_states(layer, [one.output for one in passes], digests)
        if layer in self.moments:
            self.results.add(layer, self.moments.pop(layer))
        elif layer in self.layers:
            self.silent.append(layer)
        if journal is not None:
            unfinished = [number for number in self.layers if number not in self.results.layers]
            journal.remove_states(min(unfinished, default=layer + 1) - 1)


class _LastWatcher(StreamWatcher):
    """Watcher that ends a pass from which no states are needed when its first layer begins."""

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """Choose tokens as `StreamWatcher.choose` does, or end the pass."""
        if self._chosen is None and self.selection.is_complete:
            raise CancelledPass
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
