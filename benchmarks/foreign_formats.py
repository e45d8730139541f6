"""The formats of `benchmarks.foreign_checkpoints`: how each checkpoint is written, and what is expected of it."""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import os
import pathlib
import pickle
import shutil
import tempfile
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

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
        ("fetch that file too", "fetch that too", "does not hold all parts",
         "no file named", "holds no weights", "does not hold all of", "lacks ",
         "in no file that is known here"),
    ),
    "does not fit": Reason(
        "The tensors are not those of the model; the rest would be random.",
        (
            "does not fit", "which fits no matrix", "which the base model has not", "does not fit the header",
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
        "Weights alone: the model must be passed as ``module=``.", ("holds weights without an architecture",
 "which the installed diffusers does not know", "is not installed")
    ),
    "other framework": Reason(
        "The format belongs to another framework or is a compiled program; PyTorch code writes none of them.",
        ("no checkpoint format known here", "TorchScript", "no file named", "in no file that is known here"),
    ),
    "configuration": Reason(
        "config.json is not that of the weights, or names no model that is known.",
        (
            "cannot open", "config.json", "no model of its model_type", "transformers has no model", "does not fit",
        ),
    ),
    "own code": Reason(
        "The model is Python code in the checkpoint, which runs only with ``trust_remote_code=True``.",
        ("needs Python code of its own",),
    ),
    "quantized": Reason(
        "The weights are in a quantized format whose package or hardware is not here, or that the model cannot run in.",
        ("bitsandbytes", "quantiz", "gptq", "GPTQ", "AWQ", "awq", "8 bits", "integer tensor", "hqq", "dequantize",
         "compressed"),
    ),
    "quantized, not streamed": Reason(
        "Quantized models of transformers are opened resident only.", ("cannot be streamed: it is quantized",)
    ),
    "adapter, not streamed": Reason(
        "An adapter is merged in memory.", ("is an adapter, which is merged in memory",)
    ),
    "read whole, not streamed": Reason(
        "transformers reads GGUF files of this architecture as a whole only.",
        ("cannot be streamed: transformers reads",)
    ),
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
        ("There is no file or folder", "is empty; pass", "got an object of type", "cannot be reached", "cannot be read",
         "cannot be opened", "no config.json"),
    ),
}  # fmt: skip

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


# Folders of transformers

FOLDER = "transformers folder"

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    trial(FOLDER, f"model.safetensors, {str(dtype).removeprefix('torch.')}")(
        lambda folder, dtype=dtype: Saved(folder, hugging_face(folder, llama(dtype=dtype)))
    )
for name in ("gpt2", "mixtral", "bert", "qwen2, tied", "gpt_neox", "opt", "mamba"):
    trial(FOLDER, f"{name}")(lambda folder, name=name: Saved(folder, hugging_face(folder, family(name))))
for cls in ("LlamaModel", "LlamaForSequenceClassification"):
    trial(FOLDER, f"{cls}")(lambda folder, cls=cls: Saved(folder, hugging_face(folder, llama(cls=cls))))


@trial(FOLDER, "sharded safetensors with index")
def _(folder):
    return Saved(folder, hugging_face(folder, max_shard_size="20KB"))


@trial(FOLDER, "sharded safetensors without index")
def _(folder):
    model = hugging_face(folder, max_shard_size="20KB")
    (folder / "model.safetensors.index.json").unlink()
    return Saved(folder, model)


@trial(FOLDER, "a variant of the files, model.fp16.safetensors")
def _(folder):
    return Saved(folder, hugging_face(folder, llama(dtype=torch.float16), variant="fp16"))


