"""Capture of moments from a model whose weights stay on disk: all batches pass through one block before the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.io.memory import give_back
from workbench.models.anatomy import Anatomy
from workbench.models.calling import on_device_of
from workbench.models.capture import (
    StreamWatcher,
    head_of,
    moments_for,
    require_finite,
    require_reached,
    unknown_block_hooks,
)
from workbench.models.config_options import config_options, configs_of
from workbench.models.lockstep import CancelledPass, Lockstep, Pass
from workbench.models.probing import undisturbed, watch
from workbench.models.profile_journal import digest_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.koopman.dmd import DmdOptions
    from workbench.models.batches import Batches
    from workbench.models.capture import Moments
    from workbench.models.layer_results import LayerResults
    from workbench.models.profile_journal import ProfileJournal
    from workbench.models.site import Site
    from workbench.models.streaming import StreamedWeights
    from workbench.models.subject import Subject
    from workbench.models.token_selection import TokenSelection

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
