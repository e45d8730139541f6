"""GGUF files are slow to read; each is converted to safetensors once and kept."""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.io.cache import cache_folder
from workbench.models.pretrained import errors_in_one_sentence, quiet_transformers, read_misfit, refuse_misfit
from workbench.models.state_fit import in_order

#: Beside the weights of a file that does not fit its own header: what was not loaded.
_UNLOADED = "unloaded.txt"


def converted_folder(path: Path, *, strict: bool = True) -> tuple[Path, str]:
    """The Hugging Face folder made from a GGUF file; made now if it does not exist.

    Quantized weights come out as float32 and keep the noise of their quantization.

    Args:
        path: Path of the GGUF file.
        strict: Whether to refuse a file that lacks tensors of its model or has too many; otherwise what it lacks is
            random.

    Returns:
        The folder, and one clause on what was not loaded, empty if all was.

    Raises:
        CheckpointError: If the file is truncated, no GGUF file, of an architecture transformers cannot read, or does
            not fit.
    """
    beyond = _check(path)
    whole = cache_folder() / "gguf" / f"{path.stem}-{_digest(path)[:16]}"
    # Incomplete conversions are kept separately, so that they are never taken for complete ones.
    partial = whole.with_name(f"{whole.name}-partial")
    for folder in (whole,) if strict else (whole, partial):
        if (folder / "config.json").exists():
            note = folder / _UNLOADED
            return folder, note.read_text(encoding="utf-8") if note.exists() else ""
    return _convert(path, whole, partial, beyond, strict=strict)


def _check(path: Path) -> tuple[str, ...]:
    """Compare what the header promises with the file's length.

    Returns:
        Tensors of blocks beyond the number that the header gives, which transformers leaves out without a word.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        names = [str(tensor.name) for tensor in reader.tensors]
        n_blocks = [int(field.parts[-1][0]) for key, field in reader.fields.items() if key.endswith(".block_count")]
    except Exception as error:  # noise makes the reader fail in any way
        raise CheckpointError(f"{path.name} is truncated or no GGUF file; fetch it again.") from error
    if end > path.stat().st_size or end == 0:
        raise CheckpointError(f"{path.name} is truncated or holds no tensors; fetch it again.")
    blocks = [(name, re.match(r"blk\.(\d+)\.", name)) for name in names]
    return in_order(name for name, block in blocks if block and n_blocks and int(block[1]) >= max(n_blocks))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(path: Path, whole: Path, partial: Path, beyond: tuple[str, ...], *, strict: bool) -> tuple[Path, str]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    remedy = "fetch it again, or take another file of this model"
    with errors_in_one_sentence(path.name, remedy=remedy), quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model, info = loaded
        misfit = read_misfit(model, info)
        misfit = replace(misfit, unexpected=in_order({*misfit.unexpected, *beyond}))
        refuse_misfit(model, misfit, path.name, strict=strict, remedy=remedy)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    folder, unloaded = (partial if misfit else whole), misfit.unloaded(left="random values")
    # The weights are plain float32 now; saving raises as long as the model calls itself quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as scratch:
            made = Path(scratch) / folder.name
            with quiet_transformers():
                model.save_pretrained(made)
                tokenizer.save_pretrained(made)
            if unloaded:
                (made / _UNLOADED).write_text(unloaded, encoding="utf-8")
            if not folder.exists():  # another process may have been faster; its result is the same
                made.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The converted {path.name} cannot be kept in {folder.parent} ({error}); "
            "free some space, or set WORKBENCH_CACHE to another folder."
        ) from error
    return folder, unloaded
