"""GGUF files: tensors under the names of transformers, each dequantized when it is read, and the model of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


def open_gguf(
    path: Path, *, dtype: torch.dtype | str = "auto", strict: bool = True, without_memory: bool = False
) -> tuple[nn.Module, str]:
    """The model of a GGUF file; quantized weights keep the noise of their quantization.

    Args:
        path: Path of the GGUF file.
        dtype: Type of the parameters. "auto" is float32, so that the only rounding is that of the quantization; of
            architectures that transformers reads as a whole (LFM2, Qwen3.5) and files that are not quantized, it is
            the type in the file.
        strict: Whether to refuse a file that lacks tensors of its model or has too many; otherwise what it lacks is
            random.
        without_memory: Whether to leave the model on the meta device.

    Returns:
        The model, and one clause on what was not loaded, empty if all was.

    Raises:
        CheckpointError: If the file is truncated, no GGUF file, of an architecture transformers cannot read, or does
            not fit.
    """
    file = _File.read(path)
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with errors_in_one_sentence(path.name, remedy=_REMEDY), quiet_transformers():
        if file.is_read_as_a_whole:
            from transformers import AutoModelForCausalLM, GgufConfig

            options["quantization_config"] = GgufConfig(dequantize=True)
            options |= {} if dtype == "auto" else {"dtype": dtype}
            loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
            file_only = file.beyond()
        else:
            empty, state = file.model_and_state()
            empty.config.architectures = [type(empty).__name__]
            options["dtype"] = torch.float32 if dtype == "auto" else dtype
            options |= {"device_map": {"": "meta"}} if without_memory else {}
            loaded = type(empty).from_pretrained(None, config=empty.config, state_dict=state, **options)
            file_only = ()
        model, info = loaded
        info = {**info, "unexpected_keys": {*info["unexpected_keys"], *file_only}}
        misfit = read_misfit(model, info)
        refuse_misfit(model, misfit, path.name, strict=strict, remedy=_REMEDY)
    # The weights are plain floats now; saving raises as long as the model calls itself quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.name_or_path = model.name_or_path = str(path)
    return model, misfit.unloaded(left="random values")


def gguf_state(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a GGUF file under the names of transformers, each dequantized to float32 when it is read.

    Raises:
        CheckpointError: If the file is truncated, no GGUF file, or of an architecture transformers cannot read or
            reads as a whole only.
    """
    file = _File.read(path)
    if file.is_read_as_a_whole:
        raise CheckpointError(
            f"{path.name} is of the architecture {file.architecture}, which transformers reads as a whole only; "
            "open it as a whole."
        )
    with errors_in_one_sentence(path.name, remedy=_REMEDY), quiet_transformers():
        return file.model_and_state()[1]


def gguf_bytes(path: Path, dtype: torch.dtype | str = "auto") -> int:
    """Bytes of the weights of a GGUF file in memory.

    Raises:
        CheckpointError: If the file is truncated or no GGUF file.
    """
    size = 4 if isinstance(dtype, str) else dtype.itemsize
    return size * sum(int(tensor.n_elements) for tensor in _File.read(path).tensors)


def why_gguf_is_whole(path: Path) -> str:
    """Why a GGUF file cannot be read tensor by tensor, as a clause; empty if it can.

    Raises:
        CheckpointError: If the file is truncated or no GGUF file.
    """
    file = _File.read(path)
    return f"transformers reads the architecture {file.architecture} as a whole only" if file.is_read_as_a_whole else ""


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file, as one of Hugging Face.

    Raises:
        CheckpointError: If transformers cannot read it.
    """
    from transformers import AutoTokenizer

    with errors_in_one_sentence(path.name, remedy=_REMEDY), quiet_transformers():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@dataclass(frozen=True)
class _File:
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
    def read(cls, path: Path) -> _File:
        """The file, whose header agrees with its length."""
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
    def is_read_as_a_whole(self) -> bool:
        """Whether transformers has no processors of single tensors for the architecture."""
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        return bool(is_gguf_arch_supported(self.architecture))

    def beyond(self) -> tuple[str, ...]:
        """Tensors of blocks beyond the number in the header, which transformers leaves out without a word."""
        blocks = [(tensor.name, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in self.tensors]
        n_blocks = self.n_blocks
        return tuple(name for name, block in blocks if block and n_blocks is not None and int(block[1]) >= n_blocks)

    def model_and_state(self) -> tuple[Any, dict[str, LazyTensor]]:
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
        names = get_gguf_hf_weights_map(model, processor)
        parts: dict[str, list[Any]] = {}
        for tensor in self.tensors:
            # Experts are named without the ending, as transformers stacks them in one parameter.
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                parts.setdefault(name, []).append(tensor)
        state = {name: _Processed(self.path.name, tuple(held), processor, names) for name, held in parts.items()}
        own = {tensor.name: tensor for tensor in self.tensors}
        plain = TensorProcessor()
        state |= {name: _Processed(self.path.name, (own[name],), plain, {}) for name in self.beyond()}
        return model, {name: tensor.lazy(name) for name, tensor in state.items()}


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
