"""Checkpoints that would run code, never end, or raise errors of other packages."""

import io
import json
import os
import shutil
import struct
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.models.weight_models import rejection
from workbench.errors import CheckpointError, OptionError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **sizes)).save_pretrained(folder / "llama")
    wb.save_checkpoint(wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2), folder / "zoo")
    return folder


@pytest.fixture
def edited(folders, tmp_path):
    def edit(kind, **options):
        shutil.copytree(folders / kind, tmp_path / kind)
        file = tmp_path / kind / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | options))
        return tmp_path / kind

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
def test_trust_is_true_or_false(folders, value):
    with pytest.raises(OptionError, check=about("trust_remote_code", value)):
        wb.open_checkpoint(folders / "llama", trust_remote_code=value)


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


def gguf(path, n_blocks):
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(n_blocks)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("place", [8, 16])
def test_a_gguf_file_has_what_its_header_counts(tmp_path, place):
    path = tmp_path / "a.gguf"
    content = gguf(path, 1)
    content[place : place + 8] = struct.pack("<Q", 1 << 50)
    path.write_bytes(content)
    assert says("a.gguf is truncated or not a GGUF file; download it again.")(rejection(path))


def test_a_list_in_a_gguf_file_is_as_long_as_its_header_states(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<IIQQQ", 0x46554747, 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 50))
    assert says("a.gguf is truncated or not a GGUF file; download it again.")(rejection(path))


def test_a_gguf_file_has_a_tensor_for_each_block(tmp_path):
    gguf(tmp_path / "a.gguf", 100_000)
    assert about("block_count", 100_000)(rejection(tmp_path / "a.gguf"))
