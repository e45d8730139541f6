"""Tensors of a .safetensors file are mapped one by one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.models.state_files import safetensors_state


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


@pytest.mark.parametrize("n_spaces", range(5))
def test_headers_of_any_length(tmp_path, n_spaces):
    path, rows = tmp_path / "odd.safetensors", torch.randn(3, 1100)
    write(path, {"a": rows, "b": rows + 1}, extra=b" " * n_spaces)
    state = safetensors_state(path)
    assert torch.equal(state["a"].read(), rows)
    assert torch.equal(state["b"].read(), rows + 1)


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