def _bin_shards(folder: Path, *, index: bool):
    model = pickled(folder)
    (folder / "pytorch_model.bin").unlink()
    items, places = list(state_of(model).items()), {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save(dict(items[i::2]), folder / file)
        places |= dict.fromkeys(dict(items[i::2]), file)
    if index:
        about = {"metadata": {"total_size": 1}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(about))
    return Saved(folder, model)


trial(FOLDER, "pytorch_model.bin")(lambda folder: Saved(folder, pickled(folder)))
trial(FOLDER, "pytorch_model.bin, before torch 1.6")(
    lambda folder: Saved(folder, pickled(folder, _use_new_zipfile_serialization=False))
)
trial(FOLDER, "sharded .bin with index")(partial(_bin_shards, index=True))
trial(FOLDER, "sharded .bin without index")(partial(_bin_shards, index=False))
for key in ("model", "model_state_dict", "state_dict", "module"):
    trial(FOLDER, f"pytorch_model.bin with the weights under '{key}'")(
        lambda folder, key=key: Saved(folder, pickled(folder, lambda state: {key: state, "step": 3}))
    )
trial(FOLDER, "pytorch_model.bin with an argparse.Namespace beside the weights")(
    lambda folder: Saved(folder, pickled(folder, lambda state: {"model": state, "args": argparse.Namespace(lr=1)}))
)
for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
    trial(FOLDER, f"names with {prefix}, safetensors")(
        lambda folder, prefix=prefix: Saved(
            folder,
            (hugging_face(folder), change_weights(folder / "model.safetensors", lambda s: _prefixed(s, prefix)))[0],
        )
    )
trial(FOLDER, "names with module., .bin")(
    lambda folder: Saved(folder, pickled(folder, lambda s: _prefixed(s, "module.")))
)


def _prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


for value in ("LlamaForCausalLM", None, []):

    def _write(folder, value=value):
        model = hugging_face(folder)
        change_config(folder, architectures=value)
        return Saved(folder, model)

    trial(FOLDER, f"architectures = {value!r}")(_write)


@trial(FOLDER, "safetensors under another name beside config.json")
def _(folder):
    model = hugging_face(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    return Saved(folder, model)


@trial(FOLDER, "FSDP full state, pytorch_model_fsdp.bin beside config.json")
def _(folder):
    model = pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model_fsdp.bin")
    return Saved(folder, model)


@trial(FOLDER, "a stale pytorch_model.bin with code beside model.safetensors")
def _(folder):
    model = hugging_face(folder)
    torch.save({"x": Bomb()}, folder / "pytorch_model.bin")
    return Saved(folder, model)


@trial(FOLDER, "EMA weights beside, ema_model.safetensors")
def _(folder):
    model = hugging_face(folder)
    save_file(state_of(llama(5)), folder / "ema_model.safetensors")
    return Saved(folder, model)


def trainer_folder(folder: Path) -> Any:
    """A checkpoint of transformers' Trainer; its other files hold code, which is never read."""
    model = hugging_face(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"):
        torch.save(Bomb(), folder / name)
    (folder / "trainer_state.json").write_text("{}")
    return model


trial(FOLDER, "Trainer's checkpoint, code in training_args.bin")(lambda folder: Saved(folder, trainer_folder(folder)))
trial(FOLDER, "Trainer's parent folder with one checkpoint")(
    lambda folder: Saved(folder, trainer_folder(folder / "checkpoint-10"))
)


@trial(FOLDER, "Trainer's parent folder with two checkpoints", "several")
def _(folder):
    trainer_folder(folder / "checkpoint-10")
    trainer_folder(folder / "checkpoint-20")
    return Saved(folder)


@trial(FOLDER, "tied weights, the head stored instead of the embedding")
def _(folder):
    model = hugging_face(folder, family("qwen2, tied"))
    change_weights(
        folder / "model.safetensors",
        lambda s: {"lm_head.weight" if n == "model.embed_tokens.weight" else n: t for n, t in s.items()},
    )
    return Saved(folder, model)


@trial(FOLDER, "weights of another head, opened by the class in config.json")
def _(folder):
    model = hugging_face(folder, llama(cls="LlamaForSequenceClassification"))
    change_config(folder, architectures=["LlamaModel"])
    return Saved(folder, model.model, unloaded="1 tensor (score.weight) of another head ignored")


DAMAGES = {
    "zero bytes": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "noise": lambda data: np.random.default_rng(0).bytes(len(data)),
}
for damage, change in DAMAGES.items():
    for file in ("model.safetensors", "pytorch_model.bin"):

        def _write(folder, change=change, file=file):
            (hugging_face if file.endswith("s") else pickled)(folder)
            (folder / file).write_bytes(change((folder / file).read_bytes()))
            return Saved(folder)

        trial(FOLDER, f"{file}, {damage}", "code" if (damage, file[0]) == ("noise", "p") else "damaged")(_write)


def refused_folder(name: str, refusal: str, model: Callable[[], Any] = llama, **options: Any):
    """Add a trial of a folder of transformers that the decorated function damages."""

    def add(damage: Callable[[Path], Any]) -> None:
        def write(folder: Path) -> Saved:
            hugging_face(folder, model(), **options)
            damage(folder)
            return Saved(folder)

        TRIALS.append(Trial(FOLDER, name, write, refusal))

    return add


def _weights_without(name):
    return lambda folder: change_weights(
        folder / "model.safetensors", lambda s: {key: value for key, value in s.items() if key != name}
    )


refused_folder("a tensor missing", "does not fit")(_weights_without("model.layers.1.mlp.up_proj.weight"))
refused_folder("the untied head missing", "does not fit")(_weights_without("lm_head.weight"))
refused_folder("a tensor too many", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: s | {"model.layers.1.gate.weight": torch.ones(2)})
)
refused_folder("a tensor of another shape", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: s | {"lm_head.weight": torch.ones(31, 32)})
)
refused_folder("integers in place of floats", "does not fit")(
    lambda f: change_weights(
        f / "model.safetensors", lambda s: s | {"lm_head.weight": torch.ones(32, 32, dtype=torch.int8)}
    )
)
refused_folder("names of another model", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: _prefixed(s, "net."))
)
for name, changes in {
    "fewer blocks in config.json": {"num_hidden_layers": 1},
    "more blocks in config.json": {"num_hidden_layers": 3},
    "another width in config.json": {"hidden_size": 64},
    "another vocabulary in config.json": {"vocab_size": 33},
}.items():
    refused_folder(name, "does not fit")(lambda f, changes=changes: change_config(f, **changes))
for name, changes in {
    "another model_type": {"model_type": "gpt2"},
    "a model_type that does not exist": {"model_type": "made_up"},
    "model_type = null": {"model_type": None},
    "model_type = 3": {"model_type": 3},
    "architectures naming another model": {"architectures": ["GPT2LMHeadModel"]},
    "architectures = 3": {"architectures": 3},
    "hidden_size = null": {"hidden_size": None},
    "num_hidden_layers = null": {"num_hidden_layers": None},
    "num_attention_heads = 0": {"num_attention_heads": 0},
    "num_attention_heads = '2'": {"num_attention_heads": "2"},
    "hidden_size negative": {"hidden_size": -32},
    "rope_scaling of an unknown kind": {"rope_parameters": {"rope_type": "made_up"}},
    "hidden_act unknown": {"hidden_act": "made_up"},
    "dtype = 'float3'": {"dtype": "float3"},
}.items():
    refused_folder(name, "configuration")(lambda f, changes=changes: change_config(f, **changes))
for name, text in {"empty object": "{}", "list": "[]", "no JSON": "{", "zero bytes": "", "null": "null"}.items():
    refused_folder(f"config.json: {name}", "damaged" if name in ("no JSON", "zero bytes") else "configuration")(
        lambda f, text=text: (f / "config.json").write_text(text)
    )
refused_folder("config.json missing", "no architecture")(lambda f: (f / "config.json").unlink())
refused_folder("weights missing", "incomplete")(lambda f: (f / "model.safetensors").unlink())
refused_folder("a shard missing", "incomplete", max_shard_size="20KB")(lambda f: next(f.glob("model-00002-*")).unlink())
refused_folder("a shard truncated", "damaged", max_shard_size="20KB")(
    lambda f: next(f.glob("model-00002-*")).write_bytes(b"12345678")
)
refused_folder("index of shards: noise", "damaged", max_shard_size="20KB")(
    lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff\x00")
)
refused_folder("a Git LFS pointer in place of the weights", "damaged")(
    lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
)
refused_folder("model with Python code of its own", "own code")(
    lambda f: (
        change_config(f, model_type="made_up", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}),
        (f / "own.py").write_text(f"open({str(CODE_RAN)!r}, 'w')"),
    )
)
for bomb in (Bomb, SystemBomb, ClassBomb):

    def _write(folder, bomb=bomb):
        pickled(folder, lambda state: state | {"x": bomb()})
        return Saved(folder)

    trial(FOLDER, f"pytorch_model.bin with code, {bomb.__name__}", "code")(_write)
