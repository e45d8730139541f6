"""Tensors of a .safetensors file are mapped one by one."""

import argparse
import datetime
import enum
import functools
import json
import operator
import os
import pathlib
import subprocess
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import workbench as wb
from tests.about import says
from tests.models.weight_models import assert_opens, rejection, small
from workbench.models.state_files import read_state, safetensors_state


def write(path, tensors, *, extra=b"", hole=0):
    """Write a file by its specification, whose last tensor may be a hole that takes no space on the disk."""
    header, end, data = {}, 0, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + 4 * tensor.numel()]}
        data, end = data + tensor.numpy().tobytes(), end + 4 * tensor.numel()
    if hole:
        header["hole"] = {"dtype": "F32", "shape": [hole // 4], "data_offsets": [end, end + hole]}
    text = json.dumps(header).encode() + extra
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(file.tell() + hole)


def test_a_file_larger_than_the_memory_is_read(tmp_path):
    path, rows = tmp_path / "large.safetensors", torch.arange(6.0).reshape(2, 3)
    write(path, {"rows": rows, "none": torch.empty(0, 3)}, hole=1 << 40)
    state = safetensors_state(path)
    assert torch.equal(state["rows"].read(), rows)
    assert state["none"].read().shape == (0, 3)
    assert state["hole"].n_bytes == 1 << 40


def test_values_of_all_formats_and_writing_changes_no_file(tmp_path):
    path = tmp_path / "a.safetensors"
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.complex64,
    )
    save_file({str(kind): torch.arange(7).reshape(7, 1).to(kind) for kind in kinds}, path, metadata={"format": "pt"})
    expected, found = load_file(path), safetensors_state(path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        value = tensor.read()
        assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape) == (expected[name].dtype, (7, 1))
        assert torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8))
        value.zero_()
    assert torch.equal(load_file(path)["torch.int64"], torch.arange(7).reshape(7, 1))


@dataclass(frozen=True)
class _Options:
    rate: float = 0.1
    inner: dict = field(default_factory=dict)


class _Kind(enum.Enum):
    SMALL = "small"


class _Noisy:
    """An object that would raise if it were created or filled."""

    def __new__(cls):
        return object.__new__(cls)

    def __setstate__(self, state):
        raise AssertionError


_Point = namedtuple("_Point", "x y")

OTHER = {
    "Namespace": argparse.Namespace(lr=1, out=pathlib.Path("a/b")),
    "SimpleNamespace": types.SimpleNamespace(lr=1),
    "path": pathlib.Path("a/b"),
    "pure path": pathlib.PureWindowsPath("a/b"),
    "numpy scalar": np.float64(3),
    "numpy array": {"a": np.arange(5.0), "b": np.array(["x"]), "c": np.array([[1]], dtype=np.int8)},
    "ordered": OrderedDict(a=1),
    "default": defaultdict(list, {"a": [1.0]}),
    "counter": Counter("aab"),
    "dataclass": _Options(inner={"path": pathlib.Path("x")}),
    "enum": _Kind.SMALL,
    "named tuple": _Point(1, 2),
    "dates": [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.timedelta(3), datetime.date(2020, 1, 1)],
    "id": uuid.UUID(int=3),
    "setstate": _Noisy(),
    "set": {1, 2},
    "key": {_Kind.SMALL: 1, pathlib.Path("a"): 2},
    "device": [torch.device("cpu"), torch.float32, torch.Size([2])],
}


@pytest.mark.parametrize("kind", OTHER)
def test_weights_open_with_another_object_in_the_file(kind, tmp_path):
    model = small()
    torch.save({"model": model.state_dict(), "other": OTHER[kind]}, tmp_path / "x.pt")
    assert_opens(tmp_path / "x.pt", model)


def test_the_class_is_never_imported(tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own_options.py").write_text("class Options:\n    pass\n")
    monkeypatch.syspath_prepend(folder)
    import own_options

    torch.save({"model": small().state_dict(), "options": own_options.Options()}, tmp_path / "x.pt")
    (folder / "own_options.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.delitem(sys.modules, "own_options")
    assert_opens(tmp_path / "x.pt", small())
    assert "own_options" not in sys.modules
    assert not (tmp_path / "imported").exists()


class _Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


CALLS = {
    "open": _Call(open, "exploded", "w"),
    "eval": _Call(eval, "open('exploded', 'w')"),
    "system": _Call(os.system, "touch exploded"),
    "Popen": _Call(subprocess.Popen, ["touch", "exploded"]),
    "getattr": _Call(getattr, pathlib.Path("exploded"), "touch"),
    "partial": _Call(functools.partial, open, "exploded", "w"),
    "method": _Call(operator.methodcaller, "touch"),
    "load": _Call(torch.load, "x.pt"),
    "path's method": _Call(pathlib.Path.touch, pathlib.Path("exploded")),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_calls_a_function_is_rejected(kind, is_zip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"model": small().state_dict(), "other": {"a": [CALLS[kind]]}}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    assert says("x.pt was not loaded, because it contains more than tensors,")(rejection(tmp_path / "x.pt", small(9)))
    assert not (tmp_path / "exploded").exists()


def test_objects_in_the_format_before_torch_1_6_are_rejected(tmp_path):
    state = {"model": small().state_dict(), "args": argparse.Namespace(lr=1)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert says("x.pt was not loaded, because it contains more than tensors,")(rejection(tmp_path / "x.pt", small(9)))


def test_allowed_classes_are_restored(tmp_path):
    before = torch.serialization.get_safe_globals()
    torch.save({"weight": torch.ones(2), "args": argparse.Namespace()}, tmp_path / "x.pt")
    with pytest.raises(wb.WorkbenchError, check=says("x.pt contains no state dict; save")):
        read_state(tmp_path / "x.pt")
    assert torch.serialization.get_safe_globals() == before
    with pytest.raises(Exception, match="Unsupported global: GLOBAL argparse.Namespace"):
        torch.load(tmp_path / "x.pt", weights_only=True)


def test_a_pickled_module_is_rejected_with_its_class(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    error = rejection(tmp_path / "x.pt", nn.Linear(2, 2))
    assert says("x.pt contains no state dict, but an object of the class")(error)


def test_a_program_of_torchscript_is_rejected(tmp_path):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "x.pt"))
    error = rejection(tmp_path / "x.pt", nn.Linear(2, 2))
    assert says("x.pt is a program of TorchScript, not a state dict; save the")(error)
