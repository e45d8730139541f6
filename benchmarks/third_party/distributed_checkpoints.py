"""Trials of distributed checkpoints (DCP) of PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from benchmarks.third_party.checkpoint_trial import (
    FOLDER,
    TRIALS,
    CallsOpen,
    CallsShell,
    Saved,
    Trial,
    family,
    llama,
    only_config,
    optimizer_state,
    prefixed,
    state_of,
    trial,
    zoo,
)

DCP = "PyTorch DCP"


def save_dcp(state: dict, folder: Path, **options: Any) -> None:
    """Write a distributed checkpoint from a single process."""
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)


class App:
    """Stateful object that the tutorials of PyTorch save."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict:
        """Return the states of model and optimizer."""
        return {"model": self.model.state_dict(), "optim": optimizer_state()}

    def load_state_dict(self, state: dict) -> None:
        """Fail, because the workbench must not call it."""
        raise AssertionError


DCP_STATES = {
    "state dict": lambda m: m.state_dict(),
    "{'model': module, 'optimizer': ..., 'step': 3}": lambda m: {
        "model": m,
        "optimizer": optimizer_state(),
        "step": 3,
    },
    "{'app': ...}, as in the tutorials": lambda m: {"app": App(m)},
    "{'state_dict': ...}, as Lightning": lambda m: {"state_dict": prefixed(m.state_dict(), "net.")},
    "names with module._orig_mod.": lambda m: {"model": prefixed(m.state_dict(), "module._orig_mod.")},
    "Namespace alongside": lambda m: {"model": m, "args": argparse.Namespace(lr=1)},
    "code in data other than tensors, which is never read": lambda m: {"model": m, "args": CallsOpen()},
}


def dcp_trial(name: str, damage: Callable[[Path], Any] = lambda folder: None, rejection: str = "", state=None) -> None:
    """Add a trial of a DCP folder that is opened with ``module=``.

    Args:
        name: Name of the trial.
        damage: Function that damages the folder.
        rejection: As in `Trial`.
        state: Function of the model that returns the state to save; None saves its state dict.
    """

    def write(folder: Path) -> Saved:
        model = zoo()
        save_dcp((state or DCP_STATES["state dict"])(model), folder / "saved")
        damage(folder / "saved")
        return Saved(folder / "saved", model, lambda: zoo(9))

    TRIALS.append(Trial(DCP, name, write, rejection))


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Apply a function to the .metadata of a DCP folder."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def split(folder: Path, name: str, values: torch.Tensor, at: int) -> None:
    """Divide a saved tensor into two chunks at a row, as if two ranks had saved it."""
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
dcp_trial("only an optimizer", rejection="no weights", state=lambda m: {"optimizer": optimizer_state()})
dcp_trial("another model", rejection="does not fit", state=lambda m: {"model": nn.Linear(3, 3)})
dcp_trial("'model' and 'module'", rejection="several", state=lambda m: {"model": m, "module": m})
dcp_trial(".metadata missing", lambda f: (f / ".metadata").unlink(), "no weights")
dcp_trial(".metadata, noise", lambda f: (f / ".metadata").write_bytes(b"noise" * 50), "damaged")
dcp_trial(".metadata, zero bytes", lambda f: (f / ".metadata").write_bytes(b""), "damaged")
dcp_trial("data missing", lambda f: (f / "__0_0.distcp").unlink(), "damaged")
dcp_trial("data truncated", lambda f: os.truncate(f / "__0_0.distcp", 500), "damaged")
dcp_trial("code in .metadata", lambda f: (f / ".metadata").write_bytes(pickle.dumps(CallsOpen())), "code")
dcp_trial(
    "code within .metadata", lambda f: change_metadata(f, lambda m: m.planner_data.update(x=CallsShell())), "code"
)


