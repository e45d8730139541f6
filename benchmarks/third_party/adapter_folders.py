"""Trials of PEFT adapters and of folders of diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.third_party.checkpoint_trial import (
    CallsOpen,
    Saved,
    hugging_face,
    llama,
    state_of,
    trial,
    zoo,
)

ADAPTER = "PEFT adapter"
NOT_STREAMED = "adapter, not streamed"


def lora(folder: Path, *, kind: str = ".safetensors", base: Path | None = None, **options: Any) -> Saved:
    """Write an adapter in the format of PEFT; the expected model is the base model merged with it."""
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
trial(ADAPTER, "base model not local", "more than LoRA", not_streamed=NOT_STREAMED)(
    partial(lora, base=Path("nobody/no-model"))
)


@trial(ADAPTER, "code in adapter_model.bin", "code", not_streamed=NOT_STREAMED)
def _(folder):
    saved = lora(folder, kind=".bin")
    torch.save({"x": CallsOpen()}, folder / "adapter" / "adapter_model.bin")
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
    """Write a small DiT with diffusers and return it."""
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
    """Write a model of the zoo in the layout of diffusers."""
    model = zoo()
    folder.mkdir(exist_ok=True)
    save(state_of(model), folder / f"diffusion_pytorch_model.{name}")
    (folder / "config.json").write_text(json.dumps({"_class_name": "MadeUpModel", **config}))
    return Saved(folder, model, lambda: zoo(9))


trial(DIFFUSERS, "model folder, with module=")(_as_diffusers)
trial(DIFFUSERS, "code in diffusion_pytorch_model.bin", "code")(
    lambda folder: _as_diffusers(folder, lambda s, f: torch.save(s | {"x": CallsOpen()}, f), "bin")
)


@trial(DIFFUSERS, "a class that does not exist", "no architecture")
def _(folder):
    return Saved(_as_diffusers(folder).source)


@trial(DIFFUSERS, "an entire pipeline", "several")
def _(folder):
    _as_diffusers(folder / "unet")
    (folder / "model_index.json").write_text("{}")
    return Saved(folder)
