"""Memory and time of a profile, before it starts."""

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
from workbench.koopman.sketch import OVERSAMPLING
from workbench.models.calling import device_of
from workbench.models.capture import is_sketched
from workbench.models.layer_results import n_waiting

if TYPE_CHECKING:
    from workbench.koopman.dmd import DmdOptions
    from workbench.models.anatomy import Anatomy
    from workbench.models.batches import Batches
    from workbench.models.subject import Subject

#: Tokens that an image or another input without tokens is taken for.
_TOKENS_OF_AN_IMAGE = 256
#: Bytes for each squared mode while a layer is decomposed: operator, eigenvectors, their inverse, work space.
_PER_MODE = 160
#: Side of the matrices by which the speed of this machine is measured, and eigenproblems' worth of time of a layer.
_TRIAL, _EIGENPROBLEMS = 256, 2.5


@dataclass(frozen=True)
class ProfileCost:
    """What a profile will take: an upper estimate of memory beyond what is in use, and a rough one of time.

    Attributes:
        weights: Bytes of the largest block, where weights are streamed.
        states: Bytes of the states between blocks and of activations inside one.
        moments: Bytes of the moments or snapshots of the layers that are in memory together.
        spectra: Bytes of the eigenproblems that are solved together.
        free: Bytes that are free.
        seconds: Time from the speed of a matrix product and of an eigenproblem on this machine, without reading files;
            NaN where the number of tokens is not known.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> cost = wb.profile(model, wb.tasks.associative_recall(), dry_run=True)
        >>> cost.memory < cost.free
        True
    """

    weights: int
    states: int
    moments: int
    spectra: int
    free: int
    seconds: float = float("nan")

    @property
    def memory(self) -> int:
        """Bytes in all; moments and eigenproblems are not needed before the states of a layer are there."""
        return self.weights + self.states + self.moments + self.spectra

    def __str__(self) -> str:
        parts = {
            "weights of a block": self.weights,
            "states": self.states,
            "moments": self.moments,
            "eigenproblems": self.spectra,
        }
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        known = f", about {duration(self.seconds)}" if self.seconds == self.seconds else ""
        return f"up to {self.memory / 1e9:.2f} GB ({listed}) of {self.free / 1e9:.1f} GB free{known}"


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
    """Memory and time of a profile, from shapes alone.

    Args:
        subject: Subject.
        anatomy: Anatomy of its model.
        batches: Batches of inputs.
        options: Options of the spectra.
        layers: Layers that are measured.
        n_snapshots: Most snapshots; None: all.
        n_workers: Number of layers decomposed in parallel; None: one per core.
        is_timed: Whether to measure the speed of this machine, which takes a fraction of a second.
    """
    width, device = anatomy.width, device_of(subject.model)
    blocks = [anatomy.sites[layer].module for layer in layers]
    itemsize = max((p.element_size() for p in subject.model.parameters() if p.is_floating_point()), default=4)
    counts = [_tokens(item) for item in batches.items] if isinstance(batches.items, list) else []
    most, total = max(counts, default=4096), sum(counts)
    inner = max(
        (max(p.shape[0], p.shape[-1]) for block in blocks for p in block.parameters() if p.ndim == 2), default=width
    )
    states = most * (4 * width + 3 * inner) * max(itemsize, 4)
    weights = 0
    if subject.streamed is not None:
        weights = max(subject.streamed.n_bytes(block) for block in blocks)
        states += 3 * total * width * itemsize
    seen = min(total or n_snapshots or width, n_snapshots or total or width)
    rank = options.rank
    if is_sketched(width, rank, n_snapshots):
        kept = min(seen, width)
        one = 2 * kept * width * itemsize
        work = 4 * kept * width * 8 + (8 * width * OVERSAMPLING * rank * 4 if rank else 0)
    else:
        one, work = 24 * width**2, 40 * width**2
    together = n_workers or n_cores()
    is_in_turn = subject.streamed is not None or len(counts) == 1
    held = n_waiting(one, together) if is_in_turn else len(layers)
    n_modes = min(rank or width, width, max(seen, 1))
    spectra = min(together, len(layers)) * (_PER_MODE * n_modes**2 + work)
    seconds = float("nan")
    if is_timed and total:
        n_parameters = sum(p.numel() for block in dict.fromkeys(blocks) for p in block.parameters())
        seconds = 2 * n_parameters * total / _matmul_speed(subject.model, width, device)
        seconds += len(layers) * _eigenproblem(n_modes) / min(together, n_cores(), len(layers))
    return ProfileCost(weights, states, min(held, len(layers)) * one, spectra, free_memory(device), seconds)


def refuse_too_large(cost: ProfileCost, subject: Subject) -> None:
    """Refuse a profile that would need more memory than there is.

    Raises:
        SnapshotError: If it would.
    """
    if cost.memory <= cost.free:
        return
    parts = {"weights": cost.weights, "states": cost.states, "moments": cost.moments, "spectra": cost.spectra}
    largest = max(parts, key=lambda name: parts[name])
    remedy = {
        "weights": "take a machine with more memory",
        "states": "pass fewer or shorter inputs",
        "moments": "pass rank=64, or layers= for some of the layers",
        "spectra": "pass rank=64, or n_workers=1",
    }[largest]
    if largest == "moments" and subject.streamed is None:
        remedy += ", or open the checkpoint with streaming=True"
    raise SnapshotError(f"This profile takes {cost}; {remedy}.")


def _tokens(item: Any) -> int:
    """Token states of a batch, as far as shapes tell."""
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, tuple | list) else [item]
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    if first is None:
        return 0
    if first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point()):
        return first.shape[0] * first.shape[1]
    return first.shape[0] * (1 if first.ndim < 3 else _TOKENS_OF_AN_IMAGE)


def _matmul_speed(model: nn.Module, width: int, device: torch.device) -> float:
    """Floating-point operations a second of a matrix product in the dtype of the model."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    side = min(width, 4 * _TRIAL)
    one, other = (torch.ones(shape, dtype=dtype, device=device) for shape in ((_TRIAL, side), (side, side)))
    nn.functional.linear(one, other)
    start = time.perf_counter()
    nn.functional.linear(one, other).float().sum().item()
    return 2 * _TRIAL * side**2 / max(time.perf_counter() - start, 1e-9)


def _eigenproblem(n_modes: int) -> float:
    """Seconds of the spectrum of one layer with so many modes."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_TRIAL, _TRIAL, dtype=torch.float64, generator=generator)
    start = time.perf_counter()
    torch.linalg.eig(matrix)
    return _EIGENPROBLEMS * (time.perf_counter() - start) * (n_modes / _TRIAL) ** 3