for name in ("flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model.onnx", "model.ckpt.index"):

    def _write(folder, name=name):
        only_config(folder)
        (folder / name).write_bytes(b"\x80" * 100)
        return Saved(folder)

    trial(FOLDER, f"only {name}", "other framework")(_write)

#: Formats of quantized weights, as their config.json names them.
QUANTIZED = {
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes, 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fbgemm fp8": {"quant_method": "fbgemm_fp8"},
    "HQQ": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}, "format": "pack-quantized"},
    "EETQ": {"quant_method": "eetq", "weights": "int8"},
    "AQLM": {"quant_method": "aqlm", "in_group_size": 8},
    "no method": {"bits": 4},
}
#: Formats that transformers converts to plain weights, or does not know; plain weights stay as they are.
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
for name, about in {"fp8": FP8, "mxfp4": {"quant_method": "mxfp4"}, "an unknown method": {"quant_method": "x"}}.items():

    def _write(folder, about=about):
        model = hugging_face(folder)
        change_config(folder, quantization_config=about)
        return Saved(folder, model)

    trial(FOLDER, f"plain weights, quantization_config of {name}", not_streamed="quantized, not streamed")(_write)


@trial(FOLDER, "fp8 in blocks with scales, as DeepSeek", not_streamed="quantized, not streamed")
def _(folder):
    model = hugging_face(folder)
    state = state_of(model)
    for name, tensor in state_of(model).items():
        if ".layers." in name and tensor.ndim == 2:
            blocks = tensor.reshape(len(tensor) // 16, 16, -1, 16)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            small = (blocks / scale).to(torch.float8_e4m3fn)
            state |= {name: small.reshape(tensor.shape), f"{name}_scale_inv": scale[:, 0, :, 0]}
            model.get_parameter(name).data = (small.float() * scale).reshape(tensor.shape)
    change_weights(folder / "model.safetensors", lambda _: state)
    change_config(folder, quantization_config=FP8)
    return Saved(folder, model)


for name, about in QUANTIZED.items():
    refused_folder(f"quantization_config of {name}", "quantized")(
        lambda f, about=about: change_config(f, quantization_config=about)
    )
refused_folder("float8 weights without scales", "quantized")(
    lambda f: (
        change_weights(f / "model.safetensors", lambda s: {n: t.to(torch.float8_e4m3fn) for n, t in s.items()}),
        change_config(f, dtype="float8_e4m3fn"),
    )
)


@trial(FOLDER, "torchao, int8 weights", not_streamed="quantized, not streamed", needs="torchao")
def _(folder):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    hugging_face(folder / "plain")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config)
    model.save_pretrained(folder / "quantized")
    return Saved(folder / "quantized", model.eval(), has_spectra=False)


# Files of weights with their module

FILE = "file with module="


def file_trial(
    name: str, change: Callable[[dict], Any] = lambda s: s, refusal: str = "", suffix: str = ".pt", **options
):
    """Add a trial of a pickle of weights."""

    def write(folder: Path) -> Saved:
        model = zoo()
        torch.save(change(state_of(model)), folder / f"weights{suffix}", **options)
        return Saved(folder / f"weights{suffix}", model, lambda: zoo(9))

    TRIALS.append(Trial(FILE, name, write, refusal))


def safetensors_trial(name: str, change: Callable[[dict], dict] = lambda s: s, refusal: str = "") -> None:
    """Add a trial of a safetensors file."""

    def write(folder: Path) -> Saved:
        model = zoo()
        save_file(change(state_of(model)), folder / "weights.safetensors")
        return Saved(folder / "weights.safetensors", model, lambda: zoo(9))

    TRIALS.append(Trial(FILE, name, write, refusal))


NESTINGS = {
    "plain state dict": lambda s: s,
    "collections.OrderedDict": OrderedDict,
    "{'model': ...}, as nanoGPT": lambda s: {
        "model": s, "optimizer": {"state": {}}, "iter_num": 3, "best_val_loss": torch.tensor(1.0), "config": {"lr": 1},
    },
    "{'model_state_dict': ...}": lambda s: {"model_state_dict": s, "optimizer_state_dict": {}, "epoch": 3},
    "{'state_dict': ...}": lambda s: {"state_dict": s, "arch": "resnet"},
    "{'module': ...}": lambda s: {"module": s, "ds_version": "0.16"},
    "{'model': {'state_dict': ...}}": lambda s: {"model": {"state_dict": s}},
    "{'model': ..., 'model_ema': ...}": lambda s: {"model": s, "model_ema": state_of(zoo(4))},
    "Lightning .ckpt": lambda s: {
        "state_dict": _prefixed(s, "net."), "epoch": 1, "pytorch-lightning_version": "2.6", "callbacks": {},
        "optimizer_states": [], "hyper_parameters": {"width": 16}, "hparams_name": "kwargs",
    },
    "argparse.Namespace beside": lambda s: {"model": s, "args": argparse.Namespace(lr=1, out=pathlib.Path("a"))},
    "types.SimpleNamespace beside": lambda s: {"model": s, "args": types.SimpleNamespace(lr=1)},
    "pathlib.Path beside": lambda s: {"model": s, "args": {"out": pathlib.Path("a/b")}},
    "numpy scalars beside": lambda s: {"model": s, "loss": np.float64(3), "step": np.int32(3)},
    "numpy array beside": lambda s: {"model": s, "losses": np.arange(5.0), "names": np.array(["a"])},
    "dataclass beside": lambda s: {"model": s, "config": OwnConfig()},
    "enum beside": lambda s: {"model": s, "kind": Kind.SMALL},
    "defaultdict beside": lambda s: {"model": s, "history": defaultdict(list, {"loss": [1.0]})},
    "set, date and complex beside": lambda s: {"model": s, "x": {1, 2}, "when": datetime.datetime(2020, 1, 1), "z": 1j},
    "transformers' TrainingArguments beside": lambda s: {"model": s, "args": _training_arguments()},
    "optimizer's own state dict beside": lambda s: {"model": s, "optimizer": _optimizer_state()},
    "parameters instead of tensors": lambda s: {name: nn.Parameter(tensor) for name, tensor in s.items()},
    "tensors that require gradients": lambda s: {name: tensor.requires_grad_() for name, tensor in s.items()},
    "names with module., as DistributedDataParallel": lambda s: _prefixed(s, "module."),
    "names with _orig_mod., as torch.compile": lambda s: _prefixed(s, "_orig_mod."),
    "names with module._orig_mod.": lambda s: _prefixed(s, "module._orig_mod."),
    "names with _fsdp_wrapped_module.": lambda s: {
        f"_fsdp_wrapped_module.{name}": t for name, t in s.items()
    },
}  # fmt: skip


