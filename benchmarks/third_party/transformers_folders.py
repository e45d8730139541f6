"""Trials of checkpoint folders of transformers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.third_party.checkpoint_trial import (
    CODE_RAN,
    DAMAGES,
    FOLDER,
    TRIALS,
    CallsClass,
    CallsOpen,
    CallsShell,
    Saved,
    Trial,
    change_config,
    change_weights,
    family,
    hugging_face,
    llama,
    only_config,
    pickled,
    prefixed,
    state_of,
    trial,
)

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


def _bin_shards(folder: Path, *, index: bool) -> Saved:
    """Write a model as two pickled shards, with or without an index."""
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
    trial(FOLDER, f"pytorch_model.bin with the parameters under '{key}'")(
        lambda folder, key=key: Saved(folder, pickled(folder, lambda state: {key: state, "step": 3}))
    )
trial(FOLDER, "pytorch_model.bin with an argparse.Namespace alongside the parameters")(
    lambda folder: Saved(folder, pickled(folder, lambda state: {"model": state, "args": argparse.Namespace(lr=1)}))
)
for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
    trial(FOLDER, f"names with {prefix}, safetensors")(
        lambda folder, prefix=prefix: Saved(
            folder,
            (hugging_face(folder), change_weights(folder / "model.safetensors", lambda s: prefixed(s, prefix)))[0],
        )
    )
trial(FOLDER, "names with module., .bin")(
    lambda folder: Saved(folder, pickled(folder, lambda s: prefixed(s, "module.")))
)


for value in ("LlamaForCausalLM", None, []):

    def _write(folder, value=value):
        model = hugging_face(folder)
        change_config(folder, architectures=value)
        return Saved(folder, model)

    trial(FOLDER, f"architectures = {value!r}")(_write)


@trial(FOLDER, "safetensors under another name alongside config.json")
def _(folder):
    model = hugging_face(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    return Saved(folder, model)


@trial(FOLDER, "FSDP full state, pytorch_model_fsdp.bin alongside config.json")
def _(folder):
    model = pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model_fsdp.bin")
    return Saved(folder, model)


@trial(FOLDER, "a stale pytorch_model.bin with code alongside model.safetensors")
def _(folder):
    model = hugging_face(folder)
    torch.save({"x": CallsOpen()}, folder / "pytorch_model.bin")
    return Saved(folder, model)


@trial(FOLDER, "EMA parameters alongside, ema_model.safetensors")
def _(folder):
    model = hugging_face(folder)
    save_file(state_of(llama(5)), folder / "ema_model.safetensors")
    return Saved(folder, model)


def trainer_folder(folder: Path) -> Any:
    """Write a checkpoint of transformers' Trainer; its other files contain code and are never read."""
    model = hugging_face(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"):
        torch.save(CallsOpen(), folder / name)
    (folder / "trainer_state.json").write_text("{}")
    return model


trial(FOLDER, "Trainer checkpoint, code in training_args.bin")(lambda folder: Saved(folder, trainer_folder(folder)))
trial(FOLDER, "output folder of Trainer with one checkpoint")(
    lambda folder: Saved(folder, trainer_folder(folder / "checkpoint-10"))
)


@trial(FOLDER, "output folder of Trainer with two checkpoints", "several")
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


@trial(FOLDER, "parameters of another head, opened as the class in config.json")
def _(folder):
    model = hugging_face(folder, llama(cls="LlamaForSequenceClassification"))
    change_config(folder, architectures=["LlamaModel"])
    return Saved(folder, model.model, unloaded="1 tensor (score.weight) of another head ignored")


for damage, change in DAMAGES.items():
    for file in ("model.safetensors", "pytorch_model.bin"):

        def _write(folder, change=change, file=file):
            (hugging_face if file.endswith("s") else pickled)(folder)
            (folder / file).write_bytes(change((folder / file).read_bytes()))
            return Saved(folder)

        trial(FOLDER, f"{file}, {damage}", "code" if (damage, file[0]) == ("noise", "p") else "damaged")(_write)


def rejected_folder(
    name: str, rejection: str, model: Callable[[], Any] = llama, **options: Any
) -> Callable[[Callable[[Path], Any]], None]:
    """Return a decorator that adds a trial of a folder of transformers damaged by the decorated function."""

    def add(damage: Callable[[Path], Any]) -> None:
        def write(folder: Path) -> Saved:
            hugging_face(folder, model(), **options)
            damage(folder)
            return Saved(folder)

        TRIALS.append(Trial(FOLDER, name, write, rejection))

    return add


def _without_tensor(name: str) -> Callable[[Path], None]:
    """Return a function that removes one tensor from model.safetensors."""
    return lambda folder: change_weights(
        folder / "model.safetensors", lambda s: {key: value for key, value in s.items() if key != name}
    )


rejected_folder("a tensor missing", "does not fit")(_without_tensor("model.layers.1.mlp.up_proj.weight"))
rejected_folder("the untied head missing", "does not fit")(_without_tensor("lm_head.weight"))
rejected_folder("an additional tensor", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: s | {"model.layers.1.gate.weight": torch.ones(2)})
)
rejected_folder("a tensor of another shape", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: s | {"lm_head.weight": torch.ones(31, 32)})
)
rejected_folder("integers in place of floats", "does not fit")(
    lambda f: change_weights(
        f / "model.safetensors", lambda s: s | {"lm_head.weight": torch.ones(32, 32, dtype=torch.int8)}
    )
)
rejected_folder("names of another model", "does not fit")(
    lambda f: change_weights(f / "model.safetensors", lambda s: prefixed(s, "net."))
)
for name, changes in {
    "fewer blocks in config.json": {"num_hidden_layers": 1},
    "more blocks in config.json": {"num_hidden_layers": 3},
    "another width in config.json": {"hidden_size": 64},
    "another vocabulary in config.json": {"vocab_size": 33},
}.items():
    rejected_folder(name, "does not fit")(lambda f, changes=changes: change_config(f, **changes))
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
    rejected_folder(name, "configuration")(lambda f, changes=changes: change_config(f, **changes))
