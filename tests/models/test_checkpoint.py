"""Checkpoints that would run code, never end, or raise errors of other packages."""

import errno
import io
import json
import os
import socket
import struct
import sys

import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.test_gguf_file import llama
from tests.models.weight_models import change_config, rejection
from tests.zoo.zoo_models import MAKERS, inputs_for, perturbed
from workbench.errors import CheckpointError, OptionError


@pytest.fixture
def tiny():
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=8)


TOKENS = torch.arange(6)[None]


def test_zoo_checkpoints_are_reopened_bit_for_bit(tiny, tmp_path):
    folder = wb.save_checkpoint(tiny, tmp_path / "tiny")
    subject = wb.open_checkpoint(folder)
    assert subject.name == "tiny"
    assert not subject.model.training
    assert torch.equal(subject.model(TOKENS), tiny.eval()(TOKENS))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, check=says("holds a checkpoint already; pass overwrite=True to replace")):
        wb.save_checkpoint(tiny, folder)
    wb.save_checkpoint(tiny, folder, overwrite=True)
    with pytest.raises(CheckpointError, check=says("Linear is not a model of the zoo; use its own")):
        wb.save_checkpoint(nn.Linear(2, 2), tmp_path / "b")


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_the_zoo_is_reopened_bit_for_bit(name, tmp_path):
    model = perturbed(MAKERS[name](3)).eval()
    opened = wb.open_checkpoint(wb.save_checkpoint(model, tmp_path / "saved")).model
    assert type(opened) is type(model)
    assert opened.config == model.config
    assert torch.equal(opened(inputs_for(model)), model(inputs_for(model)))


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "mamba tied"])
def test_tied_weights_are_saved_once_and_remain_tied(name, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_model

    model = perturbed(MAKERS[name](3))
    folder = wb.save_checkpoint(model, tmp_path / "saved")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == sum(1 for _ in model.parameters()) < len(model.state_dict())
    opened = wb.open_checkpoint(folder).model
    with torch.no_grad():
        next(p for key, p in opened.named_parameters() if "embedding" in key).zero_()
    assert not opened(inputs_for(model)).any()  # the head is tied to it
    load_model(opened, folder / "model.safetensors")  # the loader of safetensors reads the file too
    assert torch.equal(opened(inputs_for(model)), model.eval()(inputs_for(model)))


def test_zoo_checkpoints_keep_their_dtype_or_receive_the_requested_one(tiny, tmp_path):
    folder = wb.save_checkpoint(tiny.double(), tmp_path / "double")
    opened = wb.open_checkpoint(folder).model
    assert torch.equal(opened(TOKENS), tiny.eval()(TOKENS))
    for dtype in (torch.bfloat16, "bfloat16"):
        assert wb.open_checkpoint(folder, dtype=dtype).model.head.weight.dtype == torch.bfloat16


def test_a_zoo_checkpoint_without_its_weights_is_rejected(tiny, tmp_path):
    folder = wb.save_checkpoint(tiny, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, check=about("model.safetensors")):
        wb.open_checkpoint(folder)


def test_any_module_is_a_subject(tiny):
    tiny.train()
    subject = wb.open_checkpoint(tiny)
    assert subject.model is tiny
    assert tiny.training
    assert subject.name == "Transformer"
    with pytest.raises(CheckpointError, check=says("Transformer has no tokenizer; pass token ids instead of")):
        subject.tokenize("text")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_without_permission_is_rejected(tiny, tmp_path, monkeypatch, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"PK")
    before = type(path).open

    def forbidden(self, *args, **options):
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return before(self, *args, **options)

    monkeypatch.setattr(type(path), "open", forbidden)
    with pytest.raises(CheckpointError, match="may not read", check=about(path.name, path)):
        wb.open_checkpoint(path, module=tiny)


def test_a_hub_name_without_network_is_rejected(monkeypatch):
    def no_network(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckpointError, check=says("is not a local folder, and the Hugging Face hub cannot be")):
        wb.open_checkpoint("nobody/no-such-model")


def test_broken_configs_are_rejected(tmp_path):
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(CheckpointError, check=about("config.json", expected="a configuration of a model")):
        wb.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"workbench_architecture": "transformer", "n_heads": 5}')
    with pytest.raises(CheckpointError, check=says("does not describe a transformer: n_heads must be a divisor")):
        wb.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"workbench_architecture": "perceiver"}')
    with pytest.raises(CheckpointError, check=says("which this version does not know; update the workbench.")):
        wb.open_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(tiny, tmp_path, monkeypatch):
    import safetensors.torch

    folder = wb.save_checkpoint(tiny, tmp_path / "tiny")
    before = (folder / "model.safetensors").read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CheckpointError, check=says("No space left on device); check path and free disk")):
        wb.save_checkpoint(tiny, folder, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.fixture
def edited(copy_of, tmp_path):
    def edit(kind, **options):
        if kind == "zoo":
            folder = wb.save_checkpoint(wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2), tmp_path / "zoo")
        else:
            _, folder = copy_of(kind)
        change_config(folder, **options)
        return folder

    return edit


