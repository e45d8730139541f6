"""Models of transformers compute the same function after conversion to models of the zoo."""

import pytest
import torch

import workbench as wb
from tests.about import about
from tests.zoo.zoo_models import perturbed
from workbench.errors import CheckpointError

GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 50,
    "n_positions": 20,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 20,
}  # fmt: skip
TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))


def make(cls, config):
    """Return a model of transformers whose matrices, biases and gains are all large enough (0.1 to 1) to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = perturbed(cls(config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 2.0)
    return model.eval()


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    return make(GPT2LMHeadModel, GPT2Config(**{**GPT2, **options}))


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return make(LlamaForCausalLM, LlamaConfig(**{**LLAMA, **options}))


@torch.no_grad()
def assert_same(ours, theirs):
    """Assert that logits and the states after every block are equal to a relative error of 1e-5."""
    expected = theirs(TOKENS, output_hidden_states=True)
    states = []
    handles = [block.register_forward_hook(lambda *a: states.append(a[2])) for block in ours.blocks]
    found = ours(TOKENS)
    for handle in handles:
        handle.remove()
    pairs = [(found, expected.logits), *zip(states[:-1], expected.hidden_states[1:-1], strict=True)]
    for here, there in pairs:
        assert there.std() > 0.5
        assert (here - there).abs().max() <= 1e-5 * there.abs().max()
    assert not ours.training
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"n_inner": 24, "activation_function": "gelu", "layer_norm_epsilon": 1e-2},
    ],
)
def test_gpt2(options):
    theirs = gpt2(**options)
    ours = wb.zoo.from_gpt2(theirs)
    assert_same(ours, theirs)
    assert (ours.head.weight is ours.token_embedding.weight) == options.get("tie_word_embeddings", True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ],
)
def test_llama(options):
    theirs = llama(**options)
    ours = wb.zoo.from_llama(theirs)
    assert_same(ours, theirs)
    assert ours.config.n_kv_heads == options.get("num_key_value_heads", 4)


def test_copies_share_nothing_and_keep_the_dtype():
    theirs = gpt2().to(torch.bfloat16)
    ours = wb.zoo.from_gpt2(theirs)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    storages = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model in (ours, theirs)]
    assert storages[0].isdisjoint(storages[1])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("scale_attn_by_inverse_layer_idx", True, (False,)),
        ("scale_attn_weights", False, (True,)),
        ("activation_function", "relu", ("gelu_new", "gelu_pytorch_tanh", "gelu")),
    ],
)
def test_gpt2_options_that_the_zoo_lacks_are_rejected(name, value, expected):
    with pytest.raises(CheckpointError, check=about(name, value, expected)):
        wb.zoo.from_gpt2(gpt2(**{name: value}))


@pytest.mark.parametrize(
    ("options", "name", "value", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act", "gelu", ("silu",)),
        ({"head_dim": 16}, "head_dim", 16, (8,)),
        ({"attention_bias": True}, "mlp_bias", False, (True,)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type",
            "linear",
            ("default",),
        ),
    ],
)
def test_llama_options_that_the_zoo_lacks_are_rejected(options, name, value, expected):
    with pytest.raises(CheckpointError, check=about(name, value, expected)):
        wb.zoo.from_llama(llama(**options))


def test_other_models_are_rejected():
    with pytest.raises(CheckpointError, check=about("model", "LlamaForCausalLM")):
        wb.zoo.from_gpt2(llama())
    with pytest.raises(CheckpointError, check=about("model", "Transformer")):
        wb.zoo.from_llama(wb.zoo.llama_style(d_model=16))
