"""From a model and inputs to spectra: the interface to the mathematical core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from workbench.io.progress import progress_bar
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.measures import Thresholds
from workbench.koopman.spectra import as_dataset, layer_spectra, warn_if_rank_deficient
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import TOKENS_OF_A_TASK, Batches, TokenSelection
from workbench.models.capture import capture_moments
from workbench.models.checkpoint import open_checkpoint
from workbench.models.subject import Subject
from workbench.schema.runs import SPECTRA_COUNTS

if TYPE_CHECKING:
    import xarray as xr


def profile(
    subject: Subject | nn.Module,
    inputs: Any,
    *,
    n_snapshots: int | None = 2048,
    skip_first: int = 0,
    rank: int | None = None,
    options: DmdOptions | None = None,
    thresholds: Thresholds | None = None,
    stack: str | None = None,
    anatomy: Anatomy | None = None,
    batch_first: bool | None = None,
    seed: int | None = None,
    n_workers: int | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Koopman spectra of a model's residual stream, layer by layer (RKSP, arXiv:2602.22988).

    The model runs once over the inputs, in eval mode and without gradients, and is left as it was found.

    Args:
        subject: Subject from `open_checkpoint`, or any module.
        inputs: Token ids (batch, token) or of one sequence (token,), as a tensor, an array or lists; a mapping of
            keyword arguments (an ``attention_mask`` is respected); a tuple of positional arguments; texts where the
            subject has a tokenizer; an iterable of any of these; or a task of ``wb.tasks``, whose held-out inputs are
            used.
        n_snapshots: Token states to use, drawn at random over the inputs (in order from an iterator); None: all.
        skip_first: Leading tokens of each sequence to leave out. The first token of a trained language model often
            carries massive activations that dominate the covariance.
        rank: Randomized DMD in this many leading directions; None: every direction. Short for ``options``.
        options: Ridge, rank and numerical rank; see `DmdOptions`.
        thresholds: Bounds of the masses; the paper's by default.
        stack: Name of the block stack to read, where a model has several; see `read_anatomy`.
        anatomy: Anatomy of this model, from `read_anatomy`, to save reading it again; ``stack`` and ``batch_first`` are
            ignored then.
        batch_first: Whether inputs are (batch, token) or (batch, token, feature), rather than with tokens first; None:
            find out, see `read_anatomy`.
        seed: Seed of the choice of tokens and of the randomized rank; None: that of ``options``, by default 0.
        n_workers: Number of layers decomposed in parallel; None: one per core.
        progress: Whether to show progress bars.

    Returns:
        Spectra dataset, dims ``layer`` and ``mode``. Where the depth of a forward depends on the data, the variable
        ``layer_snapshots`` is the number of states per layer.

    Raises:
        AnatomyError: If the residual stream cannot be read with certainty, or batch and token cannot be told apart.
        SnapshotError: If the model cannot run on the inputs, a mask does not fit the states, there are fewer than three
            states, they do not vary, or a layer holds NaN or infinite values.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> dict(spectra.sizes)
        {'layer': 2, 'mode': 16}
    """
    subject = open_checkpoint(subject)
    given: dict[str, Any] = {"rank": rank, "seed": seed}
    options = replace(options or DmdOptions(), **{name: value for name, value in given.items() if value is not None})
    selection = TokenSelection(n_snapshots, skip_first, options.seed)
    probe, batches = Batches.of(inputs, subject, n_tokens=max(n_snapshots or 0, TOKENS_OF_A_TASK)).probe_and_all()
    if anatomy is None:
        anatomy = read_anatomy(subject.model, probe, stack=stack, batch_first=batch_first)
    batches = batches.split(anatomy.layout)
    with progress_bar(progress, total=n_snapshots, label="forward", unit="token") as bar:
        moments = capture_moments(
            subject.model,
            anatomy,
            batches,
            selection,
            after_batch=lambda n: bar.update(n - bar.n),
        )
    layers = layer_spectra(moments, options, n_workers=n_workers, progress=progress)
    warn_if_rank_deficient(layers, moments, options)
    names = [site.name for site in anatomy.sites]
    attrs = {
        "subject": subject.name,
        "source": subject.source,
        "stack": anatomy.stack,
        "n_snapshots": max(seen.n_snapshots for seen in moments),
        "token_selection": selection.describe(),
        "dtype": dtype_name(subject.model),
        "seed": options.seed,
    }
    if subject.unloaded:
        attrs["unloaded"] = subject.unloaded
    spectra = as_dataset(layers, names, thresholds=thresholds, options=options, attrs=attrs)
    counts = [seen.n_snapshots for seen in moments]
    if min(counts) < max(counts):
        spectra["layer_snapshots"] = ("layer", np.array(counts), SPECTRA_COUNTS["layer_snapshots"].attrs)
    return spectra


def dtype_name(model: nn.Module) -> str:
    """Dtype of the parameters, as provenance."""
    parameter = next(model.parameters(), None)
    return "none" if parameter is None else str(parameter.dtype).removeprefix("torch.")
