"""GGUF files: tensors under the names of transformers, each dequantized when it is read, and the model of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.pretrained import errors_in_one_sentence, quiet_transformers, read_misfit, refuse_misfit

if TYPE_CHECKING:
    from torch import Tensor

_REMEDY = "fetch it again, or take another file of this model"
#: Levels of modules at which the names of a file's tensors may begin: the model, its base model, and that one's stack.
_NAMED_LEVELS = 2


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file of which only the header is in memory.

    Attributes:
        path: Its path.
        tensors: Its tensors as gguf gives them, mapped from the file.
        architecture: What llama.cpp calls the architecture.
        n_blocks: The number of blocks that the header gives.
    """

    path: Path
    tensors: tuple[Any, ...]
    architecture: str
    n_blocks: int | None

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """The file, whose header agrees with its length.

        Raises:
            CheckpointError: If it is truncated or no GGUF file.
        """
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
            end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
            n_blocks = [int(field.parts[-1][0]) for key, field in reader.fields.items() if key.endswith(".block_count")]
            architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        except Exception as error:  # noise makes the reader fail in any way
            raise CheckpointError(f"{path.name} is truncated or no GGUF file; fetch it again.") from error
        if end > path.stat().st_size or end == 0:
            raise CheckpointError(f"{path.name} is truncated or holds no tensors; fetch it again.")
        return cls(path, tuple(reader.tensors), architecture, max(n_blocks, default=None))

    @property
    def why_whole(self) -> str:
        """Why the file cannot be read tensor by tensor, as a clause; empty if it can."""
        if not self._is_read_as_a_whole:
            return ""
        return f"transformers reads the architecture {self.architecture} as a whole only"

    def n_bytes(self, dtype: torch.dtype | str = "auto") -> int:
        """Bytes of the weights in memory."""
        size = 4 if isinstance(dtype, str) else dtype.itemsize
        return size * sum(int(tensor.n_elements) for tensor in self.tensors)

    def model(
        self, *, dtype: torch.dtype | str = "auto", strict: bool = True, without_memory: bool = False
    ) -> tuple[nn.Module, str]:
        """The model of the file; quantized weights keep the noise of their quantization.

        Args:
            dtype: Type of the parameters. "auto" is float32, so that the only rounding is that of the quantization; of
                architectures that transformers reads as a whole (LFM2, Qwen3.5) and files that are not quantized, it
                is the type in the file.
            strict: Whether to refuse a file that lacks tensors of its model or has too many; otherwise what it lacks is
                random.
            without_memory: Whether to leave the model on the meta device.

        Returns:
            The model, and one clause on what was not loaded, empty if all was.

        Raises:
            CheckpointError: If the architecture is none that transformers can read, or the file does not fit.
        """
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with errors_in_one_sentence(self.path.name, remedy=_REMEDY), quiet_transformers():
            if self._is_read_as_a_whole:
                from transformers import AutoModelForCausalLM, GgufConfig

                options["quantization_config"] = GgufConfig(dequantize=True)
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
            refuse_misfit(model, misfit, self.path.name, strict=strict, remedy=_REMEDY)
        # The weights are plain floats now; saving raises as long as the model calls itself quantized.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.name_or_path = model.name_or_path = str(self.path)
        return model, misfit.unloaded(left="random values")

    def state(self) -> dict[str, LazyTensor]:
        """The tensors under the names of transformers, each dequantized to float32 when it is read.

        Raises:
            CheckpointError: If the architecture is none that transformers can read, or it reads it as a whole only.
        """
        if self._is_read_as_a_whole:
            raise CheckpointError(
                f"{self.path.name} is of the architecture {self.architecture}, which transformers reads as a whole "
                "only; open it as a whole."
            )
        with errors_in_one_sentence(self.path.name, remedy=_REMEDY), quiet_transformers():
            return dict(self._model_and_state[1])

    @property
    def _is_read_as_a_whole(self) -> bool:
        """Whether transformers has no processors of single tensors for the architecture."""
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        return bool(is_gguf_arch_supported(self.architecture))

    def _beyond(self) -> tuple[str, ...]:
        """Tensors of blocks beyond the number in the header, which transformers leaves out without a word."""
        blocks = [(tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in self.tensors]
        n_blocks = self.n_blocks
        return tuple(name for name, block in blocks if block and n_blocks is not None and int(block[1]) >= n_blocks)

    @cached_property
    def _model_and_state(self) -> tuple[Any, dict[str, LazyTensor]]:
        """The model without memory for its weights, and the tensors under its names; too many keep their own."""
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
        names = get_gguf_hf_weights_map(_Outermost(model, _NAMED_LEVELS), processor)
        parts: dict[str, list[Any]] = {}
        for tensor in self.tensors:
            # Experts are named without the ending, as transformers stacks them in one parameter.
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                parts.setdefault(name, []).append(tensor)
        state = {name: _Processed(self.path.name, tuple(held), processor, names) for name, held in parts.items()}
        own = {tensor.name: tensor for tensor in self.tensors}
        plain = TensorProcessor()
        state |= {name: _Processed(self.path.name, (own[name],), plain, {}) for name in self._beyond()}
        return model, {name: tensor.lazy(name) for name, tensor in state.items()}


@dataclass(frozen=True)
class _Outermost:
    """The part of a module that transformers reads to name tensors, without the modules deep inside.

    For each module that it meets transformers makes the names of all tensors anew, though none of them can begin deep
    inside; with all modules of 30 blocks this takes ten seconds.

    Attributes:
        module: The module.
        n_levels: Levels of modules within it that are named as well.
    """

    module: nn.Module
    n_levels: int

    @property
    def config(self) -> Any:
        """The module's configuration."""
        return self.module.config

    def state_dict(self) -> dict[str, Any]:
        """The module's tensors."""
        return self.module.state_dict()

    def named_children(self) -> list[tuple[str, _Outermost]]:
        """Modules directly within it; none below the last level."""
        children = self.module.named_children() if self.n_levels else ()
        return [(name, _Outermost(child, self.n_levels - 1)) for name, child in children]


@dataclass(frozen=True)
class _Processed:
    """The tensors of a file that make one of a model, and how: experts are of several.

    Attributes:
        file: Name of the file, for messages.
        parts: Tensors as gguf gives them.
        processor: What transformers does to the tensors of this architecture.
        names: Name of each tensor in the file -> name in the model.
    """

    file: str
    parts: tuple[Any, ...]
    processor: Any
    names: Mapping[str, str]

    def lazy(self, name: str) -> LazyTensor:
        """The tensor, not yet read."""
        n_bytes = sum(int(part.n_bytes) for part in self.parts)
        return LazyTensor(self._shape(), torch.float32, lambda: self._read(name), n_bytes)

    def _read(self, name: str) -> Tensor:
        from gguf import dequantize

        joined: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for part in self.parts:
            values = self._process(part, dequantize(part.data, part.tensor_type), joined)
        return joined["tensors"][name] if joined["tensors"] else torch.from_numpy(np.array(values))

    def _shape(self) -> tuple[int, ...]:
        shapes = [tuple(int(size) for size in reversed(part.shape)) for part in self.parts]
        if "_exps." in self.parts[0].name:
            return (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])
        values = np.broadcast_to(np.float32(-1), shapes[0])  # takes no memory
        return tuple(self._process(self.parts[0], values, {"tensors": {}}).shape)

    def _process(self, part: Any, values: Any, joined: dict[str, dict[str, Tensor]]) -> Any:
        try:
            return self.processor.process(
                weights=values, name=part.name, tensor_key_mapping=self.names, parsed_parameters=joined
            ).weights
        except Exception as error:  # a shape that the processor cannot divide
            raise CheckpointError(
                f"{part.name} of {self.file} has a shape that does not fit the header; {_REMEDY}."
            ) from error


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file, as one of Hugging Face.

    Raises:
        CheckpointError: If transformers cannot read it.
    """
    from transformers import AutoTokenizer

    with errors_in_one_sentence(path.name, remedy=_REMEDY), quiet_transformers():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
