"""Trials of checkpoints: what is written, what is expected of it, and the small models that are written."""

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
#: A file that exists only if a pickle was executed.
CODE_RAN = Path(tempfile.gettempdir()) / f"code-ran-{os.getpid()}"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        source: What is passed to ``open_checkpoint``.
        model: The model that was written; of a refused checkpoint it is not looked at.
        module: Makes the module that is passed with the weights.
        options: Further options.
        unloaded: What is expected as `Subject.unloaded`.
        inputs: Inputs of the profile, if not `TOKENS`.
        has_spectra: Whether a profile of the model is compared.
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
    """One checkpoint and what is expected of it.

    Attributes:
        group: Kind of format.
        name: Format.
        write: Writes it into a folder.
        refusal: Key of `REASONS` if it is to be refused; empty: it opens.
        not_streamed: Key of `REASONS` if it opens, but cannot be streamed.
        needs: Package without which the trial is not run.
    """

    group: str
    name: str
    write: Callable[[Path], Saved]
    refusal: str = ""
    not_streamed: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Reason:
    """Why checkpoints are refused, and what their refusals say."""

    why: str
    phrases: tuple[str, ...]


REASONS = {
    "damaged": Reason(
        "The file is empty, truncated, or holds something else than its name says.",
        ("truncated", "is damaged", "no valid JSON", "no index of a sharded", "is missing or", "holds another tensor"),
    ),
    "incomplete": Reason(
        "A file that belongs to the checkpoint is not there.",
        (
            "fetch that file too",
            "fetch that too",
            "does not hold all parts",
            "no file named",
            "holds no weights",
            "does not hold all of",
            "lacks ",
            "in no file that is known here",
        ),
    ),
    "does not fit": Reason(
        "The tensors are not those of the model; the rest would be random.",
        (
            "does not fit",
            "which fits no matrix",
            "which the base model has not",
            "does not fit the header",
        ),
    ),
    "code": Reason(
        "The pickle calls functions, possibly code; it is never executed.", ("possibly code", "holds a pickle with")
    ),
    "no weights": Reason(
        "There are no weights of a model in it.",
        ("holds no state dict", "no weights under a key", "holds no LoRA", "no config.json", "holds no weights"),
    ),
    "no architecture": Reason(
        "Weights alone: the model must be passed as ``module=``.",
        ("holds weights without an architecture", "which the installed diffusers does not know", "is not installed"),
    ),
    "other framework": Reason(
        "The format belongs to another framework or is a compiled program; PyTorch code writes none of them.",
        ("no checkpoint format known here", "TorchScript", "no file named", "in no file that is known here"),
    ),
    "configuration": Reason(
        "config.json is not that of the weights, or names no model that is known.",
        (
            "cannot open",
            "config.json",
            "no model of its model_type",
            "transformers has no model",
            "does not fit",
        ),
    ),
    "own code": Reason(
        "The model is Python code in the checkpoint, which runs only with ``trust_remote_code=True``.",
        ("needs Python code of its own",),
    ),
    "quantized": Reason(
        "The weights are in a quantized format whose package or hardware is not here, or that the model cannot run in.",
        (
            "bitsandbytes",
            "quantiz",
            "gptq",
            "GPTQ",
            "AWQ",
            "awq",
            "8 bits",
            "integer tensor",
            "hqq",
            "dequantize",
            "compressed",
        ),
    ),
    "quantized, not streamed": Reason(
        "Quantized models of transformers are opened resident only.", ("cannot be streamed: it is quantized",)
    ),
    "adapter, not streamed": Reason("An adapter is merged in memory.", ("is an adapter, which is merged in memory",)),
    "several": Reason(
        "It holds several models or checkpoints, of which none is chosen silently.",
        ("may hold weights under each of", "pass one, such as", "leave one", "pass the folder of one of its models"),
    ),
    "divided": Reason(
        "The weights are divided in a way that only the program that wrote them puts together.",
        ("divided among", "parts of tensors", "split"),
    ),
    "more than LoRA": Reason(
        "The adapter is no sum of two matrices; peft merges it.", ("merge_and_unload", "is no folder here")
    ),
    "tensors of special kinds": Reason(
        "The file holds sparse, quantized or nested tensors.", ("sparse, quantized or nested",)
    ),
    "no such source": Reason(
        "There is no checkpoint at the path, or it cannot be read.",
        (
            "There is no file or folder",
            "is empty; pass",
            "got an object of type",
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


def trial(group: str, name: str, refusal: str = "", *, not_streamed: str = "", needs: str = ""):
    """Add the decorated writer to the trials."""

    def add(write: Callable[[Path], Saved]) -> Callable[[Path], Saved]:
        TRIALS.append(Trial(group, name, write, refusal, not_streamed, needs))
        return write

    return add


class Bomb:
    """What would write `CODE_RAN` if it were unpickled."""

    def __reduce__(self):
        return (open, (str(CODE_RAN), "w"))


class SystemBomb:
    """The same, by a shell."""

    def __reduce__(self):
        return (os.system, (f"touch {CODE_RAN}",))


class ClassBomb:
    """The same, by a class of the standard library."""

    def __reduce__(self):
        import subprocess

        return (subprocess.Popen, (["touch", str(CODE_RAN)],))


@dataclass
class OwnConfig:
    """Options as training scripts keep them."""

    n_layer: int = 2
    folder: Path = Path("out")


class Kind(enum.Enum):
    """An option with a name."""

    SMALL = "small"


# Models


def zoo(seed: int = 0) -> nn.Module:
    """A model that transformers does not know, whose module is passed with its weights."""
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, seed=seed).eval()


def llama(seed: int = 0, *, cls: str = "LlamaForCausalLM", dtype: torch.dtype = torch.float32, **options: Any):
    """A small Llama of transformers."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {**sizes, "vocab_size": 32, "max_position_embeddings": 64, "tie_word_embeddings": False, **options}
    config = transformers.LlamaConfig(**options, pad_token_id=0, dtype=dtype)
    return getattr(transformers, cls)._from_config(config, dtype=dtype).eval()


@cache
def _family(name: str) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    plain = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain |= {"vocab_size": 32, "max_position_embeddings": 64}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    found = {
        "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 32}),
        "mixtral": ("Mixtral", "MixtralForCausalLM", {**plain, **experts}),
        "bert": ("Bert", "BertForMaskedLM", plain),
        "qwen2, tied": ("Qwen2", "Qwen2ForCausalLM", {**plain, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", plain),
        "opt": ("OPT", "OPTForCausalLM", {**plain, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        "mamba": ("Mamba", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 32}),
    }[name]
    return found[0], found[1], tuple(found[2].items())


def family(name: str) -> nn.Module:
    """A small model of another family of transformers."""
    import transformers

    config, cls, options = _family(name)
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, f"{config}Config")(**dict(options))).eval()


def state_of(model: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """The state dict of a model."""
    return {prefix + name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def hugging_face(folder: Path, model: Any = None, **options: Any) -> Any:
    """Write a folder of transformers; the model is given back."""
    model = llama() if model is None else model
    model.save_pretrained(folder, **options)
    return model


def pickled(
    folder: Path, change: Callable[[dict], Any] = lambda state: state, model: Any = None, **options: Any
) -> Any:
    """Write a folder of transformers whose weights are a pickle."""
    model = llama() if model is None else model
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(change(state_of(model)), folder / "pytorch_model.bin", **options)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Change options of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(file: Path, change: Callable[[dict], dict]) -> None:
    """Change the tensors of a safetensors file."""
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def only_config(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write config.json; the model is given back."""
    model = llama(dtype=dtype)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    return model


def prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def optimizer_state():
    model = zoo()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()