def _training_arguments():
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", use_cpu=True, report_to=[])


def _optimizer_state():
    model = zoo()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()


for name, change in NESTINGS.items():
    file_trial(name, change, suffix=".ckpt" if "Lightning" in name else ".pt")
for suffix in (".pth", ".bin", ".ckpt", ".pth.tar", ".tar"):
    file_trial(f"plain state dict, {suffix}", suffix=suffix)
file_trial("plain state dict, before torch 1.6", _use_new_zipfile_serialization=False)
safetensors_trial("safetensors")
safetensors_trial("safetensors, names with model.", lambda s: _prefixed(s, "model."))
safetensors_trial("safetensors, names with module.", lambda s: _prefixed(s, "module."))
safetensors_trial("safetensors, a tensor missing", lambda s: dict(list(s.items())[1:]), "does not fit")
safetensors_trial("safetensors, a tensor too many", lambda s: s | {"x": torch.ones(2)}, "does not fit")
safetensors_trial("safetensors, another shape", lambda s: s | {"head.weight": torch.ones(3, 16)}, "does not fit")
safetensors_trial("safetensors, no tensors", lambda s: {}, "does not fit")
file_trial("integers in place of floats", lambda s: {n: t.to(torch.int8) for n, t in s.items()}, "does not fit")
file_trial("sparse tensors", lambda s: {n: t.to_sparse() for n, t in s.items()}, "tensors of special kinds")
file_trial(
    "quantized tensors",
    lambda s: {n: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8) for n, t in s.items()},
    "tensors of special kinds",
)
file_trial("two state dicts, 'model' and 'state_dict'", lambda s: {"model": s, "state_dict": s}, "several")
file_trial("only an optimizer", lambda s: {"optimizer": _optimizer_state()}, "no weights")
file_trial("an optimizer's state dict itself", lambda s: _optimizer_state(), "no weights")
file_trial("only EMA weights", lambda s: {"ema": s, "decay": 0.99}, "no weights")
file_trial("a whole module instead of its state dict", lambda s: zoo(), "no weights")
file_trial("a list of tensors", lambda s: list(s.values()), "no weights")
file_trial("one tensor", lambda s: torch.ones(3), "no weights")
file_trial("None", lambda s: None, "no weights")
file_trial("empty dict", lambda s: {}, "does not fit")
for bomb in (Bomb, SystemBomb, ClassBomb):
    file_trial(f"code beside the weights, {bomb.__name__}", lambda s, bomb=bomb: {"model": s, "args": bomb()}, "code")
file_trial("code in place of a tensor", lambda s: s | {"head.weight": Bomb()}, "code")
file_trial(
    "code, before torch 1.6", lambda s: {"model": s, "args": Bomb()}, "code", _use_new_zipfile_serialization=False
)
file_trial(
    "code in Lightning's hyperparameters",
    lambda s: {"state_dict": s, "hyper_parameters": {"x": Bomb()}}, "code", ".ckpt",
)  # fmt: skip


@trial(FILE, "code in a bare pickle", "code")
def _(folder):
    (folder / "weights.pt").write_bytes(pickle.dumps({"model": Bomb()}))
    return Saved(folder / "weights.pt", module=zoo)


for damage, change in DAMAGES.items():
    for suffix in (".safetensors", ".pt"):

        def _write(folder, change=change, suffix=suffix):
            file = folder / f"weights{suffix}"
            (save_file if suffix == ".safetensors" else torch.save)(state_of(zoo()), file)
            file.write_bytes(change(file.read_bytes()))
            return Saved(file, module=zoo)

        trial(FILE, f"{suffix}, {damage}", "code" if (damage, suffix) == ("noise", ".pt") else "damaged")(_write)


@trial(FILE, "weights alone, without module=", "no architecture")
def _(folder):
    save_file(state_of(zoo()), folder / "weights.safetensors")
    return Saved(folder / "weights.safetensors")


@trial(FILE, "folder of model.safetensors and a config.json of its own, as PyTorchModelHubMixin")
def _(folder):
    model = zoo()
    save_file(state_of(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"width": 16}))
    return Saved(folder, model, lambda: zoo(9))


@trial(FILE, "TorchScript archive, .pt", "other framework")
def _(folder):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(folder / "weights.pt"))
    return Saved(folder / "weights.pt", module=lambda: nn.Linear(2, 2))


for suffix in (".onnx", ".h5", ".keras", ".npz", ".msgpack", ".pb", ".tflite", ".mlmodel", ".pkl", ".joblib", ".npy",
               ".ptl", ".pte", ".pt2", ".ot", ".ggml", ".engine", ".zip"):  # fmt: skip

    def _write(folder, suffix=suffix):
        file = folder / f"model{suffix}"
        values = {name: tensor.numpy() for name, tensor in state_of(zoo()).items()}
        if suffix == ".npz":
            np.savez(file, **values)
        elif suffix in (".pkl", ".joblib"):
            file.write_bytes(pickle.dumps(Bomb()))
        else:
            file.write_bytes(b"\x08\x07" * 100)
        return Saved(file, module=zoo)

    trial("other framework", suffix, "other framework")(_write)


