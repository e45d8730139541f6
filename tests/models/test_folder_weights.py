"""Folders of transformers with weights in other files than transformers writes, opened in memory and streamed."""

import argparse
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import workbench as wb
from tests.about import about, says
from tests.models.model_families import BY_NAME, build
from tests.models.test_streaming import assert_same, measured
from tests.models.test_weight_folders import deepspeed
from tests.models.test_zero_partitions import write as write_zero_3
from tests.models.weight_models import rejection
from workbench.models.weight_folders import folder_weights

pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def only_config(folder, family="llama"):
    """Write the config.json of a model of transformers into a folder, and return the model."""
    model = build(BY_NAME[family])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return model


def assert_opens_both_ways(folder, model):
    resident, streamed = (wb.open_checkpoint(folder, streaming=streaming) for streaming in (False, True))
    assert resident.unloaded == streamed.unloaded == ""
    assert type(resident.model) is type(model)
    state = resident.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(state[name].dtype == tensor.dtype for name, tensor in model.state_dict().items())
    assert streamed.streamed is not None
    assert_same(measured(resident), measured(streamed))


def save_dcp(state, folder, **options):
    dcp.save(state, checkpoint_id=None if options else folder, no_dist=True, **options)


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


def hf_writer(folder, model, **options):
    save_dcp(model.state_dict(), folder, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), **options))


WAYS = {
    "DCP": lambda folder, model: save_dcp({"model": model}, folder),
    "DCP of a state dict": lambda folder, model: save_dcp(model.state_dict(), folder),
    "DCP in a folder of accelerate": lambda folder, model: (
        save_dcp({"model": model}, folder / "pytorch_model_fsdp_0"),
        save_dcp({"optimizer": {"x": torch.ones(2)}}, folder / "optimizer_0"),
    ),
    "DeepSpeed": deepspeed,
    "DeepSpeed, ZeRO-3": write_zero_3,
    "writer for Hugging Face": hf_writer,
    "its files of one rank": lambda folder, model: hf_writer(folder, model, save_distributed=True),
    "its files, consolidated": lambda folder, model: hf_writer(
        folder, model, save_distributed=True, enable_consolidation=True
    ),
    "its files of three ranks": lambda folder, model: divided(folder, as_state(model), 3),
    "another name": lambda folder, model: save_file(as_state(model), folder / "weights.safetensors"),
    "a variant": lambda folder, model: model.save_pretrained(folder, variant="fp16"),
    "a variant in shards": lambda folder, model: model.save_pretrained(folder, variant="ema", max_shard_size="20KB"),
    "FSDP": lambda folder, model: torch.save(as_state(model), folder / "pytorch_model_fsdp.bin"),
    "nested": lambda folder, model: torch.save({"model": as_state(model)}, folder / "pytorch_model.bin"),
    "with a Namespace": lambda folder, model: torch.save(
        {"state_dict": as_state(model), "args": argparse.Namespace(lr=1)}, folder / "pytorch_model.bin"
    ),
    "with training state": lambda folder, model: (
        torch.save(as_state(model), folder / "weights.pt"),
        *(torch.save({}, folder / name) for name in ("optimizer.pt", "scheduler.pt", "training_args.bin")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_with_a_config_opens(way, tmp_path):
    model = only_config(tmp_path)
    WAYS[way](tmp_path, model)
    assert_opens_both_ways(tmp_path, model)


def test_experts_of_a_distributed_checkpoint_are_put_together(tmp_path):
    model = only_config(tmp_path, "mixtral")
    save_dcp({"model": model}, tmp_path)
    assert_opens_both_ways(tmp_path, model)
    for file in (*tmp_path.glob("*.distcp"), tmp_path / ".metadata"):
        file.unlink()
    model.save_pretrained(tmp_path)
    divided(tmp_path, load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    assert_opens_both_ways(tmp_path, model)


def test_incomplete_parts_are_rejected(tmp_path):
    model = only_config(tmp_path)
    divided(tmp_path, as_state(model))
    first, last = sorted(tmp_path.glob("shard-*"))
    shutil.copy(last, tmp_path / "kept")
    last.unlink()
    for streaming in (False, True):
        assert says("...); download the checkpoint again or correct config.json.")(
            rejection(tmp_path, streaming=streaming)
        )
    first.unlink()
    (tmp_path / "kept").rename(last)
    for streaming in (False, True):
        assert says("download")(rejection(tmp_path, streaming=streaming))
    last.rename(tmp_path / "model.safetensors")
    assert about("model.safetensors", None, "a file of complete tensors")(rejection(tmp_path))


def test_files_of_ranks_are_not_read_if_there_is_a_complete_file(tmp_path):
    model = only_config(tmp_path)
    model.save_pretrained(tmp_path)
    divided(tmp_path, {name: tensor + 1 for name, tensor in as_state(model).items()})
    assert_opens_both_ways(tmp_path, model)


def test_several_files_under_other_names_are_rejected(tmp_path):
    model = only_config(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(as_state(model), tmp_path / name)
    assert says("contains several files that may be its weights")(rejection(tmp_path))
    for name in ("one", "two"):
        save_dcp({"model": model}, tmp_path / name)
    assert says("contains several distributed checkpoints (one, two); pass")(rejection(tmp_path))


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