for name, text in {"empty object": "{}", "list": "[]", "invalid JSON": "{", "zero bytes": "", "null": "null"}.items():
    rejected_folder(f"config.json: {name}", "damaged" if name in ("invalid JSON", "zero bytes") else "configuration")(
        lambda f, text=text: (f / "config.json").write_text(text)
    )
rejected_folder("config.json missing", "no architecture")(lambda f: (f / "config.json").unlink())
rejected_folder("parameters missing", "incomplete")(lambda f: (f / "model.safetensors").unlink())
rejected_folder("a shard missing", "incomplete", max_shard_size="20KB")(
    lambda f: next(f.glob("model-00002-*")).unlink()
)
rejected_folder("a shard truncated", "damaged", max_shard_size="20KB")(
    lambda f: next(f.glob("model-00002-*")).write_bytes(b"12345678")
)
rejected_folder("index of shards: noise", "damaged", max_shard_size="20KB")(
    lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff\x00")
)
rejected_folder("a Git LFS pointer in place of the parameters", "damaged")(
    lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
)
rejected_folder("model with custom Python code", "custom code")(
    lambda f: (
        change_config(f, model_type="made_up", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}),
        (f / "own.py").write_text(f"open({str(CODE_RAN)!r}, 'w')"),
    )
)
for payload in (CallsOpen, CallsShell, CallsClass):

    def _write(folder, payload=payload):
        pickled(folder, lambda state: state | {"x": payload()})
        return Saved(folder)

    trial(FOLDER, f"pytorch_model.bin with code, {payload.__name__}", "code")(_write)
for name in ("flax_model.msgpack", "tf_model.h5", "rust_model.ot", "model.onnx", "model.ckpt.index"):

    def _write(folder, name=name):
        only_config(folder)
        (folder / name).write_bytes(b"\x80" * 100)
        return Saved(folder)

    trial(FOLDER, f"only {name}", "other framework")(_write)

#: Entries of config.json for formats of quantized parameters.
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
#: Entry for float8 parameters in blocks with scales, which transformers converts to ordinary parameters.
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
# Parameters that are not quantized stay unchanged where transformers converts the format or does not know it.
for name, about in {"fp8": FP8, "mxfp4": {"quant_method": "mxfp4"}, "an unknown method": {"quant_method": "x"}}.items():

    def _write(folder, about=about):
        model = hugging_face(folder)
        change_config(folder, quantization_config=about)
        return Saved(folder, model)

    trial(FOLDER, f"parameters not quantized, quantization_config of {name}", not_streamed="quantized, not streamed")(
        _write
    )


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
    rejected_folder(f"quantization_config of {name}", "quantized")(
        lambda f, about=about: change_config(f, quantization_config=about)
    )
rejected_folder("float8 parameters without scales", "quantized")(
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
