"""Models of the zoo compute the same function as those of transformers with the same weights."""

import pytest
import torch

import workbench as wb
from tests.zoo.zoo_models import perturbed

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


def from_gpt2(model):
    """The transformer of the zoo with the weights of a GPT-2 model."""
    theirs = model.config
    ours = wb.zoo.transformer(
        d_model=theirs.n_embd, n_layers=theirs.n_layer, n_heads=theirs.n_head, vocab_size=theirs.vocab_size,
        max_length=theirs.n_positions, norm="pre_ln", norm_eps=theirs.layer_norm_epsilon,
        mlp={"gelu_new": "gelu_tanh", "gelu": "gelu"}[theirs.activation_function],
        mlp_width=theirs.n_inner or 4 * theirs.n_embd,
        ties_embeddings=theirs.tie_word_embeddings, init_std=theirs.initializer_range, scales_residual_init=True,
    )  # fmt: skip
    state = model.state_dict()
    filled = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
        "final_norm.weight": state["transformer.ln_f.weight"],
        "final_norm.bias": state["transformer.ln_f.bias"],
        "head.weight": state["lm_head.weight"],
    }
    for i in range(ours.config.n_layers):
        there, here = f"transformer.h.{i}", f"blocks.{i}"
        # Conv1D stores its weights as (in, out), and those of query, key and value side by side.
        weights = state[f"{there}.attn.c_attn.weight"].T.chunk(3)
        biases = state[f"{there}.attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            filled[f"{here}.attention.{name}.weight"], filled[f"{here}.attention.{name}.bias"] = weight, bias
        pairs = {"attn.c_proj": "attention.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for name, our_name in pairs.items():
            filled[f"{here}.{our_name}.weight"] = state[f"{there}.{name}.weight"].T
            filled[f"{here}.{our_name}.bias"] = state[f"{there}.{name}.bias"]
        for name, our_name in {"ln_1": "attention_norm", "ln_2": "mlp_norm"}.items():
            filled |= {f"{here}.{our_name}.{kind}": state[f"{there}.{name}.{kind}"] for kind in ("weight", "bias")}
    ours.load_state_dict(filled)
    return ours.eval()


def from_llama(model):
    """The transformer of the zoo with the weights of a Llama model."""
    theirs = model.config
    ours = wb.zoo.transformer(
        d_model=theirs.hidden_size, n_layers=theirs.num_hidden_layers, n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads, vocab_size=theirs.vocab_size,
        max_length=theirs.max_position_embeddings, norm="rms_norm", norm_eps=theirs.rms_norm_eps, position="rotary",
        rotary_base=theirs.rope_parameters["rope_theta"], mlp="swiglu", mlp_width=theirs.intermediate_size,
        has_bias=theirs.attention_bias, ties_embeddings=theirs.tie_word_embeddings, init_std=theirs.initializer_range,
    )  # fmt: skip
    state = model.state_dict()
    filled = {
        "token_embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    pairs = {
        "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
    }  # fmt: skip
    for i in range(ours.config.n_layers):
        for name, our_name in pairs.items():
            for kind in ("weight", "bias"):
                if (tensor := state.get(f"model.layers.{i}.{name}.{kind}")) is not None:
                    filled[f"blocks.{i}.{our_name}.{kind}"] = tensor
    ours.load_state_dict(filled)
    return ours.eval()


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
    ours = from_gpt2(theirs)
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
    ours = from_llama(theirs)
    assert_same(ours, theirs)
    assert ours.config.n_kv_heads == options.get("num_key_value_heads", 4)
