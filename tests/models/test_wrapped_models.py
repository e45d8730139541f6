"""Models as people run them: compiled block by block, with flex_attention, offloaded; read as they would be plain."""

import copy

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb

pytestmark = pytest.mark.filterwarnings("ignore::workbench.koopman.spectra.RankWarning")
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **SIZES, **options)).eval()


@pytest.fixture(scope="module")
def plain():
    return make()


def eigenvalues(model):
    return wb.profile(model, TOKENS, progress=False)["eigenvalue"].values


def compiled_by_replacement(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def compiled_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("compiled", [compiled_by_replacement, compiled_in_place])
def test_blocks_compiled_one_by_one(plain, compiled):
    model = compiled(copy.deepcopy(plain))
    with torch.no_grad():
        before = model(TOKENS).logits
        np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
        expected = wb.query_key_weights(plain, TOKENS)
        for found, same in zip(wb.query_key_weights(model, TOKENS), expected, strict=True):
            assert torch.equal(found.query, same.query)
        assert torch.equal(model(TOKENS).logits, before)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(32), torch.compile(nn.Sequential(nn.Linear(32, 32)), backend="eager")

    def forward(self, x):
        return x + self.map(self.norm(x))


def test_blocks_that_hold_a_compiled_sequence():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*(Narrow() for _ in range(3))))
    assert wb.profile(model, TOKENS, progress=False).attrs["stack"] == "1"


def test_flex_attention_of_transformers(plain):
    import torch._dynamo  # noqa: F401  (else transformers compiles the kernel in the first pass, which takes long)

    model = make(attn_implementation="flex_attention")
    np.testing.assert_allclose(eigenvalues(model), eigenvalues(plain), atol=1e-4)


class FlexBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + flex_attention(q, k, v).transpose(1, 2).flatten(2)


def test_flex_attention_as_it_is_written():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*(FlexBlock() for _ in range(3))))
    assert len(wb.profile(model, TOKENS, progress=False)["layer"]) == 3


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offloaded_models(plain, where, tmp_path):
    host = torch.device("cpu")
    model = copy.deepcopy(plain)
    model = cpu_offload(model, host) if where == "memory" else disk_offload(model, tmp_path, host)
    assert all(parameter.is_meta for parameter in model.parameters())
    np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
