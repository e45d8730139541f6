"""Description of checkpoint trials, reasons for rejection, and the small models that the trials write."""

from __future__ import annotations

import enum
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import workbench as wb

TOKENS = torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(0))
#: File that exists only if the code of a pickle was executed.
CODE_RAN = Path(tempfile.gettempdir()) / f"code-ran-{os.getpid()}"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        source: Argument of ``open_checkpoint``.
        model: The model that was written; not used if the checkpoint is rejected.
        module: Function that creates the ``module=`` to which the parameters belong; None if there is none.
        options: Further options of ``open_checkpoint``.
        unloaded: Expected `Subject.unloaded`.
        inputs: Inputs of the profile; None uses `TOKENS`.
        has_spectra: Whether the profiles are compared.
    """

    source: Any
    model: nn.Module | None = None
    module: Callable[[], nn.Module] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    unloaded: str = ""
    inputs: Any = None
    has_spectra: bool = True


@dataclass(frozen=True)
class Trial:
    """One checkpoint and the expected outcome.

    Attributes:
        group: Group of formats.
        name: Format.
        write: Function that writes the checkpoint into a folder.
        rejection: Key of `REASONS` if the checkpoint must be rejected; empty if it must open.
        not_streamed: Key of `REASONS` if the checkpoint opens, but cannot be streamed.
        needs: Package without which the trial is not run; empty if none is needed.
    """

    group: str
    name: str
    write: Callable[[Path], Saved]
    rejection: str = ""
    not_streamed: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Reason:
    """A reason for which checkpoints are rejected, and phrases of which the exception must contain one."""

    why: str
    phrases: tuple[str, ...]


REASONS = {
    "damaged": Reason(
        "The file is empty or truncated, or its content is not of the kind that its name states.",
        (
            "truncated",
            "is damaged",
            "not valid JSON",
            "not an index of a sharded",
            "is missing or",
            "holds a different tensor",
        ),
    ),
    "incomplete": Reason(
        "A file of the checkpoint is missing.",
        (
            "download that",
            "all parts of",
            "no file named",
            "contains no weights",
            "is missing in",
            "lacks ",
            "in no known file format",
        ),
    ),
    "does not fit": Reason(
        "The tensors are not those of the model; the remaining parameters would be random.",
        (
            "does not fit",
            "which fits no matrix",
            "which the base model does not have",
            "does not fit the header",
        ),
    ),
    "code": Reason("The pickle calls functions, possibly code; it is never executed.", ("possibly code",)),
    "no weights": Reason(
        "The file contains no parameters of a model.",
        ("contains no state dict", "but no weights;", "holds no LoRA", "no config.json", "contains no weights"),
    ),
    "no architecture": Reason(
        "The file contains parameters alone: the model must be passed as `module=`.",
        ("weights without an architecture", "which the installed version of diffusers", "is not installed"),
    ),
    "other framework": Reason(
        "The format belongs to another framework or is a compiled program; no PyTorch code writes it.",
        ("unknown format", "TorchScript", "no file named", "in no known file format"),
    ),
    "configuration": Reason(
        "config.json does not describe these parameters, or names an unknown model.",
        (
            "cannot open",
            "config.json",
            "no model of its model_type",
            "transformers has no model",
            "does not fit",
        ),
    ),
    "custom code": Reason(
        "The model is Python code in the checkpoint, which is executed only with `trust_remote_code=True`.",
        ("needs its own code",),
    ),
    "quantized": Reason(
        "The parameters are quantized in a format whose package or hardware is missing, or that the model cannot use.",
        (
            "bitsandbytes",
            "quantiz",
            "gptq",
            "GPTQ",
            "AWQ",
            "8 bits",
            "integer tensor",
            "hqq",
            "dequantize",
            "compressed",
        ),
    ),
    "quantized, not streamed": Reason(
        "Quantized models of transformers can only be opened resident.", ("cannot be streamed: it is quantized",)
    ),
    "adapter, not streamed": Reason("An adapter is merged in memory.", ("is an adapter, merged in memory",)),
    "several": Reason(
        "There are several models or checkpoints, of which none is chosen silently.",
        ("weights under each of", "pass one, such as", "keep one", "pass the folder of one of its models"),
    ),
    "divided": Reason(
        "The parameters are partitioned in a way that only the program that wrote them can reverse.",
        ("partitioned", "parts of tensors"),
    ),
    "more than LoRA": Reason(
        "The adapter is not LoRA alone, or its base model is not a local folder; peft can merge it.",
        ("merge_and_unload", "is not a local folder"),
    ),
    "tensors of special kinds": Reason(
        "The file contains sparse, quantized or nested tensors.", ("sparse, quantized or nested",)
    ),
    "no such source": Reason(
        "There is no checkpoint at the path, or it cannot be read.",
        (
            "There is no file or folder",
            "is empty; pass",
            "must be a path",
            "cannot be reached",
            "cannot be read",
            "cannot be opened",
            "no config.json",
        ),
    ),
}

FOLDER = "transformers folder"
DAMAGES = {
    "zero bytes": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "noise": lambda data: np.random.default_rng(0).bytes(len(data)),
}

TRIALS: list[Trial] = []


def trial(group: str, name: str, rejection: str = "", *, not_streamed: str = "", needs: str = ""):
    """Return a decorator that adds a function that writes a checkpoint to the trials."""

    def add(write: Callable[[Path], Saved]) -> Callable[[Path], Saved]:
        TRIALS.append(Trial(group, name, write, rejection, not_streamed, needs))
        return write

    return add


class CallsOpen:
    """Object whose unpickling would create the file `CODE_RAN`."""

    def __reduce__(self):
        return (open, (str(CODE_RAN), "w"))


class CallsShell:
    """Object whose unpickling would create the file by a shell command."""

    def __reduce__(self):
        return (os.system, (f"touch {CODE_RAN}",))


class CallsClass:
    """Object whose unpickling would create the file by calling a class of the standard library."""

    def __reduce__(self):
        import subprocess

        return (subprocess.Popen, (["touch", str(CODE_RAN)],))


@dataclass
class ScriptConfig:
    """Dataclass of options, as training scripts save them."""

    n_layer: int = 2
    folder: Path = Path("out")


class Kind(enum.Enum):
    """Enumeration of an option."""

    SMALL = "small"


# Models


def zoo(seed: int = 0) -> nn.Module:
    """Create a model of the zoo, which is unknown to transformers and must be passed as ``module=``."""
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, seed=seed).eval()


def llama(seed: int = 0, *, cls: str = "LlamaForCausalLM", dtype: torch.dtype = torch.float32, **options: Any):
    """Create a small Llama of transformers."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {**sizes, "vocab_size": 32, "max_position_embeddings": 64, "tie_word_embeddings": False, **options}
    config = transformers.LlamaConfig(**options, pad_token_id=0, dtype=dtype)
    return getattr(transformers, cls)._from_config(config, dtype=dtype).eval()


