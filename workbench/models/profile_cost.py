"""Memory and time of a profile, estimated before it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.formatting import duration
from workbench.io.memory import free_memory
from workbench.io.progress import n_cores
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import OVERSAMPLING
from workbench.koopman.spectra import layer_spectra
from workbench.models.calling import device_of
from workbench.models.capture import is_sketched
from workbench.models.layer_results import n_waiting

if TYPE_CHECKING:
    from workbench.koopman.dmd import DmdOptions
    from workbench.models.anatomy import Anatomy
    from workbench.models.batches import Batches
    from workbench.models.subject import Subject

#: Number of tokens assumed for an image.
_TOKENS_OF_AN_IMAGE = 256
#: Number of float64 matrices of modes^2 entries in memory while a layer is decomposed: the operator, its eigenvectors,
#: their inverse and work space.
_MATRICES = 14
#: Width of the layer whose decomposition is timed, and maximum number of tokens of the timed matrix product.
_TRIAL_WIDTH, _TRIAL_TOKENS = 384, 512


@dataclass(frozen=True)
class ProfileCost:
    """Estimated cost of a profile: an upper estimate of the additional memory, and a rough estimate of the time.

    Attributes:
        weights: Bytes of the largest block, if weights are streamed and are no views of their files.
        states: Bytes of the states between blocks and of the activations inside one.
        moments: Bytes of the moments or snapshots of the layers that are in memory at the same time.
        spectra: Bytes of the eigenproblems that are solved in parallel.
        free: Bytes of free memory.
        seconds: Time without reading files, estimated from the speed of a matrix product and of an eigenproblem on this
            machine; NaN if it was not requested or the number of tokens is unknown.
    """

    weights: int
    states: int
    moments: int
    spectra: int
    free: int
    seconds: float = float("nan")

    @property
    def memory(self) -> int:
        """Total number of bytes."""
        return self.weights + self.states + self.moments + self.spectra

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self._parts.items())
        time = f", about {duration(self.seconds)}" if self.seconds == self.seconds else ""
        return f"up to {self.memory / 1e9:.2f} GB ({listed}) of {self.free / 1e9:.1f} GB free{time}"

    @property
    def largest(self) -> str:
        """Name of the part that needs the most memory."""
        return max(self._parts, key=lambda name: self._parts[name])

    @property
    def _parts(self) -> dict[str, int]:
        return {
            "weights of a block": self.weights,
            "states": self.states,
            "moments": self.moments,
            "eigenproblems": self.spectra,
        }


def profile_cost(
    subject: Subject,
    anatomy: Anatomy,
    batches: Batches,
    options: DmdOptions,
    layers: Sequence[int],
    n_snapshots: int | None,
    n_workers: int | None,
    *,
    is_timed: bool,
) -> ProfileCost:
    """Estimate memory and time of a profile from shapes.

    Args:
        subject: Subject.
        anatomy: Anatomy of its model.
        batches: Batches of inputs.
        options: Options of the spectra.
        layers: Layers that are measured.
        n_snapshots: Maximum number of snapshots; None for all.
        n_workers: Number of layers decomposed in parallel; None for one per core.
        is_timed: Whether to measure the speed of this machine, which takes a fraction of a second.
    """
    width, rank, device = anatomy.width, options.rank, device_of(subject.model)
    blocks = [anatomy.sites[layer].module for layer in layers]
    itemsize = max((p.element_size() for p in subject.model.parameters() if p.is_floating_point()), default=4)
    counts = [_n_tokens(item) for item in batches.items] if isinstance(batches.items, list) else []
    total, most = sum(counts), max(counts, default=0)
    n_seen = min(total or n_snapshots or width, n_snapshots or total or width)
    n_modes = min(rank or width, width, n_seen)
    n_together = min(n_workers or n_cores(), len(layers))

    inner = max((max(p.shape[-2:]) for block in blocks for p in block.parameters() if p.ndim > 1), default=width)
    states = most * (4 * width + 3 * inner) * max(itemsize, 4)
    if subject.streamed is not None:
        states += 3 * total * width * itemsize  # states between blocks, and a copy while it is written to disk
    if is_sketched(width, rank, n_snapshots):
        n_kept = min(n_seen, width)
        one, work = 2 * n_kept * width * itemsize, 4 * n_kept * width * 8 + 8 * width * OVERSAMPLING * (rank or 0) * 5
    else:
        one, work = 3 * 8 * width**2, 5 * 8 * width**2
    is_in_turn = subject.streamed is not None or len(counts) == 1
    n_held = min(n_waiting(one, n_together) if is_in_turn else len(layers), len(layers))
    seconds = float("nan")
    if is_timed and total:
        n_parameters = sum(p.numel() for block in dict.fromkeys(blocks) for p in block.parameters())
        flops = (
            3 * 2 * n_seen * width * (OVERSAMPLING * rank if is_sketched(width, rank, n_snapshots) and rank else width)
        )
        seconds = (
            2 * n_parameters * total / _speed(_dtype(subject.model), (min(most, _TRIAL_TOKENS), width, inner), device)
        )
        seconds += len(layers) * flops / _speed(torch.float64, (min(n_seen, width), width, width), device)
        seconds += len(layers) * _seconds_of_spectrum(n_modes) / n_together
    return ProfileCost(
        0 if subject.streamed is None else max(map(subject.streamed.n_bytes, blocks)),
        states,
        n_held * one,
        n_together * (_MATRICES * 8 * n_modes**2 + work),
        free_memory(device),
        seconds,
    )


def require_memory(cost: ProfileCost, subject: Subject) -> None:
    """Raise SnapshotError if a profile would need more memory than is free."""
    if cost.memory <= cost.free:
        return
    remedy = {
        "weights of a block": "use a machine with more memory",
        "states": "pass fewer or shorter inputs",
        "moments": "pass wb.profile(..., rank=64), or wb.profile(..., layers=) for some of the layers",
        "eigenproblems": "pass wb.profile(..., rank=64), or wb.profile(..., n_workers=1)",
    }[cost.largest]
    if cost.largest == "moments" and subject.streamed is None:
        remedy += ", or open the checkpoint with wb.open_checkpoint(..., streaming=True)"
    raise SnapshotError(f"This profile needs {cost}; {remedy}.")


def _n_tokens(item: Any) -> int:
    """Return the number of token states of a batch as estimated from shapes; 0 if it holds no tensor."""
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, tuple | list) else [item]
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    if first is None:
        return 0
    if first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point()):
        return first.shape[0] * first.shape[1]
    return first.shape[0] * (1 if first.ndim < 3 else _TOKENS_OF_AN_IMAGE)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _speed(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> float:
    """Return FLOP per second of a matrix product of shapes (token, in) and (in, out), the faster of two trials."""
    n_tokens, n_in, n_out = shape
    x, weight = (torch.ones(size, dtype=dtype, device=device) for size in ((n_tokens, n_in), (n_out, n_in)))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        nn.functional.linear(x, weight).float().sum().item()
        seconds.append(time.perf_counter() - start)
    return 2 * n_tokens * n_in * n_out / max(min(seconds), 1e-9)


def _seconds_of_spectrum(n_modes: int) -> float:
    """Estimate the seconds that one thread needs for the spectrum of a layer with a number of modes."""
    width = min(n_modes, _TRIAL_WIDTH)
    x = torch.randn(2 * width, width, generator=torch.Generator().manual_seed(0))
    moments = SnapshotMoments(width).update(x, x + 0.1 * x.roll(1, 0))
    start = time.perf_counter()
    layer_spectra([moments], n_workers=1)
    return (time.perf_counter() - start) * (n_modes / width) ** 3