@trial("zoo", "folder of save_checkpoint")
def _(folder):
    model = zoo()
    wb.save_checkpoint(model, folder)
    return Saved(folder, model)


# Distributed checkpoints of PyTorch

DCP = "PyTorch DCP"


def save_dcp(state: dict, folder: Path, **options: Any) -> None:
    """Write a distributed checkpoint as one process."""
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)


class App:
    """What the tutorials of torch save."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict:
        """Weights and optimizer."""
        return {"model": self.model.state_dict(), "optim": _optimizer_state()}

    def load_state_dict(self, state: dict) -> None:
        """Never called."""
        raise AssertionError


DCP_STATES = {
    "state dict": lambda m: m.state_dict(),
    "{'model': module, 'optimizer': ..., 'step': 3}": lambda m: {
        "model": m,
        "optimizer": _optimizer_state(),
        "step": 3,
    },
    "{'app': ...}, as in the tutorials": lambda m: {"app": App(m)},
    "{'state_dict': ...}, as Lightning": lambda m: {"state_dict": _prefixed(m.state_dict(), "net.")},
    "names with module._orig_mod.": lambda m: {"model": _prefixed(m.state_dict(), "module._orig_mod.")},
    "Namespace beside": lambda m: {"model": m, "args": argparse.Namespace(lr=1)},
    "code in data that are no tensors, never read": lambda m: {"model": m, "args": Bomb()},
}


def dcp_trial(name: str, damage: Callable[[Path], Any] = lambda folder: None, refusal: str = "", state=None) -> None:
    """Add a trial of a DCP folder with its module."""

    def write(folder: Path) -> Saved:
        model = zoo()
        save_dcp((state or DCP_STATES["state dict"])(model), folder / "saved")
        damage(folder / "saved")
        return Saved(folder / "saved", model, lambda: zoo(9))

    TRIALS.append(Trial(DCP, name, write, refusal))


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the .metadata of a DCP folder."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def split(folder: Path, name: str, values: torch.Tensor, at: int) -> None:
    """Put a tensor that was saved whole in two chunks, as two ranks would have saved it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def change(metadata):
        old = metadata.storage_data.pop(MetadataIndex(name, [0] * values.ndim))
        entry, entry.chunks = metadata.state_dict_metadata[name], []
        for i, part in enumerate((values[:at], values[at:])):
            file, offsets = folder / f"__{i + 1}_0.distcp", (i * at, *[0] * (values.ndim - 1))
            torch.save(part.clone(), file)
            info = type(old)(file.name, 0, file.stat().st_size)
            metadata.storage_data[MetadataIndex(name, offsets)] = info
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))

    change_metadata(folder, change)


for name, state in DCP_STATES.items():
    dcp_trial(name, state=state)
dcp_trial("a tensor in chunks of two ranks", lambda f: split(f, "head.weight", zoo().head.weight.detach(), 10))
dcp_trial("only an optimizer", refusal="no weights", state=lambda m: {"optimizer": _optimizer_state()})
dcp_trial("another model", refusal="does not fit", state=lambda m: {"model": nn.Linear(3, 3)})
dcp_trial("'model' and 'module'", refusal="several", state=lambda m: {"model": m, "module": m})
dcp_trial(".metadata missing", lambda f: (f / ".metadata").unlink(), "no weights")
dcp_trial(".metadata, noise", lambda f: (f / ".metadata").write_bytes(b"noise" * 50), "damaged")
dcp_trial(".metadata, zero bytes", lambda f: (f / ".metadata").write_bytes(b""), "damaged")
dcp_trial("data missing", lambda f: (f / "__0_0.distcp").unlink(), "damaged")
dcp_trial("data truncated", lambda f: os.truncate(f / "__0_0.distcp", 500), "damaged")
dcp_trial("code in .metadata", lambda f: (f / ".metadata").write_bytes(pickle.dumps(Bomb())), "code")
dcp_trial(
    "code within .metadata", lambda f: change_metadata(f, lambda m: m.planner_data.update(x=SystemBomb())), "code"
)


@trial(DCP, "code in the data of a tensor", "code")
def _(folder):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    save_dcp({"model": zoo()}, folder / "saved")
    torch.save(Bomb(), folder / "saved" / "bomb.distcp")

    def change(metadata):
        info = metadata.storage_data[MetadataIndex("model.head.weight", (0, 0))]
        info.relative_path, info.offset = "bomb.distcp", 0
        info.length = (folder / "saved" / "bomb.distcp").stat().st_size

    change_metadata(folder / "saved", change)
    return Saved(folder / "saved", zoo(), zoo)


