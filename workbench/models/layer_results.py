"""Decomposition of the moments of layers, a few layers at a time, so that few moments are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.io.memory import give_back
from workbench.io.progress import n_cores
from workbench.koopman.spectra import LayerSpectrum, layer_spectra

if TYPE_CHECKING:
    from workbench.koopman.dmd import DmdOptions
    from workbench.models.capture import Moments
    from workbench.models.profile_journal import ProfileJournal

#: Size of the moments that wait to be decomposed in parallel, in bytes.
_MOST_WAITING = 64 * 2**20


def n_waiting(n_bytes: int, n_workers: int) -> int:
    """Return the maximum number of layers whose moments, of ``n_bytes`` each, are in memory at the same time."""
    return max(n_workers, -(-_MOST_WAITING // max(n_bytes, 1)))


@dataclass(frozen=True)
class FoundLayer:
    """The spectrum of one layer, with the numbers of snapshots and features and the name of the layer."""

    spectrum: LayerSpectrum
    n_snapshots: int
    n_features: int
    name: str


class LayerResults:
    """Collects moments and decomposes them when they are many or large.

    Args:
        options: Options of the spectra.
        names: Name of each layer, for messages.
        n_workers: Number of layers decomposed in parallel; None uses one worker per core.
        journal: Journal to which each result is written at once; None if there is none.
        after_layer: Function called when a layer is done.
    """

    def __init__(
        self,
        options: DmdOptions,
        names: Sequence[str],
        *,
        n_workers: int | None = None,
        journal: ProfileJournal | None = None,
        after_layer: Callable[[], Any] = lambda: None,
    ) -> None:
        self.journal = journal
        self._options, self._names, self._n_workers = options, names, n_workers
        self._after_layer = after_layer
        self._waiting: dict[int, Moments] = {}
        self._found: dict[int, FoundLayer] = {}
        for layer, kept in ({} if journal is None else journal.finished()).items():
            self._keep(layer, *kept)
            after_layer()

    @property
    def layers(self) -> set[int]:
        """Layers that are done."""
        return set(self._found)

    def add(self, layer: int, moments: Moments) -> None:
        """Add the moments of a layer.

        Raises:
            SnapshotError: If a layer has no spectrum.
        """
        self._waiting[layer] = moments
        is_large = sum(seen.n_bytes for seen in self._waiting.values()) >= _MOST_WAITING
        if is_large and len(self._waiting) >= (self._n_workers or n_cores()):
            self._decompose()

    def complete(self) -> dict[int, FoundLayer]:
        """Decompose the remaining layers and return the results of all.

        Raises:
            SnapshotError: If a layer has no spectrum.
        """
        if self._waiting:
            self._decompose()
        return self._found

    def _decompose(self) -> None:
        layers = list(self._waiting)
        spectra = layer_spectra(
            list(self._waiting.values()), self._options, n_workers=self._n_workers, after_layer=self._after_layer
        )
        n_bytes = max(seen.n_bytes for seen in self._waiting.values())
        for layer, spectrum in zip(layers, spectra, strict=True):
            seen = self._waiting.pop(layer)
            if self.journal is not None:
                self.journal.finish(layer, spectrum, seen.n_snapshots, seen.n_features)
            self._keep(layer, spectrum, seen.n_snapshots, seen.n_features)
            del seen
        give_back(n_bytes)

    def _keep(self, layer: int, spectrum: LayerSpectrum, n_snapshots: int, n_features: int) -> None:
        name = f"layer {layer} ({self._names[layer]})"
        self._found[layer] = FoundLayer(spectrum, n_snapshots, n_features, name)