@trial(DCP, "code in the data of a tensor", "code")
def _(folder):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    save_dcp({"model": zoo()}, folder / "saved")
    torch.save(CallsOpen(), folder / "saved" / "payload.distcp")

    def change(metadata):
        info = metadata.storage_data[MetadataIndex("model.head.weight", (0, 0))]
        info.relative_path, info.offset = "payload.distcp", 0
        info.length = (folder / "saved" / "payload.distcp").stat().st_size

    change_metadata(folder / "saved", change)
    return Saved(folder / "saved", zoo(), zoo)


@trial(DCP, "FSDP sharded state of accelerate, pytorch_model_fsdp_0")
def _(folder):
    model = zoo()
    save_dcp({"model": model}, folder / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": optimizer_state()}, folder / "optimizer_0")
    return Saved(folder, model, lambda: zoo(9))


def in_folder(folder: Path, write: Callable[[Path, Any], Any], dtype: torch.dtype = torch.float32) -> Saved:
    """Write config.json of a small Llama, and its parameters by the given function."""
    model = only_config(folder, dtype)
    write(folder, model)
    return Saved(folder, model)


trial(FOLDER, "DCP as the only parameters")(lambda folder: in_folder(folder, lambda f, m: save_dcp({"model": m}, f)))
trial(FOLDER, "DCP as the only parameters, bfloat16 state dict")(
    lambda folder: in_folder(folder, lambda f, m: save_dcp(m.state_dict(), f), torch.bfloat16)
)
trial(FOLDER, "DCP in a subfolder, pytorch_model_fsdp_0")(
    lambda folder: in_folder(folder, lambda f, m: save_dcp({"model": m}, f / "pytorch_model_fsdp_0"))
)


@trial(FOLDER, "DCP of a mixture of experts as the only parameters")
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
    """Write safetensors with torch.distributed.checkpoint."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), **options)
    dcp.save(state, storage_writer=writer, no_dist=True)


def _parts(folder: Path, state: dict, n: int = 2) -> None:
    """Write shards as ``save_distributed=True`` does on several ranks: each contains some rows of every tensor."""
    for i in range(n):
        parts, offsets = {}, {}
        for name, tensor in state.items():
            edges = [len(tensor) * k // n for k in range(n + 1)]
            parts[name] = tensor[edges[i] : edges[i + 1]].clone()
            offsets[name] = {"saved_offsets": [edges[i], *[0] * (tensor.ndim - 1)]}
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(parts, folder / f"shard-{i + 1:05}-model-00001-of-00001.safetensors", metadata=about)


HF_WRITER = "HuggingFaceStorageWriter"


@trial(HF_WRITER, "one file with index, with config.json")
def _(folder):
    return in_folder(folder, lambda f, m: hf_writer(f, m.state_dict()))


@trial(HF_WRITER, "several files with index")
def _(folder):
    def write(f, m):
        names = {name: 1 + i % 2 for i, name in enumerate(m.state_dict())}
        hf_writer(f, m.state_dict(), fqn_to_index_mapping=names)

    return in_folder(folder, write)


@trial(HF_WRITER, "save_distributed, shards of one rank")
def _(folder):
    return in_folder(folder, lambda f, m: hf_writer(f, m.state_dict(), save_distributed=True))


@trial(HF_WRITER, "save_distributed, consolidated")
def _(folder):
    return in_folder(
        folder, lambda f, m: hf_writer(f, m.state_dict(), save_distributed=True, enable_consolidation=True)
    )


@trial(HF_WRITER, "tensors divided among the shards of two ranks")
def _(folder):
    return in_folder(folder, lambda f, m: _parts(f, state_of(m)))


@trial(HF_WRITER, "tensors divided among three ranks, with module=")
def _(folder):
    model = zoo()
    _parts(folder, state_of(model), 3)
    return Saved(folder, model, lambda: zoo(9))


@trial(HF_WRITER, "tensors divided, the last shard missing", "does not fit")
def _(folder):
    saved = in_folder(folder, lambda f, m: _parts(f, state_of(m)))
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    return saved


@trial(HF_WRITER, "tensors divided, the first shard missing", "incomplete")
def _(folder):
    saved = in_folder(folder, lambda f, m: _parts(f, state_of(m)))
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
