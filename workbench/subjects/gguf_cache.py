"""GGUF files are slow to read; each is converted to safetensors once and kept."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from workbench.errors import CheckpointError
from workbench.subjects.checkpoint import _quiet_transformers, cache_folder


def converted_folder(path: Path) -> Path:
    """The Hugging Face folder made from a GGUF file; made now if it is not there.

    Quantized weights come out as float32 and keep the noise of their quantization.

    Raises:
        CheckpointError: If the file is truncated, no GGUF file, or of an architecture transformers cannot read.
    """
    _check(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{_digest(path)[:16]}"
    if not (folder / "config.json").exists():
        _convert(path, folder)
    return folder


def _check(path: Path) -> None:
    """Read the header and compare what it promises with the file's length."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise CheckpointError(f"{path.name} is truncated or no GGUF file; fetch it again.") from error
    if end > path.stat().st_size or end == 0:
        raise CheckpointError(f"{path.name} is truncated or holds no tensors; fetch it again.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(path: Path, folder: Path) -> None:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"transformers cannot convert {path.name}: {first}") from error
    # The weights are plain float32 now; saving raises as long as the model calls itself quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as scratch:
            partial = Path(scratch) / folder.name
            with _quiet_transformers():
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
            if not folder.exists():  # another process may have been faster; its result is the same
                partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The converted {path.name} cannot be kept in {folder.parent} ({error}); "
            "free some space, or set WORKBENCH_CACHE to another folder."
        ) from error