@cache
def _family(name: str) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"vocab_size": 32, "max_position_embeddings": 64}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    found = {
        "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 32}),
        "mixtral": ("Mixtral", "MixtralForCausalLM", {**common, **experts}),
        "bert": ("Bert", "BertForMaskedLM", common),
        "qwen2, tied": ("Qwen2", "Qwen2ForCausalLM", {**common, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", common),
        "opt": ("OPT", "OPTForCausalLM", {**common, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        "mamba": ("Mamba", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 32}),
    }[name]
    return found[0], found[1], tuple(found[2].items())


def family(name: str) -> nn.Module:
    """Create a small model of another family of transformers."""
    import transformers

    config, cls, options = _family(name)
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, f"{config}Config")(**dict(options))).eval()


def state_of(model: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return a copy of the state dict of a model, with a prefix before each name."""
    return {prefix + name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def hugging_face(folder: Path, model: Any = None, **options: Any) -> Any:
    """Write a model in the format of transformers and return it; by default a small Llama."""
    model = llama() if model is None else model
    model.save_pretrained(folder, **options)
    return model


def pickled(
    folder: Path, change: Callable[[dict], Any] = lambda state: state, model: Any = None, **options: Any
) -> Any:
    """Write a model in the format of transformers with the parameters in a pickle, and return it."""
    model = llama() if model is None else model
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(change(state_of(model)), folder / "pytorch_model.bin", **options)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(file: Path, change: Callable[[dict], dict]) -> None:
    """Replace the tensors of a safetensors file by a function of them."""
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def only_config(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write config.json alone and return the model that it describes."""
    model = llama(dtype=dtype)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    return model


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a state dict with a prefix before each name."""
    return {prefix + name: tensor for name, tensor in state.items()}


def optimizer_state() -> dict[str, Any]:
    """Return the state dict of an optimizer after one update."""
    model = zoo()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()
