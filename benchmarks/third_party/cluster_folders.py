"""Trials of folders of Megatron and DeepSpeed."""

from __future__ import annotations

import argparse
import json
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from benchmarks.third_party.checkpoint_trial import (
    FOLDER,
    CallsOpen,
    CallsShell,
    Saved,
    hugging_face,
    state_of,
    trial,
    zoo,
)
from benchmarks.third_party.distributed_checkpoints import in_folder, save_dcp


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
    torch.save(CallsOpen(), place / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return Saved(folder, model, lambda: decoder(1))


@trial("Megatron", "the older format, mp_rank_00/model_optim_rng.pt", "no weights")
def _(folder):
    (folder / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    torch.save({"model": state_of(zoo())}, folder / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return Saved(folder, module=zoo)


class Decoder(nn.Module):
    """Model whose parameters have the names of the GPT of Megatron-Core."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.decoder.final_layernorm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states after the final normalization."""
        states = self.embedding(tokens)
        for layer in self.decoder.layers:
            states = states + layer(states)
        return self.decoder.final_layernorm(states)


def decoder(seed: int) -> nn.Module:
    """Create a `Decoder` with random parameters."""
    torch.manual_seed(seed)
    return Decoder().eval()


def deepspeed(folder: Path, model: nn.Module, stage: int, n_ranks: int = 2, **extra: Any) -> None:
    """Write a folder in the layout of DeepSpeed's ``save_checkpoint``, which its zero_to_fp32.py reads.

    Args:
        folder: Destination.
        model: Model to save.
        stage: Stage of ZeRO.
        n_ranks: Number of ranks over which the optimizer state (in stage 3 also the parameters) is partitioned.
        extra: Further entries of the files of model states.
    """
    place = folder / "global_step5"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    (folder / "zero_to_fp32.py").write_text("raise RuntimeError")
    parameters = dict(model.named_parameters())
    shapes = [OrderedDict((name, parameter.shape) for name, parameter in parameters.items())]
    about = {"param_shapes": shapes, "buffer_names": [], "ds_version": "0.16.0", "shared_params": {},
             "ds_config": {"zero_optimization": {"stage": stage}}, "frozen_param_shapes": None, **extra}  # fmt: skip
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
    trial(FOLDER, f"DeepSpeed ZeRO-{stage} as the only parameters")(
        lambda folder, stage=stage: in_folder(folder, partial(deepspeed, stage=stage))
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
    torch.save({"x": CallsOpen()}, folder / "global_step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    return Saved(folder, module=zoo)


@trial(FOLDER, "DeepSpeed ZeRO-3 alongside gathered model.safetensors")
def _(folder):
    model = hugging_face(folder)
    deepspeed(folder, model, 3)
    return Saved(folder, model)


@trial("DeepSpeed", "output of zero_to_fp32.py, pytorch_model.bin")
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


@trial("DeepSpeed", "code in the file of parameters", "code")
def _(folder):
    deepspeed(folder, zoo(), 1, args=CallsShell())
    return Saved(folder, module=zoo)


@trial("DeepSpeed", "'latest' names a folder that does not exist", "incomplete")
def _(folder):
    deepspeed(folder, zoo(), 1)
    (folder / "latest").write_text("global_step6")
    return Saved(folder, module=zoo)
