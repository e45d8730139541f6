"""Tensors of checkpoints of any format, which stay on disk until each is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.state_files import CHECKPOINT, CONFIG, LazyTensor, read_state
from workbench.models.state_fit import some
from workbench.models.weight_folders import ADAPTER_CONFIG, is_adapter, own_checkpoint, place_state, weight_places

if TYPE_CHECKING:
    from torch import Tensor

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
#: Name endings of the two factors of a change: the first -> the second.
_FACTORS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
#: Options that do not affect the merged weights, or that are read here; all others must be empty or false.
_KNOWN = {
    "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip


def base_model(folder: Path) -> Path:
    """Return the path of the base model that an adapter names, which must be a local file or folder."""
    name = CONFIG.json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    places = [Path(name).expanduser(), folder / name] if isinstance(name, str) and name else []
    for place in places:
        if place.exists() and place.resolve() != folder.resolve():
            return place
    raise CheckpointError(
        f"{folder} is an adapter of {str(name)[:80]}, which is not a local folder; open that model and pass it to "
        "wb.open_checkpoint(..., module=)."
    )


def merged(
    folder: Path, base: Mapping[str, LazyTensor], transposed: Callable[[str], bool | None] | None = None
) -> dict[str, LazyTensor]:
    """Return the tensors of a base model with an adapter merged into them, W + scale B A.

    Each sum is computed when its tensor is read, in float32 or wider, and rounded once to the type of W. ``transposed``
    maps the name of a matrix to whether it has shape (inputs, outputs), or to None if LoRA does not change it; without
    it the adapter states this for all of them.
    """
    options = CONFIG.json(folder / ADAPTER_CONFIG)
    _check_is_lora(folder, options)
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {_FILES[0]}; download that file too.")
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_state(file, mmap=True).items()}
    state = dict(base)
    used: set[str] = set()
    for first, second in _FACTORS.items():
        for name in [name for name in tensors if name.endswith(first)]:
            module = name.removesuffix(first)
            target = f"{module}.weight"
            is_embedding = first == ".lora_embedding_A"
            flips = is_embedding or (bool(options.get("fan_in_fan_out")) if transposed is None else transposed(target))
            a, b = tensors[name], tensors.get(module + second)
            if target not in base or b is None or flips is None or (a.ndim, b.ndim) != (2, 2):
                raise CheckpointError(
                    f"{file.name} has {name}, which fits no matrix of the base model; pass the model that the adapter "
                    "was trained on."
                )
            scale = options["lora_alpha"] / (math.sqrt(len(a)) if options.get("use_rslora") else len(a))
            state[target] = _sum(file, base[target], target, a, b, scale, flips=flips)
            used |= {name, module + second}
    for name in tensors.keys() - used:
        full = LazyTensor.of(tensors[name])  # of a module of which all parameters were trained
        if name not in base or base[name].shape != full.shape:
            raise CheckpointError(
                f"{file.name} has {name}, which the base model does not have, or has in another shape; "
                "merge the adapter with peft's merge_and_unload() and save the result."
            )
        state[name] = full
    if not used:
        raise CheckpointError(f"{file.name} holds no LoRA matrices ({some(tensors)}); download it again.")
    return state


def kind_of_matrix(module: nn.Module, names: Mapping[str, str]) -> Callable[[str], bool | None]:
    """Return a function from the name of a matrix to whether it has shape (inputs, outputs); None if it is neither.

    The answer follows from the class of the module that holds the matrix. ``names`` maps the names of tensors without
    wrappers to those in the model.
    """
    modules = dict(module.named_modules())

    def transposed(target: str) -> bool | None:
        owner = modules.get(names.get(target, target).removesuffix(".weight"))
        if type(owner).__name__ == "Conv1D":  # the class of the transformers library
            return True
        return False if isinstance(owner, nn.Linear) else None

    return transposed


def _sum(file: Path, weight: LazyTensor, name: str, a: Tensor, b: Tensor, scale: float, *, flips: bool) -> LazyTensor:
    """Return the merged matrix, which is computed when it is read."""
    shape = (b.shape[0], a.shape[1])
    if len(a) != b.shape[1] or weight.shape != (shape[::-1] if flips else shape):
        raise CheckpointError(
            f"{file.name} does not fit the base model: {name} has shape {weight.shape}, its change {shape}; "
            "pass the model that the adapter was trained on."
        )
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise CheckpointError(f"{name} of the base model is quantized; pass the model in the precision of training.")

    def read() -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = b.detach().to(wide) @ a.detach().to(wide) * scale
        return (weight.read().to(wide) + (change.T if flips else change)).to(weight.dtype)

    return LazyTensor(weight.shape, weight.dtype, read, weight.n_bytes)


def _check_is_lora(folder: Path, options: Mapping[str, Any]) -> None:
    """Raise CheckpointError if an adapter does, or may do, more than add the product of two matrices."""
    merge = "merge it with peft's merge_and_unload() and save the result."
    if (kind := options.get("peft_type")) != "LORA":
        raise CheckpointError(f"{folder} is an adapter of type {kind}, not LORA; {merge}")
    if (initial := options.get("init_lora_weights", True)) not in (True, False, None, "gaussian"):
        raise CheckpointError(
            f"{folder} was created with init_lora_weights = {initial!r}, which may change the base model; {merge}"
        )
    if more := sorted(key for key, value in options.items() if value and key not in _KNOWN):
        raise CheckpointError(f"{folder} is an adapter with {', '.join(more)}, which is more than LoRA; {merge}")
    if not isinstance(alpha := options.get("lora_alpha"), (int, float)):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} has lora_alpha = {alpha!r}, expected a number; download the adapter again."
        )


__all__ = ["LazyTensor", "lazy_state"]


def lazy_state(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file or folder by name, without reading their values.

    Args:
        path: A file of weights (``.safetensors``, or a pickle, which is read without running code); a folder with such
            files, an index of shards, DeepSpeed's states, or a distributed checkpoint of PyTorch or Megatron; a
            Trainer's folder with one checkpoint; an adapter of PEFT, which is merged if its base model is local; or a
            GGUF file, whose tensors are dequantized to float32 when read.
    """
    with CHECKPOINT.reading(path):
        if path.suffix == ".gguf" and not path.is_dir():
            from workbench.models.gguf_file import GgufFile

            return GgufFile.read(path).state()
        if not path.is_dir():
            return place_state(path)
        folder = own_checkpoint(path)
        if is_adapter(folder):
            return merged(folder, lazy_state(base_model(folder)))
        state: dict[str, LazyTensor] = {}
        for place in weight_places(folder):
            found = place_state(place)
            if repeated := state.keys() & found.keys():
                raise CheckpointError(f"{folder} holds {min(repeated)} in several files; keep only one of them.")
            state |= found
        return state
