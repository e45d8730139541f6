"""The moments of a model whose weights stay on disk: all batches pass one block, then the next."""

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
    refusals,
    refuse_not_finite,
    refuse_silent,
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

#: Beginnings of options that only models with recurrent layers have.
_RECURRENT = ("mamba", "ssm", "state_size", "conv", "linear_", "recurrent", "lru", "attention_hidden_size")
#: Kinds of layers that keep nothing but keys and values.
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
    """Push batches through a model block by block, and pass on the moments of each block when all are through it.

    Each block is read from disk once. Layers that a journal has are not measured again; where it also has the states in
    front of the first layer that is missing, and the model hands nothing else from block to block, earlier blocks do
    not run again either. Where residuals are added outside of modules, every part of the model is read once instead,
    and the moments of all layers are in memory together.

    Args:
        subject: Subject whose weights are streamed.
        anatomy: Anatomy of its model.
        batches: Batches of inputs.
        selection: Selection of token states, the same in every layer.
        results: Takes the moments.
        options: Options of the spectra that are wanted.
        layers: Layers wanted, rising.

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
    """What enters the first layer is not what entered it before."""


@dataclass
class _Run:
    """Pushes all batches through; attributes as the arguments of `capture_streamed`."""

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
        """Push all batches through, from a layer on.

        Args:
            first: First layer that runs.
            outputs: What the block before it returned, one a batch.
            inputs: Digests of what entered it, one a batch.

        Raises:
            _OtherStatesError: If something else enters it now.
        """
        current = self._current
        # No module's call is a layer where the residual is added between modules: passes wait in front of every part.
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
        with undisturbed(self.model), config_options(caches), watch(refusals(self.model, self.anatomy)):
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
        refuse_silent(self.anatomy, self.silent)

    @property
    def _is_outside(self) -> bool:
        return any(site.exit is not None for site in self.anatomy.sites)

    def _add_all(self) -> None:
        """Pass on the moments of all layers, once all passes have ended."""
        refuse_not_finite(self.anatomy, {layer: self.moments[layer].is_finite for layer in sorted(self.moments)})
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
        self.moments[layer].update(x.detach(), y.detach(), refuses=False)
        if self._is_outside:
            self._current.one.n_left += 1

    def _choose(self, one: Pass) -> None:
        """Choose the tokens of a pass before its first block runs, so that no more batches come than are needed."""
        if one.layer is not None:
            site = self.anatomy.sites[one.layer]
            one.watcher.choose(site.state_in(*one.arguments), site)

    def _compare(self, passes: Sequence[Pass], inputs: Sequence[bytes]) -> None:
        if inputs and [digest_of(one.arguments) for one in passes] != list(inputs):
            raise _OtherStatesError

    def _after_layer(self, layer: int, passes: Sequence[Pass]) -> None:
        journal: ProfileJournal | None = self.results.journal
        give_back(sum(p.nbytes for p in self.anatomy.sites[layer].module.parameters()))  # what a block computes with
        if layer in self.moments:
            refuse_not_finite(self.anatomy, {layer: self.moments[layer].is_finite})
        # The states come first: a layer that is finished must not run again to find what enters the next.
        if journal is not None and passes and all(one.layer == layer + 1 for one in passes):
            digests = [digest_of(one.arguments) for one in passes]
            if all(digests):
                journal.keep_states(layer, [one.output for one in passes], digests)
        if layer in self.moments:
            self.results.add(layer, self.moments.pop(layer))
        elif layer in self.layers:
            self.silent.append(layer)
        if journal is not None:
            undone = [wanted for wanted in self.layers if wanted not in self.results.layers]
            journal.forget_states(min(undone, default=layer + 1) - 1)


class _LastWatcher(StreamWatcher):
    """Ends a pass from which no states are wanted as its first layer begins."""

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """As `StreamWatcher.choose`."""
        if self._chosen is None and self.selection.is_complete:
            raise CancelledPass
        return super().choose(state, site)


def _is_cache_idle(config: Any) -> bool:
    """Whether the cache of keys and values, which would hold those of every layer, changes nothing in one pass.

    Recurrent layers take another path with a cache, which rounds differently, and layers that share keys and values
    may read them from it.
    """
    options = vars(config)
    is_recurrent = any(name.startswith(_RECURRENT) for name in options)
    is_recurrent |= not {*(options.get("layer_types") or ())} <= _WITH_KEYS
    return "use_cache" in options and not is_recurrent and not options.get("num_kv_shared_layers")
