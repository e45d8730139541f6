"""GGUF files: tensors that are read one by one, compared with the full model as transformers reads it."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

import workbench as wb
from tests.about import says
from tests.models.weight_models import TOKENS, rejection
from workbench.models.lazy_state import lazy_state

pytestmark = pytest.mark.medium

N_TOKENS = 32


def write(path, architecture, shapes, kind=GGMLQuantizationType.Q8_0, n_blocks=2, change=dict, **options):
    """Write a small GGUF file with two blocks and quantized matrices.

    Args:
        path: Path of the file.
        architecture: Name of the architecture in llama.cpp.
        shapes: Shape of each tensor; names of tensors in blocks are without "blk.0.".
        kind: Type of the matrices.
        n_blocks: Number of blocks in the header.
        change: Function of the shapes of all tensors by their full names.
        options: Further options of the header.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(n_blocks)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_vocab_size(N_TOKENS)
    for key, value in options.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(65 + i) for i in range(N_TOKENS - 1)), "AB"])
    writer.add_token_types([1] * N_TOKENS)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)
    outside = ("token_embd", "position_embd", "output")
    named = {
        name: shape
        for short, shape in shapes.items()
        for name in ([short] if short.startswith(outside) else [f"blk.{i}.{short}" for i in range(2)])
    }
    for name, shape in change(named).items():
        values = generator.standard_normal(shape).astype(np.float32) / 4
        if len(shape) == 1:
            writer.add_tensor(name, values)
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OUTSIDE = {"token_embd.weight": (N_TOKENS, 64), "output_norm.weight": (64,)}
ATTENTION = {
    "attn_norm.weight": (64,), "ffn_norm.weight": (64,), "attn_q.weight": (64, 64), "attn_k.weight": (32, 64),
    "attn_v.weight": (32, 64), "attn_output.weight": (64, 64),
}  # fmt: skip
MLP = {"ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)}


def llama(path, **options):
    rotary = {"head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "rope_dimension_count": 16}
    return write(path, "llama", OUTSIDE | ATTENTION | MLP, **rotary, **options)


def qwen3moe(path):
    shapes = {name: shape for name, shape in ATTENTION.items() if "ffn" not in name} | {
        "ffn_norm.weight": (64,), "attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,),
        "ffn_gate_inp.weight": (4, 64), "ffn_gate_exps.weight": (4, 768, 64), "ffn_up_exps.weight": (4, 768, 64),
        "ffn_down_exps.weight": (4, 64, 768), "output.weight": (N_TOKENS, 64),
    }  # fmt: skip
    options = {"head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "key_length": 16}
    options |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 768}
    return write(path, "qwen3moe", OUTSIDE | shapes, **options)


def gpt2(path):
    shapes = {
        "position_embd.weight": (1024, 64), "output_norm.bias": (64,), "output.weight": (N_TOKENS, 64),
        "attn_norm.weight": (64,), "attn_norm.bias": (64,), "ffn_norm.weight": (64,), "ffn_norm.bias": (64,),
        "attn_qkv.weight": (192, 64), "attn_qkv.bias": (192,), "attn_output.weight": (64, 64),
        "attn_output.bias": (64,), "ffn_up.weight": (256, 64), "ffn_up.bias": (256,), "ffn_down.weight": (64, 256),
        "ffn_down.bias": (64,),
    }  # fmt: skip
    return write(path, "gpt2", OUTSIDE | shapes, layer_norm_eps=1e-5)


def gemma2(path):
    shapes = ATTENTION | MLP | {"post_attention_norm.weight": (64,), "post_ffw_norm.weight": (64,)}
    options = {"head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "key_length": 16, "value_length": 16}
    return write(path, "gemma2", OUTSIDE | shapes, **options)


def lfm2(path):
    shapes = ATTENTION | MLP | {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
    outside = {"token_embd.weight": (N_TOKENS, 64), "token_embd_norm.weight": (64,)}
    options = {"layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "shortconv_l_cache": 3, "head_count_kv": [2, 2]}
    return write(path, "lfm2", outside | shapes, **options)


MAKERS = {"llama": llama, "qwen3moe": qwen3moe, "gpt2": gpt2, "gemma2": gemma2}


def reference(path, **options):
    """Open the model by transformers alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_a_file_opens_as_transformers_opens_it(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    path = MAKERS[name](tmp_path / "model.gguf")
    subject = wb.open_checkpoint(path, dtype=dtype)
    oracle = reference(path) if dtype == "auto" else reference(path, dtype=dtype)
    assert type(subject.model) is type(oracle)
    assert subject.unloaded == ""
    assert subject.model.dtype == (torch.float32 if dtype == "auto" else dtype)
    own, expected = subject.model.state_dict(), oracle.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in expected.items())
    assert torch.equal(subject.model(TOKENS).logits, oracle(TOKENS).logits)
    assert subject.model.generation_config == oracle.generation_config
    left_out = {"architectures", "quantization_config", "_name_or_path"}
    one, other = (model.config.to_dict() for model in (subject.model, oracle))
    assert {k: v for k, v in one.items() if k not in left_out} == {k: v for k, v in other.items() if k not in left_out}
    assert not (tmp_path / "cache").exists()
    subject.model.save_pretrained(tmp_path / "saved")
    assert torch.equal(wb.open_checkpoint(tmp_path / "saved").model(TOKENS).logits, oracle(TOKENS).logits)


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_read_one_by_one(name, tmp_path):
    path = MAKERS[name](tmp_path / "model.gguf")
    expected = reference(path).state_dict()
    state = lazy_state(path)
    assert state.keys() == expected.keys() - ({"lm_head.weight"} if name in ("llama", "gemma2") else set())
    for key, tensor in state.items():
        assert torch.equal(tensor.read(), expected[key])
        assert (tensor.shape, tensor.dtype) == (tuple(expected[key].shape), torch.float32)
    assert sum(tensor.n_bytes for tensor in state.values()) < path.stat().st_size


def test_the_tokenizer_is_read_from_the_file(tmp_path):
    from transformers import AutoTokenizer

    path = llama(tmp_path / "model.gguf")
    subject = wb.open_checkpoint(path)
    assert subject.name == "model"
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert subject.tokenize(["ABCA"])["input_ids"].tolist() == [oracle("ABCA")["input_ids"]] == [[0, 1, 2, 0]]
    path.write_bytes(b"GGUF")
    with pytest.raises(wb.WorkbenchError, check=says("transformers cannot open model.gguf: error: unpack_from")):
        wb.Subject(subject.model, "x", "x", path).tokenizer  # noqa: B018


def test_a_shape_that_cannot_be_divided_into_heads_is_rejected(tmp_path):
    path = write(
        tmp_path / "model.gguf", "llama", OUTSIDE | ATTENTION | MLP | {"attn_q.weight": (63, 64)},
        head_count_kv=2, layer_norm_rms_eps=1e-5,
    )  # fmt: skip
    assert says("of model.gguf does not fit the header;")(rejection(path))


def test_architectures_that_transformers_reads_at_once_open_as_models(tmp_path):
    path = lfm2(tmp_path / "model.gguf")
    model = wb.open_checkpoint(path).model
    assert torch.equal(model(TOKENS).logits, reference(path)(TOKENS).logits)
    with pytest.raises(wb.WorkbenchError, check=says("whose tensors transformers reads all at once; open it as a")):
        lazy_state(path)