@trial(DCP, "FSDP sharded state of accelerate, pytorch_model_fsdp_0")
def _(folder):
    model = zoo()
    save_dcp({"model": model}, folder / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": _optimizer_state()}, folder / "optimizer_0")
    return Saved(folder, model, lambda: zoo(9))


def _in_folder(folder: Path, write: Callable[[Path, Any], Any], dtype: torch.dtype = torch.float32) -> Saved:
    model = only_config(folder, dtype)
    write(folder, model)
    return Saved(folder, model)


trial(FOLDER, "DCP as its only weights")(lambda folder: _in_folder(folder, lambda f, m: save_dcp({"model": m}, f)))
trial(FOLDER, "DCP as its only weights, bfloat16 state dict")(
    lambda folder: _in_folder(folder, lambda f, m: save_dcp(m.state_dict(), f), torch.bfloat16)
)
trial(FOLDER, "DCP in a folder in it, pytorch_model_fsdp_0")(
    lambda folder: _in_folder(folder, lambda f, m: save_dcp({"model": m}, f / "pytorch_model_fsdp_0"))
)


@trial(FOLDER, "DCP of a mixture of experts as its only weights")
def _(folder):
    model = family("mixtral")
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(folder)
    save_dcp({"model": model}, folder)
    return Saved(folder, model)


@trial(FOLDER, "DCP that does not fit config.json", "does not fit")
def _(folder):
    only_config(folder)
    save_dcp({"model": llama(num_hidden_layers=1)}, folder)
    return Saved(folder)


def hf_writer(folder: Path, state: dict, **options: Any) -> None:
    """Write safetensors by torch.distributed.checkpoint."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), **options)
    dcp.save(state, storage_writer=writer, no_dist=True)


def _parts(folder: Path, state: dict, n: int = 2) -> None:
    """Shards as ``save_distributed=True`` leaves them on several ranks: each holds a part of the rows of a tensor."""
    for i in range(n):
        parts, offsets = {}, {}
        for name, tensor in state.items():
            edges = [len(tensor) * k // n for k in range(n + 1)]
            parts[name] = tensor[edges[i] : edges[i + 1]].clone()
            offsets[name] = {"saved_offsets": [edges[i], *[0] * (tensor.ndim - 1)]}
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(parts, folder / f"shard-{i + 1:05}-model-00001-of-00001.safetensors", metadata=about)


HF_WRITER = "HuggingFaceStorageWriter"


@trial(HF_WRITER, "one file with index, config.json beside")
def _(folder):
    return _in_folder(folder, lambda f, m: hf_writer(f, m.state_dict()))


@trial(HF_WRITER, "several files with index")
def _(folder):
    def write(f, m):
        names = {name: 1 + i % 2 for i, name in enumerate(m.state_dict())}
        hf_writer(f, m.state_dict(), fqn_to_index_mapping=names)

    return _in_folder(folder, write)


@trial(HF_WRITER, "save_distributed, shards of one rank")
def _(folder):
    return _in_folder(folder, lambda f, m: hf_writer(f, m.state_dict(), save_distributed=True))


@trial(HF_WRITER, "save_distributed, consolidated")
def _(folder):
    return _in_folder(
        folder, lambda f, m: hf_writer(f, m.state_dict(), save_distributed=True, enable_consolidation=True)
    )


@trial(HF_WRITER, "tensors divided among the shards of two ranks")
def _(folder):
    return _in_folder(folder, lambda f, m: _parts(f, state_of(m)))


@trial(HF_WRITER, "tensors divided among three ranks, with module=")
def _(folder):
    model = zoo()
    _parts(folder, state_of(model), 3)
    return Saved(folder, model, lambda: zoo(9))


@trial(HF_WRITER, "tensors divided, the last shard missing", "does not fit")
def _(folder):
    saved = _in_folder(folder, lambda f, m: _parts(f, state_of(m)))
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    return saved


@trial(HF_WRITER, "tensors divided, the first shard missing", "incomplete")
def _(folder):
    saved = _in_folder(folder, lambda f, m: _parts(f, state_of(m)))
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    return saved


@trial(HF_WRITER, "one shard of divided tensors passed as a file", "divided")
def _(folder):
    _parts(folder, state_of(zoo()))
    return Saved(folder / "shard-00002-model-00001-of-00001.safetensors", module=zoo)


@trial(HF_WRITER, "a shard of divided tensors under the name model.safetensors", "divided")
def _(folder):
    only_config(folder)
    _parts(folder, state_of(llama()))
    (folder / "shard-00002-model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    return Saved(folder)


# Megatron, DeepSpeed


@trial("Megatron", "torch_dist, layers stacked")
def _(folder):
    model = decoder(0)
    state = state_of(model)
    layers = {name.split(".", 3)[3] for name in state if ".layers.0." in name}
    stacked = {f"decoder.layers.{k}": torch.stack([state[f"decoder.layers.{i}.{k}"] for i in range(3)]) for k in layers}
    state = {name: tensor for name, tensor in state.items() if ".layers." not in name} | stacked
    place = folder / "iter_0000010"
    save_dcp(
        {**state, "optimizer.state.exp_avg.x": torch.ones(2), "rng_state": torch.ones(3)},
        place,
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    )
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save(Bomb(), place / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return Saved(folder, model, lambda: decoder(1))


@trial("Megatron", "the older format, mp_rank_00/model_optim_rng.pt", "no weights")
def _(folder):
    (folder / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    torch.save({"model": state_of(zoo())}, folder / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return Saved(folder, module=zoo)


class Decoder(nn.Module):
    """The names of Megatron-Core's GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.decoder.final_layernorm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        states = self.embedding(tokens)
        for layer in self.decoder.layers:
            states = states + layer(states)
        return self.decoder.final_layernorm(states)


def decoder(seed: int) -> nn.Module:
    """A model with the names of Megatron."""
    torch.manual_seed(seed)
    return Decoder().eval()


def deepspeed(folder: Path, model: nn.Module, stage: int, n_ranks: int = 2, **beside: Any) -> None:
    """A folder of DeepSpeed's ``save_checkpoint``, by the layout that its zero_to_fp32.py reads."""
    place = folder / "global_step5"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    (folder / "zero_to_fp32.py").write_text("raise RuntimeError")
    parameters = dict(model.named_parameters())
    shapes = [OrderedDict((name, parameter.shape) for name, parameter in parameters.items())]
    about = {"param_shapes": shapes, "buffer_names": [], "ds_version": "0.16.0", "shared_params": {},
             "ds_config": {"zero_optimization": {"stage": stage}}, "frozen_param_shapes": None, **beside}  # fmt: skip
    flat = [
        nn.functional.pad(p.detach().flatten(), (0, -p.numel() % n_ranks)).chunk(n_ranks) for p in parameters.values()
    ]
    for rank in range(n_ranks):
        optimizer = {"zero_stage": stage, "partition_count": n_ranks}
        if stage == 3:
            held = {name: torch.empty(0) for name in parameters}
            torch.save({"module": held, **about}, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            optimizer |= {"fp32_flat_groups": [torch.cat([parts[rank] for parts in flat])]}
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.16.0"},
            place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    if stage < 3:
        torch.save({"module": state_of(model), **about}, place / "mp_rank_00_model_states.pt")


for stage in (1, 2, 3):

    def _write(folder, stage=stage):
        model = zoo()
        deepspeed(folder, model, stage, args=argparse.Namespace(lr=1))
        return Saved(folder, model, lambda: zoo(9))

    trial("DeepSpeed", f"ZeRO-{stage} with module=")(_write)
    trial(FOLDER, f"DeepSpeed ZeRO-{stage} as its only weights")(
        lambda folder, stage=stage: _in_folder(folder, partial(deepspeed, stage=stage))
    )


@trial("DeepSpeed", "ZeRO-3, one of three ranks missing", "incomplete")
def _(folder):
    deepspeed(folder, zoo(), 3, 3)
    for file in (folder / "global_step5").glob("zero_pp_rank_2_*"):
        file.unlink()
    return Saved(folder, module=zoo)


@trial("DeepSpeed", "ZeRO-3, code in the optimizer's file", "code")
def _(folder):
    deepspeed(folder, zoo(), 3)
    torch.save({"x": Bomb()}, folder / "global_step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    return Saved(folder, module=zoo)


@trial(FOLDER, "DeepSpeed ZeRO-3 beside gathered model.safetensors")
def _(folder):
    model = hugging_face(folder)
    deepspeed(folder, model, 3)
    return Saved(folder, model)


@trial("DeepSpeed", "what zero_to_fp32.py writes, pytorch_model.bin")
def _(folder):
    model = zoo()
    torch.save(state_of(model), folder / "pytorch_model.bin")
    return Saved(folder, model, lambda: zoo(9))


@trial("DeepSpeed", "two ranks of model parallelism", "divided")
def _(folder):
    deepspeed(folder, zoo(), 1)
    shutil.copy(
        folder / "global_step5" / "mp_rank_00_model_states.pt", folder / "global_step5" / "mp_rank_01_model_states.pt"
    )
    return Saved(folder, module=zoo)


@trial("DeepSpeed", "code in the file of the weights", "code")
def _(folder):
    deepspeed(folder, zoo(), 1, args=SystemBomb())
    return Saved(folder, module=zoo)


@trial("DeepSpeed", "'latest' names a folder that is not there", "incomplete")
def _(folder):
    deepspeed(folder, zoo(), 1)
    (folder / "latest").write_text("global_step6")
    return Saved(folder, module=zoo)


# Adapters

ADAPTER = "PEFT adapter"
NOT_STREAMED = "adapter, not streamed"


def lora(folder: Path, *, kind: str = ".safetensors", base: Path | None = None, **options: Any) -> Saved:
    """An adapter of PEFT as it saves them, and the base model with it merged."""
    if base is None:
        base = folder / "base"
        hugging_face(base)
    model = llama()
    place = folder / "adapter"
    place.mkdir()
    state, generator = {}, torch.Generator().manual_seed(1)
    for target in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = model.get_submodule(target).weight
        a, b = torch.randn(4, weight.shape[1], generator=generator), torch.randn(len(weight), 4, generator=generator)
        state |= {f"base_model.model.{target}.lora_{k}.weight": t for k, t in (("A", a), ("B", b))}
        weight.data += (8 / (2 if options.get("use_rslora") else 4)) * (b @ a)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8, "bias": "none",
        "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "fan_in_fan_out": False, **options,
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config))
    (save_file if kind == ".safetensors" else torch.save)(state, place / f"adapter_model{kind}")
    return Saved(place, model)


trial(ADAPTER, "LoRA, safetensors", not_streamed=NOT_STREAMED)(lora)
trial(ADAPTER, "LoRA, .bin", not_streamed=NOT_STREAMED)(partial(lora, kind=".bin"))
trial(ADAPTER, "LoRA, scaled by the root of the rank", not_streamed=NOT_STREAMED)(partial(lora, use_rslora=True))
trial(ADAPTER, "DoRA", "more than LoRA", not_streamed=NOT_STREAMED)(partial(lora, use_dora=True))
trial(ADAPTER, "IA3", "more than LoRA", not_streamed=NOT_STREAMED)(partial(lora, peft_type="IA3"))
trial(ADAPTER, "base model not here", "more than LoRA", not_streamed=NOT_STREAMED)(
    partial(lora, base=Path("nobody/no-model"))
)


@trial(ADAPTER, "code in adapter_model.bin", "code", not_streamed=NOT_STREAMED)
def _(folder):
    saved = lora(folder, kind=".bin")
    torch.save({"x": Bomb()}, folder / "adapter" / "adapter_model.bin")
    return saved


@trial(ADAPTER, "weights missing", "incomplete", not_streamed=NOT_STREAMED)
def _(folder):
    saved = lora(folder)
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    return saved


@trial(ADAPTER, "of another width", "does not fit", not_streamed=NOT_STREAMED)
def _(folder):
    saved = lora(folder)
    hugging_face(folder / "base", llama(hidden_size=64))
    return saved


@trial(ADAPTER, "LoRA, written by peft", not_streamed=NOT_STREAMED, needs="peft")
def _(folder):
    import peft

    base = hugging_face(folder / "base")
    base.config._name_or_path = base.name_or_path = str(folder / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    expected = llama()
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            expected.get_submodule(name).weight.data += (
                module.lora_B["default"].weight @ module.lora_A["default"].weight * module.scaling["default"]
            ).detach()
    return Saved(folder / "adapter", expected)


# diffusers

DIFFUSERS = "diffusers"


def diffusers_folder(folder: Path, **changes: Any) -> Any:
    """A small DiT written by diffusers."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "num_layers": 2, "sample_size": 8}
    model = DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10, norm_num_groups=1).eval()
    model.save_pretrained(folder, **changes)
    return model


DIT_INPUTS = {
    "hidden_states": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    "timestep": torch.arange(4), "class_labels": torch.arange(4),
}  # fmt: skip
for name, changes in {
    "model folder": {},
    "model folder, .bin": {"safe_serialization": False},
    "model folder, sharded": {"max_shard_size": "20KB"},
    "a variant of the files, fp16": {"variant": "fp16"},
}.items():
    trial(DIFFUSERS, name, needs="diffusers")(
        lambda folder, changes=changes: Saved(folder, diffusers_folder(folder, **changes), inputs=DIT_INPUTS)
    )


def _as_diffusers(folder: Path, save: Callable = save_file, name: str = "safetensors", **config: Any) -> Saved:
    model = zoo()
    folder.mkdir(exist_ok=True)
    save(state_of(model), folder / f"diffusion_pytorch_model.{name}")
    (folder / "config.json").write_text(json.dumps({"_class_name": "MadeUpModel", **config}))
    return Saved(folder, model, lambda: zoo(9))


trial(DIFFUSERS, "model folder, with module=")(_as_diffusers)
trial(DIFFUSERS, "code in diffusion_pytorch_model.bin", "code")(
    lambda folder: _as_diffusers(folder, lambda s, f: torch.save(s | {"x": Bomb()}, f), "bin")
)


@trial(DIFFUSERS, "a class that does not exist", "no architecture")
def _(folder):
    return Saved(_as_diffusers(folder).source)


@trial(DIFFUSERS, "a whole pipeline", "several")
def _(folder):
    _as_diffusers(folder / "unet")
    (folder / "model_index.json").write_text("{}")
    return Saved(folder)


# GGUF

GGUF = "GGUF"


def gguf(folder: Path, kind: str = "Q8_0", *, change: Callable[[dict], dict] = lambda t: t, n_blocks: int = 2,
         architecture: str = "llama") -> Saved:  # fmt: skip
    """A GGUF file as llama.cpp's converter writes it, and the model with its weights dequantized."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    wide = 256 if kind.endswith("_K") or kind.startswith(("IQ", "TQ")) else 64
    sizes = {"hidden_size": wide, "intermediate_size": wide, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = llama(**sizes, max_position_embeddings=64)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    quantization = GGMLQuantizationType[kind]
    file = folder / "model.gguf"
    writer = GGUFWriter(file, architecture)
    for key, value in {
        "block_count": n_blocks, "context_length": 64, "embedding_length": wide, "feed_forward_length": wide,
        "head_count": 4, "head_count_kv": 4, "vocab_size": 32, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4,
        "rope_dimension_count": wide // 4,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(65 + i) for i in range(31)), "AB"])
    writer.add_token_types([1] * 32)
    writer.add_token_merges(["A B"])
    tensors = {}
    for name, parameter in model.named_parameters():
        short = name.removesuffix(".weight")
        for long, its in names.items():
            short = short.replace(long, its)
        rows = torch.arange(len(parameter))
        if short.endswith(("attn_q", "attn_k")):  # llama.cpp pairs the rotated features differently
            rows = rows.reshape(4, 2, -1).transpose(1, 2).flatten()
        values = parameter.detach()[rows].numpy()
        if parameter.ndim == 1:
            data, raw, known = values, None, values
        elif kind in ("F32", "F16"):
            data, raw = values.astype(np.float32 if kind == "F32" else np.float16), None
            known = data.astype(np.float32)
        else:
            data, raw = _quantized(values, quantization, quantize), quantization
            known = dequantize(data, quantization)
        parameter.data = torch.from_numpy(np.array(known))[torch.argsort(rows)]
        tensors[f"{short}.weight"] = (data, raw)
    for name, (data, raw) in change(tensors).items():
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Saved(file, model)


def _quantized(values: np.ndarray, kind: Any, quantize: Callable) -> np.ndarray:
    """Blocks of a quantized matrix; of kinds that only llama.cpp writes, any valid ones."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(0)
        rows = np.zeros((len(values), values.shape[1] // block * size), np.uint8)
        for i in range(len(rows)):  # scales are float16 within the blocks: draw until they are finite and small
            while True:
                rows[i] = generator.integers(0, 256, rows.shape[1], np.uint8)
                found = dequantize(rows[i : i + 1], kind)
                if np.isfinite(found).all() and np.abs(found).max() < 1e3:
                    break
        return rows


for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
             "IQ4_NL", "IQ4_XS", "TQ1_0"):  # fmt: skip
    trial(GGUF, kind)(partial(gguf, kind=kind))
trial(GGUF, "a tensor missing", "does not fit")(
    partial(gguf, change=lambda t: {n: v for n, v in t.items() if n != "blk.1.ffn_up.weight"})
)
trial(GGUF, "more blocks in the header", "does not fit")(partial(gguf, n_blocks=3))
trial(GGUF, "fewer blocks in the header", "does not fit")(partial(gguf, n_blocks=1))
trial(GGUF, "an architecture that transformers does not know", "configuration")(partial(gguf, architecture="made_up"))
trial(GGUF, "first of two files of one model", "does not fit")(
    partial(gguf, change=lambda t: dict(list(t.items())[: len(t) // 2]))
)
for damage, change in DAMAGES.items():

    def _write(folder, change=change):
        file = gguf(folder).source
        file.write_bytes(change(file.read_bytes()))
        return Saved(file)

    trial(GGUF, damage, "damaged")(_write)


# What is no checkpoint

SOURCE = "source"

for name, source in {"None": None, "3": 3, "empty text": "", "blank text": " ", "bytes": b"x"}.items():
    trial(SOURCE, name, "no such source")(lambda folder, source=source: Saved(source))
for name in ("missing", "missing.safetensors", "missing.gguf"):
    trial(SOURCE, f"path that does not exist, {name}", "no such source")(lambda folder, name=name: Saved(folder / name))
trial(SOURCE, "empty folder", "no such source")(Saved)
trial(SOURCE, "hub name without a network", "no such source")(lambda folder: Saved("nobody/no-such-model"))
trial(SOURCE, "path longer than file systems allow", "no such source")(lambda folder: Saved("/" + "x" * 5000))


@trial(SOURCE, "broken link", "no such source")
def _(folder):
    (folder / "model.safetensors").symlink_to(folder / "nothing")
    return Saved(folder / "model.safetensors")


for file in ("weights.safetensors", "weights.pt"):

    def _write(folder, file=file):
        if os.geteuid() == 0:
            raise PermissionError("the superuser may read every file")
        (save_file if file.endswith("s") else torch.save)(state_of(zoo()), folder / file)
        (folder / file).chmod(0)
        return Saved(folder / file, module=zoo)

    trial(SOURCE, f"file that may not be read, {file}", "no such source")(_write)


@trial(SOURCE, "folder under the name of a file", "no such source")
def _(folder):
    (folder / "model.safetensors").mkdir()
    return Saved(folder / "model.safetensors", module=zoo)
