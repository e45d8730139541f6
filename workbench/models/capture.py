"""Capture of the moments of the residual stream at every block by temporary hooks, and their decomposition."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from workbench.errors import SnapshotError, StoreError
from workbench.io.atomic import replacing
from workbench.io.files import cache_folder
from workbench.io.memory import give_back
from workbench.io.progress import n_cores
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.moments import SnapshotMoments, not_finite
from workbench.koopman.sketch import OVERSAMPLING, SnapshotSketch
from workbench.koopman.spectra import LayerSpectrum, layer_spectra
from workbench.models.anatomy import Anatomy
from workbench.models.block_calls import Site
from workbench.models.block_hooks import BlockCall, BlockHooks, depth_error, raise_on_unknown
from workbench.models.calling import on_device_of, run_model, runnable
from workbench.models.probing import HookRequest, undisturbed, watch
from workbench.models.readable_weights import read_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.models.batches import Batches, TokenSelection

    Moments = SnapshotMoments | SnapshotSketch
    from workbench.koopman.dmd import DmdOptions


#: Width up to which the moments of all layers are small compared with the model.
_NARROW = 1024


def capture_layers(
    model: nn.Module,
    anatomy: Anatomy,
    batches: Batches,
    selection: TokenSelection,
    take: Callable[[int, Moments], None],
    *,
    options: DmdOptions | None = None,
    layers: Collection[int] | None = None,
    after_batch: Callable[[int], None] = lambda _: None,
) -> None:
    """Run a model over batches and pass the moments of every block's input and output to a function.

    The model, in any mode, runs in eval mode without gradients; its computation is unchanged, except that its
    language-model head is skipped. Hooks return None and are always removed; training mode and random state are
    restored. ``take`` receives each layer and its moments, on the device of the states (on the host where that device
    has no float64): when the batch has passed the layer, if there is a single batch, otherwise at the end. Where the
    depth of a forward pass depends on the data, the numbers of snapshots differ between layers. ``layers`` of None
    captures all; with a rank in the options, the leading directions are sufficient. ``after_batch`` receives the number
    of states chosen so far.
    """
    model = runnable(model)
    captured = range(len(anatomy.sites)) if layers is None else sorted(layers)
    selection.begin(batches)
    is_single = isinstance(batches.items, list) and len(batches.items) == 1
    moments: dict[int, Moments] = {}

    def add(i: int, x: Tensor, y: Tensor) -> None:
        if i not in moments:
            moments[i] = moments_for(anatomy, i, x, options or DmdOptions(), n_snapshots=selection.n_snapshots)
        moments[i].update(x.detach(), y.detach(), check_finite=False)
        are_finite[i] = moments[i].is_finite
        if is_single:
            seen.add(i)
            take(i, moments.pop(i))

    are_finite: dict[int, Tensor] = {}
    seen: set[int] = set()
    watcher = StreamWatcher(anatomy, selection, add, layers=layers)
    with undisturbed(model), watcher, watch(unknown_block_hooks(model, anatomy)), without_head(model, anatomy):
        for batch in batches.items:
            if selection.is_complete:
                break
            watcher.begin(batch)  # before the batch is moved to the device, because its masks are read on the host
            run_model(model, on_device_of(model, batch))
            require_finite(anatomy, are_finite)
            after_batch(selection.n_chosen)
    require_reached(anatomy, [layer for layer in captured if layer not in seen and layer not in moments])
    for layer in sorted(moments):
        take(layer, moments.pop(layer))


def unknown_block_hooks(model: nn.Module, anatomy: Anatomy) -> list[HookRequest]:
    """Return hooks that raise an exception if a block runs that did not run when the anatomy was read."""
    containers = {site.name.split("#")[0].rpartition(".")[0] for site in anatomy.sites}
    known = {id(site.module) for site in anatomy.sites}
    kinds = {type(site.module) for site in anatomy.sites}

    def failing(name: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise depth_error(name)

        return fail

    return [
        (member, failing(f"{path}.{name}"), True)
        for path in containers
        for name, member in model.get_submodule(path).named_children()
        if type(member) in kinds and id(member) not in known
    ]


def require_reached(anatomy: Anatomy, layers: Sequence[int]) -> None:
    """Raise SnapshotError if the inputs did not reach some layers."""
    if layers:
        name = anatomy.sites[layers[0]].name
        raise SnapshotError(f"No states passed {name}; pass inputs that reach every block.")


def require_finite(anatomy: Anatomy, are_finite: Mapping[int, Tensor]) -> None:
    """Raise SnapshotError for the first layer with values that are not finite, after one wait for all layers."""
    numbers = read_numbers(list(are_finite.values()))
    for layer, is_finite in zip(are_finite, numbers, strict=True):
        if not is_finite:
            raise not_finite(_name_of(anatomy, layer))


@contextmanager
def without_head(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    """Replace the output of the language-model head by zeros without memory, unless it is called between blocks."""
    head = head_of(model, anatomy)
    if head is None or "forward" in vars(head):
        yield
        return
    n_left, is_early = 0, False
    forward = head.forward

    def begin(*_: Any) -> None:
        nonlocal n_left, is_early
        n_left, is_early = 0, False
        blocks.begin_pass()

    def leave(call: BlockCall) -> None:
        nonlocal n_left
        n_left += 1

    def zeros(x: Tensor) -> Tensor:
        nonlocal is_early
        is_early = is_early or 0 < n_left < len(anatomy.sites)
        if is_early or n_left < len(anatomy.sites):
            return forward(x)
        return x.new_zeros(1).expand(*x.shape[:-1], head.out_features)

    blocks = BlockHooks(anatomy.sites, on_leave=leave)
    vars(head)["forward"] = zeros
    try:
        with blocks, watch([(model, begin, True)]):
            yield
    finally:
        del vars(head)["forward"]


def head_of(model: nn.Module, anatomy: Anatomy) -> nn.Linear | None:
    """Return the linear map to the vocabulary, with one output per entry of the embedding; None unless it is unique."""
    inside = {id(part) for site in anatomy.sites for part in site.module.modules()}
    size = max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == size and id(module) not in inside
    ]
    return heads[0] if len(heads) == 1 else None


def moments_for(
    anatomy: Anatomy, layer: int, states: Tensor, options: DmdOptions, *, n_snapshots: int | None
) -> Moments:
    """Create the moments that collect the states of one layer; a sketch if those would be large and not all needed."""
    width = states.shape[-1]
    if not is_sketched(width, options.rank, n_snapshots):
        return SnapshotMoments(states.shape[-1], device=states.device, name=_name_of(anatomy, layer))
    name = _name_of(anatomy, layer)
    return SnapshotSketch(width, rank=options.rank, seed=options.seed, device=states.device, name=name)


def is_sketched(width: int, rank: int | None, n_snapshots: int | None) -> bool:
    """Return whether a layer of this width is collected in a sketch rather than in moments."""
    is_few = n_snapshots is not None and n_snapshots <= width
    return width > _NARROW and (is_few or (rank is not None and OVERSAMPLING * rank < width))


def _name_of(anatomy: Anatomy, layer: int) -> str:
    return f"layer {layer} ({anatomy.sites[layer].name})"


class StreamWatcher(BlockHooks):
    """Hooks that pass layer and the chosen states entering and leaving it, (snapshot, feature), with their graph."""

    def __init__(
        self,
        anatomy: Anatomy,
        selection: TokenSelection,
        take: Callable[[int, Tensor, Tensor], None],
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        super().__init__(anatomy.sites, layers=layers, on_unknown=raise_on_unknown)
        self.selection, self.take = selection, take
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """Prepare for the next batch."""
        self.begin_pass()
        self.batch, self.leading = batch, torch.Size()
        self._chosen: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        self._last: tuple[Tensor, int | None, Tensor] | None = None

    def on_enter(self, call: BlockCall) -> None:
        """Keep the states that enter until the block has run."""
        self._waiting[call.layer] = self._chosen_of(call.state_in, call.site)

    def on_leave(self, call: BlockCall) -> None:
        """Pass the states that entered and left to ``take``."""
        self.take(call.layer, self._waiting.pop(call.layer), self._chosen_of(call.state_out, call.site))

    def choose(self, state: Tensor, site: Site) -> Tensor:
        """Return the indices of the chosen tokens of a state, chosen once per pass, in which their number stays."""
        if self._chosen is None:
            self.leading = state.shape[:-1]
            self._chosen = self.selection.choose(self.leading, self.batch)
        if state.shape[:-1] != self.leading:
            raise SnapshotError(
                f"States at {site.name} have leading shape {tuple(state.shape[:-1])}, previous ones "
                f"{tuple(self.leading)}; only stacks that keep their tokens can be profiled."
            )
        # Moved once, not for each block; the copy may be asynchronous.
        self._chosen = self._chosen.to(state.device, non_blocking=state.device.type == "cuda")
        return self._chosen

    def _chosen_of(self, state: Tensor, site: Site) -> Tensor:
        """Return a copy of the chosen states, shape (snapshot, feature); the block may overwrite its input."""
        # The state that leaves a block usually enters the next one unchanged. In inference mode writes are not counted.
        version = None if state.is_inference() else state._version
        if version is None or self._last is None or self._last[0] is not state or self._last[1] != version:
            self._last = state, version, state.flatten(0, -2)[self.choose(state, site)]
        return self._last[2]


_FOLDER = "unfinished-profiles"


class ProfileJournal:
    """Finished layers of one profile, and the states that enter the next, kept in the cache until it is complete."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of(cls, *parts: Any) -> ProfileJournal:
        """Return the journal of a profile by everything its result depends on; for iterators, nothing is kept."""
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
    """Collects moments and decomposes them when they are many or large; results enter the journal at once."""

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
