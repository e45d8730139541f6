"""Tensors of checkpoints of any format, which stay on disk until each is read; adapters of LoRA and GGUF files."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.models.pretrained import errors_in_one_sentence, quiet_transformers, read_misfit, require_fit
from workbench.models.state_files import CHECKPOINT, CONFIG, WEIGHTS, LazyTensor, read_state, some
from workbench.models.weight_folders import ADAPTER_CONFIG, is_adapter, own_checkpoint, place_state, weight_places

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
                    f"{file.name} has {name}, which fits no matrix of the base model; pass the model it was trained on."
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
    """Return a function from a matrix's name to whether it is (inputs, outputs), by its module; None if neither."""
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
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} has lora_alpha = {alpha!r}, not a number; download it again.")


def lazy_state(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file or folder by name, without reading their values.

    The path is a file of weights (``.safetensors``, or a pickle, which is read without running code); a folder with
    such files, an index of shards, DeepSpeed's states, or a distributed checkpoint of PyTorch or Megatron; a Trainer's
    folder with one checkpoint; an adapter of PEFT, which is merged if its base model is local; or a GGUF file, whose
    tensors are dequantized to float32 when read.
    """
    with CHECKPOINT.reading(path):
        if path.suffix == ".gguf" and not path.is_dir():
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


_REMEDY = "download it again, or use another file of this model"
#: Levels of modules at which the names of tensors may begin: below the model they are its base model and the stack.
_NAMED_LEVELS = 2


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file of which only the header is in memory."""

    path: Path
    tensors: tuple[Any, ...]  # as the package gguf returns them, mapped from the file
    architecture: str  # name in llama.cpp
    n_blocks: int | None  # number of blocks that the header states

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header of a file, which must agree with the length of the file."""
        from gguf import GGUFReader

        class Reader(GGUFReader):
            def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
                # The package reads nothing beyond the end, as often as the header states.
                if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                    raise ValueError("it is shorter than its header states")
                return super()._get(offset, dtype, count, override_order)

        try:
            reader = Reader(WEIGHTS.check(path))
            if not reader.tensors:
                raise ValueError("it holds no tensors")
            n_blocks = [int(field.parts[-1][0]) for key, field in reader.fields.items() if key.endswith(".block_count")]
            architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        except Exception as error:  # damaged bytes can cause any exception in the reader
            raise CheckpointError(f"{path.name} is truncated or not a GGUF file; download it again.") from error
        if max(n_blocks, default=0) > len(reader.tensors):
            raise CheckpointError.of("block_count", max(n_blocks), f"at most {len(reader.tensors)}, a tensor for each")
        return cls(path, tuple(reader.tensors), architecture, max(n_blocks, default=None))

    @property
    def why_not_streamed(self) -> str:
        """Reason why the file cannot be read tensor by tensor, as a clause; empty if it can."""
        if not self._is_read_at_once:
            return ""
        return f"transformers reads all tensors of the architecture {self.architecture} at once"

    def n_bytes(self, dtype: torch.dtype | str = "auto") -> int:
        """Return the size of the weights in memory, in bytes."""
        size = 4 if isinstance(dtype, str) else dtype.itemsize
        return size * sum(int(tensor.n_elements) for tensor in self.tensors)

    def model(
        self, *, dtype: torch.dtype | str = "auto", strict: bool = True, without_memory: bool = False
    ) -> tuple[nn.Module, str]:
        """Return the model of the file, and a clause that states what was not loaded, empty if all was loaded.

        Quantized weights keep the rounding error of their quantization. The dtype "auto" is float32, so that there is
        no other rounding; for architectures that transformers reads at once (LFM2, Qwen3.5) and for files that are not
        quantized, it is the type in the file. ``without_memory`` leaves the model on the meta device.
        """
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with errors_in_one_sentence(self.path.name, remedy=_REMEDY), quiet_transformers():
            if self._is_read_at_once:
                from transformers import AutoModelForCausalLM, GgufConfig

                options |= {"quantization_config": GgufConfig(dequantize=True), "trust_remote_code": False}
                options |= {} if dtype == "auto" else {"dtype": dtype}
                folder = self.path.parent
                loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=self.path.name, **options)
                file_only = self._beyond()
            else:
                empty, state = self._model_and_state
                config = copy.deepcopy(empty.config)
                config.architectures = [type(empty).__name__]
                options["dtype"] = torch.float32 if dtype == "auto" else dtype
                options |= {"device_map": {"": "meta"}} if without_memory else {}
                loaded = type(empty).from_pretrained(None, config=config, state_dict=dict(state), **options)
                file_only = ()
            model, info = loaded
            info = {**info, "unexpected_keys": {*info["unexpected_keys"], *file_only}}
            misfit = read_misfit(model, info)
            require_fit(model, misfit, self.path.name, strict=strict, remedy=_REMEDY)
        # The weights are ordinary floats now, but saving would raise as long as the model is marked as quantized.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.name_or_path = model.name_or_path = str(self.path)
        return model, misfit.unloaded(left="random values")

    def state(self) -> dict[str, LazyTensor]:
        """Return the tensors by the names of transformers; each is dequantized to float32 when it is read."""
        if self._is_read_at_once:
            raise CheckpointError(
                f"{self.path.name} has the architecture {self.architecture}, whose tensors transformers reads all at "
                "once; open it as a model."
            )
        with errors_in_one_sentence(self.path.name, remedy=_REMEDY), quiet_transformers():
            return dict(self._model_and_state[1])

    @property
    def _is_read_at_once(self) -> bool:
        """Whether transformers cannot process single tensors of the architecture."""
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        return bool(is_gguf_arch_supported(self.architecture))

    def _beyond(self) -> tuple[str, ...]:
        """Return names of tensors of blocks beyond the number in the header, which transformers silently ignores."""
        blocks = [(tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in self.tensors]
        n_blocks = self.n_blocks
        return tuple(name for name, block in blocks if block and n_blocks is not None and int(block[1]) >= n_blocks)

    @cached_property
    def _model_and_state(self) -> tuple[Any, dict[str, LazyTensor]]:
        """The model on the meta device, and the tensors by its names; surplus tensors keep the names in the file."""
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        options = load_gguf_checkpoint(str(self.path))["config"]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[options["model_type"]].from_dict(options))
        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=options)
        names = get_gguf_hf_weights_map(_outermost(model, _NAMED_LEVELS), processor)
        parts: dict[str, list[Any]] = {}
        for tensor in self.tensors:
            # Experts are named without the ending, because transformers stacks them in one parameter.
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                parts.setdefault(name, []).append(tensor)
        file, own = self.path.name, {tensor.name: tensor for tensor in self.tensors}
        state = {name: _processed(file, name, held, processor, names) for name, held in parts.items()}
        return model, state | {n: _processed(file, n, [own[n]], TensorProcessor(), {}) for n in self._beyond()}


def _outermost(module: nn.Module, n_levels: int) -> Any:
    """Return the outer levels of a module, from which transformers derives the names of tensors.

    For each module transformers recomputes the names of all tensors, although no name begins at a module deep inside.
    With all modules of 30 blocks this takes ten seconds.
    """
    children = module.named_children() if n_levels else ()
    inner = [(name, _outermost(child, n_levels - 1)) for name, child in children]
    config = getattr(module, "config", None)
    return SimpleNamespace(config=config, state_dict=module.state_dict, named_children=lambda: inner)


def _processed(file: str, name: str, parts: Sequence[Any], processor: Any, names: Mapping[str, str]) -> LazyTensor:
    """Return a tensor of a model, computed from tensors of a file (several for experts) when it is read."""

    def process(part: Any, values: Any, joined: dict[str, dict[str, Tensor]]) -> Any:
        try:
            return processor.process(
                weights=values, name=part.name, tensor_key_mapping=names, parsed_parameters=joined
            ).weights
        except Exception as error:  # a shape that the processor cannot divide
            raise CheckpointError(f"{part.name} of {file} does not fit the header; {_REMEDY}.") from error

    def read() -> Tensor:
        from gguf import dequantize

        joined: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for part in parts:
            values = process(part, dequantize(part.data, part.tensor_type), joined)
        return joined["tensors"][name] if joined["tensors"] else torch.from_numpy(np.array(values))

    shapes = [tuple(int(size) for size in reversed(part.shape)) for part in parts]
    if "_exps." in parts[0].name:
        shape: tuple[int, ...] = (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])
    else:
        empty = np.broadcast_to(np.float32(-1), shapes[0])  # takes no memory
        shape = tuple(process(parts[0], empty, {"tensors": {}}).shape)
    return LazyTensor(shape, torch.float32, read, sum(int(part.n_bytes) for part in parts))


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file as a tokenizer of Hugging Face."""
    from transformers import AutoTokenizer

    with errors_in_one_sentence(path.name, remedy=_REMEDY), quiet_transformers():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