@pytest.mark.parametrize("answer", ["y", "n"])
def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(edited, monkeypatch, answer):
    folder = edited("llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass T: pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n" * 9))
    with pytest.raises(CheckpointError, check=about("trust_remote_code", False)):
        wb.open_checkpoint(folder).tokenize("a")
    assert not (folder / "ran").exists()
    assert sys.stdin.read() == f"{answer}\n" * 9


@pytest.mark.parametrize("value", ["False", "no", 0, 1, None])
def test_trust_is_true_or_false(edited, value):
    with pytest.raises(OptionError, check=about("trust_remote_code", value)):
        wb.open_checkpoint(edited("llama"), trust_remote_code=value)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_configuration_names_are_not_used(edited, name):
    model = wb.open_checkpoint(edited("llama", **{name: "someone/kernel"})).model
    assert model.config._attn_implementation == "sdpa"
    assert "someone" not in str(model.config._experts_implementation)


@pytest.mark.parametrize(("kind", "name"), [("llama", "num_hidden_layers"), ("zoo", "n_layers")])
def test_layers_without_end_are_not_built(edited, kind, name):
    folder = edited(kind, **{name: 10**8})
    for opened in (wb.open_checkpoint, wb.design):
        with pytest.raises(CheckpointError, check=about(name, 10**8)):
            opened(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_pipe_in_a_folder_is_not_waited_for(edited, name):
    folder = edited("llama")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert about(name, folder / name)(rejection(folder))


@pytest.mark.parametrize(
    "text", ["null", "[]", "1", '"x"', "", "\0", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "\ud800"]
)
def test_a_configuration_that_is_none_is_rejected(edited, text):
    folder = edited("llama")
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    assert about("config.json", folder / "config.json")(rejection(folder))


def test_a_pickle_that_contains_itself_ends(tmp_path):
    state = {}
    state["state_dict"] = state
    torch.save(state, tmp_path / "a.pt")
    assert says("a.pt contains no state dict; save")(rejection(tmp_path / "a.pt", torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("place", [8, 16])
def test_a_gguf_file_has_what_its_header_counts(tmp_path, place):
    path = tmp_path / "a.gguf"
    content = bytearray(llama(path).read_bytes())
    content[place : place + 8] = struct.pack("<Q", 1 << 50)
    path.write_bytes(content)
    assert says("a.gguf is truncated or not a GGUF file; download it again.")(rejection(path))


def test_a_list_in_a_gguf_file_is_as_long_as_its_header_states(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<IIQQQ", 0x46554747, 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 50))
    assert says("a.gguf is truncated or not a GGUF file; download it again.")(rejection(path))


def test_a_gguf_file_has_a_tensor_for_each_block(tmp_path):
    llama(tmp_path / "a.gguf", n_blocks=100_000)
    assert about("block_count", 100_000)(rejection(tmp_path / "a.gguf"))
