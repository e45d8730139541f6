"""Files and folders of weights as training code saves them, opened with a module and read tensor by tensor."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.weight_models import assert_opens, rejection, small
from workbench.errors import CheckpointError
from workbench.models.lazy_state import LazyTensor, lazy_state

#: How training code nests the weights, and the other objects that it saves.
NESTINGS = {
    "flat": lambda state: state,
    "nanoGPT": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "model_args": {"n_layer": 2},
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.0),
        "config": {"device": "cpu"},
    },
    "model_state_dict": lambda state: {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {}},
    "state_dict": lambda state: {"state_dict": state, "arch": "resnet"},
    "DeepSpeed": lambda state: {
        "module": OrderedDict(state),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in state.items())],
        "ds_config": {"zero_optimization": {"stage": 2}},
    },
    "twice": lambda state: {"model": {"state_dict": state, "step": 3}},
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nesting=st.sampled_from(sorted(NESTINGS)),
    prefix=st.lists(st.sampled_from(["module.", "_orig_mod.", "model.", "net."]), max_size=3).map("".join),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    is_zip=st.booleans(),
)
def test_weights_are_read_with_every_nesting_prefix_and_dtype(nesting, prefix, dtype, is_zip, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    state = {f"{prefix}{name}": tensor.to(dtype) for name, tensor in model.state_dict().items()}
    path = tmp_path / "weights.pt"
    torch.save(NESTINGS[nesting](state), path, _use_new_zipfile_serialization=is_zip)
    lazy = lazy_state(path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in lazy.items()} == {
        name: (tuple(tensor.shape), dtype) for name, tensor in state.items()
    }
    assert all(torch.equal(lazy[name].read(), tensor) for name, tensor in state.items())
    target = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    assert wb.open_checkpoint(path, module=target).unloaded == ""
    assert all(torch.equal(target.state_dict()[name], state[prefix + name].float()) for name in target.state_dict())


@pytest.mark.parametrize("prefix", ["model.", "net.", "a.b.", "model._orig_mod.", "module.model.", "model.module."])
def test_a_prefix_of_all_names_is_removed(prefix, tmp_path):
    model = small()
    save_file({prefix + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / "x.safetensors")
    assert_opens(tmp_path / "x.safetensors", model)


def test_a_prefix_is_never_guessed(tmp_path):
    path = tmp_path / "x.pt"
    student = {f"student.{name}": tensor for name, tensor in small().state_dict().items()}
    teacher = {f"teacher.{name}": tensor for name, tensor in small(1).state_dict().items()}
    torch.save(student | teacher, path)
    for strict in (True, False):  # either would fit
        assert says("unexpected tensors (student.blocks.")(rejection(path, small(9), strict=strict))
    torch.save(student | {"loss.weight": torch.ones(2)}, path)
    assert about("x.pt", "has 1 unexpected tensor (loss.weight)")(rejection(path, small(9)))
    assert wb.open_checkpoint(path, module=small(9), strict=False).unloaded == "1 tensor (loss.weight) ignored"
    torch.save(student | {"head.weight": small(1).state_dict()["head.weight"]}, path)
    assert says("lacks ")(rejection(path, small(9)))  # either head would fit
    del student["student.head.weight"]
    torch.save(student, path)
    assert says("lacks ")(rejection(path, small(9)))


def test_empty_extra_state_is_ignored(tmp_path):
    model = small()
    extra = {"a._extra_state": None, "b._extra_state": torch.empty(0)}
    torch.save({"model": {**model.state_dict(), **extra}}, tmp_path / "x.pt")
    assert_opens(tmp_path / "x.pt", model)
    torch.save({"model": {**model.state_dict(), "a._extra_state": {"scale": 3}}}, tmp_path / "x.pt")
    assert says("x.pt contains no state dict; save")(rejection(tmp_path / "x.pt", small(9)))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_zipped_pickles_stay_on_disk(tmp_path):
    torch.save({"model": {"weight": torch.zeros(1000)}}, tmp_path / "x.pt")
    tensor = lazy_state(tmp_path / "x.pt")["weight"].read()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("x.pt")]
    ends = [[int(end, 16) for end in parts[0].split("-")] for parts in maps]
    assert any(low <= tensor.data_ptr() < high for low, high in ends)


def test_a_module_is_unchanged_if_a_tensor_cannot_be_read():
    from workbench.models.state_files import load_state

    def broken():
        raise CheckpointError("x is damaged.", name="x")

    target = nn.Linear(2, 2)
    before = target.weight.clone()
    state = {"weight": LazyTensor.of(torch.ones(2, 2)), "bias": LazyTensor((2,), torch.float32, broken, 8)}
    with pytest.raises(CheckpointError, check=about("x")):
        load_state(target, state, "x", remedy="", left="")
    assert torch.equal(target.weight, before)


def test_large_tensors_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.models.state_files._AT_ONCE", 1000)
    model = small()
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    assert_opens(tmp_path / "x.safetensors", model)


def shards(folder, model, stem="model", suffix=".safetensors", n=3):
    """Write the state of a model into several files without an index."""
    items = list(model.state_dict().items())
    for i in range(n):
        path = folder / f"{stem}-{i + 1:05}-of-{n:05}{suffix}"
        (save_file if suffix == ".safetensors" else torch.save)(dict(items[i::n]), path)


def with_index(folder, suffix):
    held = {name: file.name for file in folder.glob(f"*{suffix}") for name in lazy_state(file)}
    stem = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


@pytest.mark.parametrize("stem", ["model", "pytorch_model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("has_index", [False, True])
def test_shards_open(stem, suffix, has_index, tmp_path):
    model = small()
    shards(tmp_path, model, stem, suffix)
    if has_index:
        with_index(tmp_path, suffix)
    assert_opens(tmp_path, model)
    assert about("module")(rejection(tmp_path))


def test_incomplete_or_repeated_shards_are_rejected(tmp_path):
    shards(tmp_path, small())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert says("download that file too.")(rejection(tmp_path, small(9)))
    shards(tmp_path, small())
    shards(tmp_path, small(), suffix=".bin")
    error = rejection(tmp_path, small(9))
    assert says("contains several sets of shards")(error)
    for file in tmp_path.glob("*.bin"):
        file.unlink()
    repeated = {name: torch.ones(2) for name in lazy_state(tmp_path / "model-00001-of-00003.safetensors")}
    save_file(repeated, tmp_path / "model-00002-of-00003.safetensors")
    assert says("in several files; keep only one of them.")(rejection(tmp_path, small(9)))
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"")
    assert says("is truncated or not a safetensors file; download it again.")(rejection(tmp_path, small(9)))
