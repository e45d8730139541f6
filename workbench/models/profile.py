"""Koopman spectra of a model: captures states on inputs and computes a spectrum for each layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import nn

from workbench.errors import OptionError, SnapshotError, WorkbenchError
from workbench.formatting import counted, duration
from workbench.io.memory import free_memory
from workbench.io.progress import Progress, n_cores
from workbench.io.provenance import versions
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.measures import Thresholds
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import OVERSAMPLING
from workbench.koopman.spectra import as_dataset, layer_spectra, warn_if_rank_deficient
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import TOKENS_OF_A_TASK, Batches, TokenSelection, shortened
from workbench.models.calling import device_of, tensors_of
from workbench.models.capture import LayerResults, ProfileJournal, capture_layers, is_sketched, n_waiting
from workbench.models.checkpoint import open_checkpoint
from workbench.models.residual_check import require_residuals
from workbench.models.streamed_capture import capture_streamed
from workbench.models.subject import Subject
from workbench.option_kinds import NonNegativeInt, PositiveInt
from workbench.schema.runs import SPECTRA_COUNTS

if TYPE_CHECKING:
    import xarray as xr

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
    """Estimate memory and time of a profile from shapes; to time this machine takes a fraction of a second."""
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
        trial = min(n_modes, _TRIAL_WIDTH)
        x = torch.randn(2 * trial, trial, generator=torch.Generator().manual_seed(0))
        seen = SnapshotMoments(trial).update(x, x + 0.1 * x.roll(1, 0))
        start = time.perf_counter()
        layer_spectra([seen], n_workers=1)
        seconds += len(layers) * (time.perf_counter() - start) * (n_modes / trial) ** 3 / n_together
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
    first = next((value for _, value in tensors_of(item)), None)
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


#: Maximum number of tokens of a sequence on which the anatomy is read, for streamed models and for others.
_FEW_TOKENS, _MORE_TOKENS = 32, 128
#: Width up to which a profile is assumed to fit into memory.
_NARROW = 512


@overload
def profile(
    subject: Subject | nn.Module,
    inputs: Any,
    *,
    n_snapshots: int | None = ...,
    skip_first: NonNegativeInt = ...,
    rank: PositiveInt | None = ...,
    options: DmdOptions | None = ...,
    thresholds: Thresholds | None = ...,
    stack: str | None = ...,
    anatomy: Anatomy | None = ...,
    batch_first: bool | None = ...,
    layers: Sequence[int] | None = ...,
    seed: int | None = ...,
    n_workers: PositiveInt | None = ...,
    progress: bool | Callable[[str], None] = ...,
    dry_run: Literal[False] = ...,
) -> xr.Dataset: ...
@overload
def profile(subject: Subject | nn.Module, inputs: Any, *, dry_run: Literal[True], **options: Any) -> ProfileCost: ...
def profile(  # type: ignore[misc]  # a dry run takes the same options
    subject: Subject | nn.Module,
    inputs: Any = None,
    *,
    n_snapshots: int | None = 2048,
    skip_first: NonNegativeInt = 0,
    rank: PositiveInt | None = None,
    options: DmdOptions | None = None,
    thresholds: Thresholds | None = None,
    stack: str | None = None,
    anatomy: Anatomy | None = None,
    batch_first: bool | None = None,
    layers: Sequence[int] | None = None,
    seed: int | None = None,
    n_workers: PositiveInt | None = None,
    progress: bool | Callable[[str], None] = True,
    dry_run: bool = False,
) -> xr.Dataset | ProfileCost:
    """Compute the Koopman spectra of a model's residual stream, layer by layer (RKSP, arXiv:2602.22988).

    The model runs once over the inputs, in eval mode and without gradients, and is not changed.

    If the weights of a subject stay on disk (``open_checkpoint(..., streaming=True)``), all inputs pass through one
    block before the next is read; the results are the same. For batches from an iterator, the modules that run before
    the first block, and blocks whose residual is added outside of modules, are read once per batch. Finished layers of
    a streamed model are kept in the cache folder until the profile is complete: after an interruption, the same call
    continues with the first unfinished layer.

    Args:
        subject: Subject from `open_checkpoint`, or any module.
        inputs: Token ids (batch, token), or of one sequence (token,), as a tensor, an array or lists; a mapping of
            keyword arguments (an ``attention_mask`` is respected); a tuple of positional arguments; texts, if the
            subject has a tokenizer; an iterable of any of these; or a task of ``wb.tasks``, whose held-out inputs are
            used.
        n_snapshots: Number of token states to use, drawn at random from the inputs (from an iterator, the first ones);
            None for all.
        skip_first: Number of leading tokens of each sequence to leave out. The first token of a trained language model
            often carries massive activations that dominate the covariance. Padding does not count. For images and
            audio these are the first states, such as those of a class token and registers. Not allowed if a model
            inserts other tokens, such as prompts or image tokens, among those of the token ids.
        rank: Number of leading directions for randomized DMD; None for all directions. Overrides ``options``.
        options: Ridge, rank and numerical rank; see `DmdOptions`.
        thresholds: Bounds of the masses; by default those of the paper.
        stack: Name of the block stack to read, for models with several; see `list_stacks`.
        anatomy: Anatomy of this model from `read_anatomy`, which is then not read again; ``stack`` and ``batch_first``
            are ignored.
        batch_first: Whether inputs are (batch, token) or (batch, token, feature), as opposed to tokens first; None to
            determine it, see `read_anatomy`.
        layers: Numbers of the layers to measure, from 0, or negative from the end; None for all.
        seed: Seed for the choice of tokens and for the randomized rank; None for that of ``options``, by default 0.
        n_workers: Number of layers decomposed in parallel; None for one per core.
        progress: Whether to show progress; or a function that receives each progress text, whose exceptions abort the
            profile.
        dry_run: Whether to return an estimate of memory and time without computing the profile.

    Returns:
        Spectra dataset, dims ``layer`` and ``mode``. `workbench.save` and `workbench.export_netcdf` write it;
        ``to_netcdf`` of xarray refuses complex numbers unless called with ``auto_complex=True``. If the depth of a
        forward pass depends on the data, the variable ``layer_snapshots`` holds the number of states per layer. With
        ``dry_run``, a `ProfileCost`: memory, free memory and time.

    Raises:
        AnatomyError: If the residual stream cannot be identified with certainty, the axes of sequences and tokens
            cannot be distinguished, or the blocks are a chain without residuals that was not requested by ``stack``.
        OptionError: If there are no inputs, or ``layers`` contains a number that the model does not have.
        SnapshotError: If the model cannot run on the inputs, a mask does not fit the states, there are fewer than three
            states, they do not vary, a layer contains NaN or infinite values, or the profile would need more memory
            than is free.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> dict(spectra.sizes)
        {'layer': 2, 'mode': 16}

    See Also:
        `workbench.open_checkpoint`: Opens a subject.
        `workbench.read_anatomy`: Finds the blocks.
        `workbench.koopman.whitened_dmd`: Computes a spectrum from your own snapshots.
    """
    if inputs is None:
        raise OptionError.of(
            "inputs", inputs, "texts, token ids or a task of wb.tasks",
            remedy="pass what the model reads, because its spectra depend on it",
        )  # fmt: skip
    subject = open_checkpoint(subject)
    given: dict[str, Any] = {"rank": rank, "seed": seed}
    options = replace(options or DmdOptions(), **{name: value for name, value in given.items() if value is not None})
    selection = TokenSelection(n_snapshots, skip_first, options.seed)
    probe, batches = Batches.of(inputs, subject, n_tokens=max(n_snapshots or 0, TOKENS_OF_A_TASK)).probe_and_all()
    with Progress(False if dry_run else progress, "profiled", unit="layer") as bar:
        if anatomy is None:
            bar.describe("finding the blocks")
            with nullcontext() if subject.streamed is None else subject.streamed.sharing_weights():
                anatomy = _anatomy(subject, probe, stack, batch_first)
        batches = batches.split(anatomy.layout)
        numbers = _layer_numbers(layers, anatomy)
        if dry_run or anatomy.width > _NARROW:
            cost = profile_cost(subject, anatomy, batches, options, numbers, n_snapshots, n_workers, is_timed=dry_run)
            if dry_run:
                return cost
            require_memory(cost, subject)
        names = [site.name for site in anatomy.sites]
        bar.total = len(numbers)
        # Where residuals are added outside of modules, batches of an iterator cannot be held back block by block.
        is_single = not (isinstance(batches.items, list) and len(batches.items) > 1)
        if subject.streamed is None or (is_single and any(site.exit is not None for site in anatomy.sites)):
            results = LayerResults(options, names, n_workers=n_workers, after_layer=bar.update)
            bar.describe("forward pass")
            capture_layers(
                subject.model,
                anatomy,
                batches,
                selection,
                results.add,
                options=options,
                layers=numbers,
                after_batch=lambda n: bar.describe(f"forward pass: {counted(n, 'token')}"),
            )
            bar.describe("spectra")
        else:
            # The journal is identified by everything that the result depends on.
            how = (selection.n_snapshots, selection.skip_first, selection.seed)
            where = (subject.streamed.identity, str(subject.streamed.device), names, versions())
            journal = ProfileJournal.of(where, how, sorted(asdict(options).items()), numbers, batches.items)
            results = LayerResults(options, names, n_workers=n_workers, journal=journal, after_layer=bar.update)
            bar.describe("forward pass, block by block")
            capture_streamed(subject, anatomy, batches, selection, results, options, numbers)
        found = results.complete()
    spectra = [found[layer].spectrum for layer in numbers]
    warn_if_rank_deficient(spectra, [found[layer] for layer in numbers], options)
    counts = [found[layer].n_snapshots for layer in numbers]
    attrs = {
        "subject": subject.name,
        "source": subject.source,
        "stack": anatomy.stack,
        "n_snapshots": max(counts),
        "token_selection": selection.describe(),
        "dtype": dtype_name(subject.model),
        "seed": options.seed,
    }
    if subject.unloaded:
        attrs["unloaded"] = subject.unloaded
    dataset = as_dataset(
        spectra, [names[layer] for layer in numbers], thresholds=thresholds, options=options, attrs=attrs
    )
    dataset = dataset.assign_coords(layer=np.array(numbers))
    if min(counts) < max(counts):
        dataset["layer_snapshots"] = ("layer", np.array(counts), SPECTRA_COUNTS["layer_snapshots"].attrs)
    if results.journal is not None:
        results.journal.close()
    return dataset


def _anatomy(subject: Subject, probe: Any, stack: str | None, batch_first: bool | None) -> Anatomy:
    """Read the anatomy on few tokens where possible: it takes several passes and does not depend on their number."""

    def read(inputs: Any) -> Anatomy:
        anatomy = read_anatomy(subject.model, inputs, stack=stack, batch_first=batch_first)
        if stack is None:
            require_residuals(subject.model, inputs, anatomy.stack, anatomy.sites)
        return anatomy

    few = shortened(probe, _MORE_TOKENS if subject.streamed is None else _FEW_TOKENS)
    if few is not None:
        with suppress(WorkbenchError):  # for example, a model that accepts only one length
            return read(few)
    return read(probe)


def _layer_numbers(layers: Sequence[int] | None, anatomy: Anatomy) -> list[int]:
    """Return the numbers of the requested layers in increasing order; negative ones count from the end."""
    n_layers = len(anatomy.sites)
    if layers is None:
        return list(range(n_layers))
    chosen = [layer for layer in layers if isinstance(layer, int) and -n_layers <= layer < n_layers]
    if not chosen or len(chosen) != len(list(layers)):
        raise OptionError.of("layers", layers, f"a list of layer numbers from 0 to {n_layers - 1}")
    return sorted({layer % n_layers for layer in chosen})


def dtype_name(model: nn.Module) -> str:
    """Return the number format of a model's parameters for the provenance of a dataset."""
    parameter = next(model.parameters(), None)
    return "none" if parameter is None else str(parameter.dtype).removeprefix("torch.")
