"""Decomposition of the moments of layers, a few layers at a time, so that few moments are in memory."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.errors import StoreError
from workbench.io.atomic import replacing
from workbench.io.cache import cache_folder
from workbench.io.memory import give_back
from workbench.io.progress import n_cores
from workbench.koopman.spectra import LayerSpectrum, layer_spectra

if TYPE_CHECKING:
    from workbench.koopman.dmd import DmdOptions
    from workbench.models.capture import Moments

_FOLDER = "unfinished-profiles"


class ProfileJournal:
    """Finished layers of one profile, and the states that enter the first unfinished layer.

    They are kept in a folder of the cache until the profile is complete; without a folder nothing is kept. The folder's
    name is a digest of everything that the result depends on.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of(cls, *parts: Any) -> ProfileJournal:
        """Return the journal of a profile, identified by everything that its result depends on.

        Parts are texts, numbers, tensors, and containers of these. With other objects, such as iterators, which cannot
        be recognized in another process, nothing is kept.
        """
        digest = hashlib.blake2b(digest_size=16)
        if not _add(digest, parts):
            return cls(None)
        return cls(cache_folder() / _FOLDER / digest.hexdigest())

    def finished(self) -> dict[int, tuple[LayerSpectrum, int, int]]:
        """Return spectrum, number of snapshots and width of each finished layer, by layer number."""
        found = {}
        for file in [] if self.folder is None else sorted(self.folder.glob("layer-*.npz")):
            with np.load(file) as kept:
                values = {name.removeprefix("value_"): kept[name].item() for name in kept if name.startswith("value_")}
                spectrum = LayerSpectrum(kept["eigenvalue"], kept["residual"], values)
                counts = int(kept["n_snapshots"]), int(kept["n_features"])
                found[int(file.stem.split("-")[1])] = (spectrum, *counts)
        return found

    def finish(self, layer: int, spectrum: LayerSpectrum, n_snapshots: int, n_features: int) -> None:
        """Save the result of a layer."""
        if self.folder is not None:
            arrays: dict[str, Any] = {f"value_{name}": np.array(value) for name, value in spectrum.values.items()}
            arrays |= {"eigenvalue": spectrum.eigenvalue, "residual": spectrum.residual}
            with self._writing(f"layer-{layer}.npz") as partial:
                np.savez(partial, n_snapshots=np.array(n_snapshots), n_features=np.array(n_features), **arrays)

    def keep_states(self, layer: int, outputs: Sequence[Any], inputs: Sequence[bytes]) -> None:
        """Save the outputs of a layer's block, one per pass, and digests of the inputs of the next block."""
        if self.folder is not None and all(_is_plain(output) for output in outputs):
            content = {"outputs": list(outputs), "inputs": list(inputs)}
            with self._writing(f"states-{layer}.pt") as partial:
                torch.save(content, partial)

    def states(self, layer: int) -> Mapping[str, Any] | None:
        """Return the content that `keep_states` saved for a layer; None if there is none."""
        file = None if self.folder is None else self.folder / f"states-{layer}.pt"
        if file is None or not file.is_file():
            return None
        found: Mapping[str, Any] = torch.load(file, weights_only=True, mmap=False)
        return found

    def remove_states(self, before: int) -> None:
        """Remove the states of all layers before a given one."""
        for file in [] if self.folder is None else list(self.folder.glob("states-*.pt")):
            if int(file.stem.split("-")[1]) < before:
                file.unlink()

    def close(self) -> None:
        """Remove the folder after the profile is complete."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _writing(self, name: str) -> Any:
        if self.folder is None:
            raise StoreError("This profile has no journal folder.")
        return replacing(self.folder / name)


def digest_of(value: Any) -> bytes:
    """Return the digest of tensors, numbers and texts in any containers; empty if there are other objects."""
    digest = hashlib.blake2b(digest_size=16)
    return digest.digest() if _add(digest, value) else b""


def _add(digest: Any, value: Any) -> bool:
    """Add a value to a digest; return whether all its parts can be recognized."""
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return True
    if isinstance(value, Mapping):
        return _add(digest, list(value.items()))
    if isinstance(value, tuple | list):
        digest.update(f"{len(value)} items".encode())
        return all(_add(digest, item) for item in value)
    if value is None or isinstance(value, str | int | float | bytes | torch.dtype | torch.device):
        digest.update(repr(value).encode())
        return True
    return False


def _is_plain(value: Any) -> bool:
    """Return whether a value can be read back without running code."""
    if isinstance(value, torch.Tensor) or value is None:
        return True
    if type(value) in (tuple, list):
        return all(_is_plain(item) for item in value)
    return type(value) is dict and all(isinstance(name, str) and _is_plain(item) for name, item in value.items())


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

    Each result is written to the journal at once, if there is one; then ``after_layer`` is called.
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
        """Add the moments of a layer."""
        self._waiting[layer] = moments
        is_large = sum(seen.n_bytes for seen in self._waiting.values()) >= _MOST_WAITING
        if is_large and len(self._waiting) >= (self._n_workers or n_cores()):
            self._decompose()

    def complete(self) -> dict[int, FoundLayer]:
        """Decompose the remaining layers and return the results of all."""
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
