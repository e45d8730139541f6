"""Folders of weights: of DeepSpeed, of diffusers, and with weights under other names than transformers writes."""

import json
import sys
import types
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import workbench as wb
from tests.about import about, says
from tests.models.model_families import BY_NAME, build
from tests.models.weight_models import assert_opens, rejection, small
from workbench.models.weight_folders import folder_weights


def deepspeed(folder, model, name="mp_rank_00_model_states.pt"):
    """Write the files of DeepSpeed's save_checkpoint, without the states of the optimizer."""
    (folder / "global_step5").mkdir(parents=True)
    state = OrderedDict((f"module.{k}", v) for k, v in model.state_dict().items())
    torch.save({"module": state, "param_shapes": [], "ds_version": "0.16"}, folder / "global_step5" / name)
    (folder / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"never read")
    (folder / "latest").write_text("global_step5\n")
    (folder / "zero_to_fp32.py").write_text("raise RuntimeError")


def test_deepspeed_folders_open(tmp_path):
    model = small()
    deepspeed(tmp_path, model)
    assert_opens(tmp_path, model)
    assert_opens(tmp_path / "global_step5", model)
    assert_opens(tmp_path / "global_step5" / "mp_rank_00_model_states.pt", model)
    for text in ("global_step7", "", "../elsewhere", ".", "\0"):
        (tmp_path / "latest").write_text(text)
        assert about(str(tmp_path / "latest"), text)(rejection(tmp_path, small(9)))
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert about("latest", tmp_path / "latest")(rejection(tmp_path, small(9)))


def test_weights_partitioned_among_ranks_of_model_parallelism_are_rejected(tmp_path):
    deepspeed(tmp_path / "three", small(), "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (tmp_path / "three" / "global_step5" / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    assert says("and pass the result.")(rejection(tmp_path / "three", small(9)))


def diffusers_folder(folder, model, **config):
    folder.mkdir()
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    content = {"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.33", **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_class_of_diffusers_is_built_where_it_is_installed(tmp_path, monkeypatch):
    class DiTTransformer2DModel(nn.Linear):
        @classmethod
        def from_config(cls, config):
            return cls(config["n_in"], config["n_out"])

    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    sys.modules["diffusers"].DiTTransformer2DModel = DiTTransformer2DModel
    sys.modules["diffusers"].Broken = 3
    model = nn.Linear(3, 2)
    folder = diffusers_folder(tmp_path / "dit", model, n_in=3, n_out=2)
    subject = wb.open_checkpoint(folder)
    assert type(subject.model) is DiTTransformer2DModel
    assert torch.equal(subject.model.weight, model.weight)
    assert not subject.model.training
    assert wb.open_checkpoint(folder, dtype="bfloat16").model.weight.dtype == torch.bfloat16
    (folder / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "n_in": 3, "n_out": 5}')
    error = rejection(folder)
    assert says("has 2 tensors of another shape")(error)
    (folder / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    assert about("config.json", "KeyError: 'n_in'")(rejection(folder))
    for name in ("Nope", "Broken"):
        (folder / "config.json").write_text(json.dumps({"_class_name": name}))
        assert about("_class_name", name)(rejection(folder))


def test_a_config_that_names_no_model_goes_with_a_module(tmp_path):
    model = small()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"width": 16}')
    assert_opens(tmp_path, model)
    for known in ("model_type", "architectures", "auto_map", "workbench_architecture"):
        (tmp_path / "config.json").write_text(json.dumps({known: "x"}))
        assert says("module= is used only with a file of weights, which")(rejection(tmp_path, small(9)))


def test_a_file_of_weights_in_a_folder_is_named(tmp_path):
    torch.save(small().state_dict(), tmp_path / "last.ckpt")
    error = rejection(tmp_path, small(9))
    assert says("has no config.json and is not a checkpoint folder; pass the")(error)
    assert str(error).endswith(f"pass the file {tmp_path}/last.ckpt.")


pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def only_config(folder):
    """Write the config.json of a model of transformers into a folder, and return the model."""
    model = build(BY_NAME["llama"])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return model


def divided(folder, state, n_ranks=2):
    """Write the files of ``save_distributed=True`` on several ranks: each has some rows of every tensor."""
    for rank in range(n_ranks):
        parts, offsets = {}, {}
        for name, tensor in state.items():
            first, last = (len(tensor) * k // n_ranks for k in (rank, rank + 1))
            parts[name], offsets[name] = (
                tensor[first:last].clone(),
                {"saved_offsets": [first] + [0] * (tensor.ndim - 1)},
            )
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(parts, folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", metadata=about)


def as_state(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_files_of_ranks_are_not_read_if_there_is_a_complete_file(tmp_path):
    model = only_config(tmp_path)
    model.save_pretrained(tmp_path)
    divided(tmp_path, {name: tensor + 1 for name, tensor in as_state(model).items()})
    opened = wb.open_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in as_state(model).items())


def test_several_files_under_other_names_are_rejected(tmp_path):
    model = only_config(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(as_state(model), tmp_path / name)
    assert says("contains several files that may be its weights")(rejection(tmp_path))
    for name in ("one", "two"):
        dcp.save({"model": model}, checkpoint_id=tmp_path / name, no_dist=True)
    assert says("has several distributed checkpoints (one, two); pass")(rejection(tmp_path))


def test_a_folder_without_weights_has_none(tmp_path):
    only_config(tmp_path)
    torch.save({}, tmp_path / "training_args.bin")
    assert folder_weights(tmp_path) is None
    assert "no file named model.safetensors" in str(rejection(tmp_path))  # the sentence of transformers


def test_only_the_usual_files_of_a_partial_download_are_read(tmp_path):
    model = only_config(tmp_path)
    save_file(as_state(model), tmp_path / "weights.safetensors")
    assert folder_weights(tmp_path, is_fetched=False) is None
    model.save_pretrained(tmp_path)
    assert folder_weights(tmp_path, is_fetched=False).is_usual


def test_sizes_of_weights_are_known_without_reading_them(tmp_path):
    model = only_config(tmp_path)
    torch.save({"model": {**as_state(model), "n": torch.tensor([1, 2])}}, tmp_path / "pytorch_model.bin")
    weights = folder_weights(tmp_path)
    n_elements = sum(tensor.numel() for tensor in model.state_dict().values()) + 2
    assert weights.n_bytes == 4 * n_elements + 8
    assert not weights.is_usual
    assert weights.read().keys() == {*model.state_dict(), "n"}
