"""Tensors of a .safetensors file are mapped one by one."""

import argparse
import functools
import json
import operator
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

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
