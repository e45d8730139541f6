"""Folders of DeepSpeed, of diffusers and of the Trainer of transformers."""

import json
import sys
import types
from collections import OrderedDict

import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.weight_models import TOKENS, assert_opens, rejection, small


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
    deepspeed(tmp_path / "two", small())
    (tmp_path / "two" / "global_step5" / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert says("ranks of model parallelism; export them as one model and")(rejection(tmp_path / "two", small(9)))
    deepspeed(tmp_path / "three", small(), "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (tmp_path / "three" / "global_step5" / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    assert says("next to it and pass the file that it writes.")(rejection(tmp_path / "three", small(9)))


def diffusers_folder(folder, model, **config):
    folder.mkdir()
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    content = {"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.33", **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_diffusers_folders_open_with_their_module(tmp_path):
    model = small()
    folder = diffusers_folder(tmp_path / "dit", model)
    assert_opens(folder, model)
    assert says("of diffusers, which is not installed; install diffusers, or")(rejection(folder))
    (folder / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "model_type": "llama"}')
    assert says("module= is used only with a file of weights, which")(rejection(folder, small(9)))


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


def test_a_pipeline_is_rejected(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    folder = diffusers_folder(tmp_path / "unet", small())
    assert str(rejection(tmp_path)).endswith(f"pass the folder of one of its models, such as {folder}.")


def test_a_trainers_folder_with_one_checkpoint_opens(tmp_path):
    model = small()
    wb.save_checkpoint(model, tmp_path / "checkpoint-10")
    (tmp_path / "runs").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    subject = wb.open_checkpoint(tmp_path)
    assert (subject.name, subject.folder) == ("checkpoint-10", tmp_path / "checkpoint-10")
    assert torch.equal(subject.model(TOKENS), model(TOKENS))
    for step in (9, 100):
        wb.save_checkpoint(small(step), tmp_path / f"checkpoint-{step}")
    assert says("checkpoints; pass one, such as")(rejection(tmp_path))
    wb.save_checkpoint(small(3), tmp_path / "other")
    for file in (tmp_path / "other").iterdir():
        file.rename(tmp_path / file.name)
    assert torch.equal(wb.open_checkpoint(tmp_path).model(TOKENS), small(3)(TOKENS))


def test_a_config_that_names_no_model_goes_with_a_module(tmp_path):
    model = small()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"width": 16}')
    assert_opens(tmp_path, model)
    for known in ("model_type", "architectures", "auto_map", "workbench_architecture"):
        (tmp_path / "config.json").write_text(json.dumps({known: "x"}))
        assert says("module= is used only with a file of weights, which")(rejection(tmp_path, small(9)))


def test_a_variant_of_diffusers_opens_with_its_module(tmp_path):
    model = small()
    folder = diffusers_folder(tmp_path / "dit", model)
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.fp16.safetensors")
    assert_opens(folder, model)


def test_a_file_of_weights_in_a_folder_is_named(tmp_path):
    torch.save(small().state_dict(), tmp_path / "last.ckpt")
    error = rejection(tmp_path, small(9))
    assert says("has no config.json and is not a checkpoint folder; pass the")(error)
    assert str(error).endswith(f"pass the file {tmp_path}/last.ckpt.")
