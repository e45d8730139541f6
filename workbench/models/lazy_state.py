"""Tensors of checkpoints of any format, which stay on disk until each is read."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import CheckpointError
from workbench.models.adapters import base_model, is_transposed, merged
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_files import CHECKPOINT
from workbench.models.weight_folders import is_adapter, own_checkpoint, place_state, weight_places

__all__ = ["LazyTensor", "lazy_state"]


def lazy_state(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file or folder by name, without reading their values.

    Args:
        path: A file of weights (``.safetensors``, or a pickle, which is read without running code); a folder with such
            files, an index of shards, DeepSpeed's states, or a distributed checkpoint of PyTorch or Megatron; a
            Trainer's folder with one checkpoint; an adapter of PEFT, which is merged if its base model is local; or a
            GGUF file, whose tensors are dequantized to float32 when read.

    Returns:
        Names -> tensors. The names are those in the file, below the key of the model where there are several; for a
        GGUF file they are those of transformers. Other contents, such as an optimizer, are omitted.

    Raises:
        CheckpointError: If the weights are missing, damaged, incomplete, or stored with code.
    """
    with CHECKPOINT.reading(path):
        if path.is_dir():
            return _of_folder(own_checkpoint(path))
        if path.suffix == ".gguf":
            from workbench.models.gguf_file import GgufFile

            return GgufFile.read(path).state()
        return place_state(path)


def _of_folder(folder: Path) -> dict[str, LazyTensor]:
    if is_adapter(folder):
        return merged(folder, lazy_state(base_model(folder)), lambda _: is_transposed(folder))
    state: dict[str, LazyTensor] = {}
    for place in weight_places(folder):
        found = place_state(place)
        if repeated := state.keys() & found.keys():
            raise CheckpointError(f"{folder} holds {min(repeated)} in several files; keep only one of them.")
        state |= found
    return state
