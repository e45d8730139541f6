"""Trials of files of parameters, which are opened with ``module=``."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import pickle
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from benchmarks.third_party.checkpoint_trial import (
    DAMAGES,
    TRIALS,
    CallsClass,
    CallsOpen,
    CallsShell,
    Kind,
    Saved,
    ScriptConfig,
    Trial,
    optimizer_state,
    prefixed,
    state_of,
    trial,
    zoo,
)

FILE = "file with module="


def file_trial(
    name: str, change: Callable[[dict], Any] = lambda s: s, rejection: str = "", suffix: str = ".pt", **options
):
    """Add a trial of a pickle of parameters."""

    def write(folder: Path) -> Saved:
        model = zoo()
        torch.save(change(state_of(model)), folder / f"weights{suffix}", **options)
        return Saved(folder / f"weights{suffix}", model, lambda: zoo(9))

    TRIALS.append(Trial(FILE, name, write, rejection))


def safetensors_trial(name: str, change: Callable[[dict], dict] = lambda s: s, rejection: str = "") -> None:
    """Add a trial of a safetensors file."""

    def write(folder: Path) -> Saved:
        model = zoo()
        save_file(change(state_of(model)), folder / "weights.safetensors")
        return Saved(folder / "weights.safetensors", model, lambda: zoo(9))

    TRIALS.append(Trial(FILE, name, write, rejection))


NESTINGS = {
    "state dict": lambda s: s,
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
        "state_dict": prefixed(s, "net."), "epoch": 1, "pytorch-lightning_version": "2.6", "callbacks": {},
        "optimizer_states": [], "hyper_parameters": {"width": 16}, "hparams_name": "kwargs",
    },
    "argparse.Namespace alongside": lambda s: {"model": s, "args": argparse.Namespace(lr=1, out=pathlib.Path("a"))},
    "types.SimpleNamespace alongside": lambda s: {"model": s, "args": types.SimpleNamespace(lr=1)},
    "pathlib.Path alongside": lambda s: {"model": s, "args": {"out": pathlib.Path("a/b")}},
    "NumPy scalars alongside": lambda s: {"model": s, "loss": np.float64(3), "step": np.int32(3)},
    "NumPy array alongside": lambda s: {"model": s, "losses": np.arange(5.0), "names": np.array(["a"])},
    "dataclass alongside": lambda s: {"model": s, "config": ScriptConfig()},
    "enum alongside": lambda s: {"model": s, "kind": Kind.SMALL},
    "defaultdict alongside": lambda s: {"model": s, "history": defaultdict(list, {"loss": [1.0]})},
    "set, date and complex alongside": lambda s: {
        "model": s, "x": {1, 2}, "when": datetime.datetime(2020, 1, 1), "z": 1j,
    },
    "TrainingArguments of transformers alongside": lambda s: {"model": s, "args": _training_arguments()},
    "state dict of an optimizer alongside": lambda s: {"model": s, "optimizer": optimizer_state()},
    "parameters instead of tensors": lambda s: {name: nn.Parameter(tensor) for name, tensor in s.items()},
    "tensors that require gradients": lambda s: {name: tensor.requires_grad_() for name, tensor in s.items()},
    "names with module., as DistributedDataParallel": lambda s: prefixed(s, "module."),
    "names with _orig_mod., as torch.compile": lambda s: prefixed(s, "_orig_mod."),
    "names with module._orig_mod.": lambda s: prefixed(s, "module._orig_mod."),
    "names with _fsdp_wrapped_module.": lambda s: {
        f"_fsdp_wrapped_module.{name}": t for name, t in s.items()
    },
}  # fmt: skip


def _training_arguments() -> Any:
    """Return arguments of the Trainer of transformers."""
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", use_cpu=True, report_to=[])


for name, change in NESTINGS.items():
    file_trial(name, change, suffix=".ckpt" if "Lightning" in name else ".pt")
for suffix in (".pth", ".bin", ".ckpt", ".pth.tar", ".tar"):
    file_trial(f"state dict, {suffix}", suffix=suffix)
file_trial("state dict, before torch 1.6", _use_new_zipfile_serialization=False)
safetensors_trial("safetensors")
safetensors_trial("safetensors, names with model.", lambda s: prefixed(s, "model."))
safetensors_trial("safetensors, names with module.", lambda s: prefixed(s, "module."))
safetensors_trial("safetensors, a tensor missing", lambda s: dict(list(s.items())[1:]), "does not fit")
safetensors_trial("safetensors, an additional tensor", lambda s: s | {"x": torch.ones(2)}, "does not fit")
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
file_trial("only an optimizer", lambda s: {"optimizer": optimizer_state()}, "no weights")
file_trial("state dict of an optimizer", lambda s: optimizer_state(), "no weights")
file_trial("only EMA parameters", lambda s: {"ema": s, "decay": 0.99}, "no weights")
file_trial("a module instead of its state dict", lambda s: zoo(), "no weights")
file_trial("a list of tensors", lambda s: list(s.values()), "no weights")
file_trial("one tensor", lambda s: torch.ones(3), "no weights")
file_trial("None", lambda s: None, "no weights")
file_trial("empty dict", lambda s: {}, "does not fit")
for payload in (CallsOpen, CallsShell, CallsClass):
    file_trial(
        f"code alongside the parameters, {payload.__name__}",
        lambda s, payload=payload: {"model": s, "args": payload()},
        "code",
    )
file_trial("code in place of a tensor", lambda s: s | {"head.weight": CallsOpen()}, "code")
file_trial(
    "code, before torch 1.6", lambda s: {"model": s, "args": CallsOpen()}, "code", _use_new_zipfile_serialization=False
)
file_trial(
    "code in the hyperparameters of Lightning",
    lambda s: {"state_dict": s, "hyper_parameters": {"x": CallsOpen()}}, "code", ".ckpt",
)  # fmt: skip


@trial(FILE, "code in a pickle without archive", "code")
def _(folder):
    (folder / "weights.pt").write_bytes(pickle.dumps({"model": CallsOpen()}))
    return Saved(folder / "weights.pt", module=zoo)


for damage, change in DAMAGES.items():
    for suffix in (".safetensors", ".pt"):

        def _write(folder, change=change, suffix=suffix):
            file = folder / f"weights{suffix}"
            (save_file if suffix == ".safetensors" else torch.save)(state_of(zoo()), file)
            file.write_bytes(change(file.read_bytes()))
            return Saved(file, module=zoo)

        trial(FILE, f"{suffix}, {damage}", "code" if (damage, suffix) == ("noise", ".pt") else "damaged")(_write)


@trial(FILE, "parameters alone, without module=", "no architecture")
def _(folder):
    save_file(state_of(zoo()), folder / "weights.safetensors")
    return Saved(folder / "weights.safetensors")


@trial(FILE, "folder of model.safetensors and a custom config.json, as PyTorchModelHubMixin")
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
            file.write_bytes(pickle.dumps(CallsOpen()))
        else:
            file.write_bytes(b"\x08\x07" * 100)
        return Saved(file, module=zoo)

    trial("other framework", suffix, "other framework")(_write)


@trial("zoo", "folder of save_checkpoint")
def _(folder):
    model = zoo()
    wb.save_checkpoint(model, folder)
    return Saved(folder, model)
