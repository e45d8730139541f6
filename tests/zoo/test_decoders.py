import copy
import weakref

import pytest
import torch

import workbench as wb
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.zoo.decoders import balance_loss, selective_scan


def as_mixtral(model):
    """Return the Mixtral of transformers with the parameters of a model of the zoo."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = model.config
    theirs = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=config.d_model, intermediate_size=config.hidden_width, num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads, num_key_value_heads=config.n_key_value_heads,
            vocab_size=config.vocab_size, max_position_embeddings=config.max_length, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base}, sliding_window=config.window,
            num_local_experts=config.n_experts, num_experts_per_tok=config.top_k, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    ours = model.state_dict()
    state = {
        "model.embed_tokens.weight": ours["token_embedding.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    names = {
        "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.out",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm", "mlp.gate": "mlp.router",
    }  # fmt: skip
    for i, block in enumerate(model.blocks):
        for name, our_name in names.items():
            state[f"model.layers.{i}.{name}.weight"] = ours[f"blocks.{i}.{our_name}.weight"]
        experts = f"model.layers.{i}.mlp.experts"
        state[f"{experts}.gate_up_proj"] = torch.stack(
            [torch.cat((expert.gate.weight, expert.up.weight)) for expert in block.mlp.experts]
        )
        state[f"{experts}.down_proj"] = torch.stack([expert.down.weight for expert in block.mlp.experts])
    theirs.load_state_dict(state)
    return theirs.eval()


@pytest.fixture(scope="module")
def mixtral():
    return perturbed(wb.zoo.mixtral_style(n_kv_heads=2, window=6, **TEXT)).eval()


@torch.no_grad()
def test_mixtral_style_computes_what_transformers_mixtral_does(mixtral):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    tokens = inputs_for(mixtral)
    theirs = as_mixtral(mixtral)(tokens, output_router_logits=True)
    torch.testing.assert_close(mixtral(tokens), theirs.logits, rtol=0, atol=1e-5)
    assert theirs.logits.abs().max() > 0.5
    for block, logits in zip(mixtral.blocks, theirs.router_logits, strict=True):
        torch.testing.assert_close(block.mlp.logits, logits, rtol=0, atol=1e-5)
        expected = load_balancing_loss_func((logits,), num_experts=8, top_k=2) / 2
        torch.testing.assert_close(balance_loss(block.mlp.logits, 2), expected)


def test_one_expert_is_the_dense_transformer():
    mixture = perturbed(wb.zoo.moe(n_experts=1, top_k=1, **TEXT))
    dense = wb.zoo.transformer(**TEXT)
    state = {key.replace("experts.0.", ""): tensor for key, tensor in mixture.state_dict().items()}
    dense.load_state_dict({key: tensor for key, tensor in state.items() if "router" not in key})
    torch.testing.assert_close(mixture(inputs_for(dense)), dense(inputs_for(dense)), rtol=0, atol=1e-6)


def test_auxiliary_losses_follow_their_formulas():
    model = perturbed(wb.zoo.moe(n_experts=5, top_k=2, balance_coefficient=0.3, z_coefficient=0.7, **TEXT))
    captured = []
    handles = [block.mlp.router.register_forward_hook(lambda *a: captured.append(a[2])) for block in model.blocks]
    model(inputs_for(model))
    for handle in handles:
        handle.remove()
    balance = z = 0.0
    for logits in captured:  # (token, expert)
        probability = logits.exp() / logits.exp().sum(1, keepdim=True)
        for expert in range(5):
            n_chosen = sum(expert in row.argsort(descending=True)[:2] for row in logits)
            balance += 5 * n_chosen / (2 * len(logits)) * probability[:, expert].mean() / 2
        z += sum(torch.log(row.exp().sum()) ** 2 for row in logits) / len(logits) / 2
    losses = model.auxiliary_losses()
    torch.testing.assert_close(losses, {"balance": balance, "z": z})
    torch.testing.assert_close(model.auxiliary_loss(), 0.3 * balance + 0.7 * z)
    assert model.auxiliary_loss().ndim == 0


def test_balance_is_1_for_equal_use_and_n_if_one_expert_receives_all_tokens():
    equal = 10 * torch.eye(4).repeat(5, 1)
    assert balance_loss(equal, 1).item() == pytest.approx(1)
    assert balance_loss(100 * torch.eye(4)[:1].repeat(5, 1), 1).item() == pytest.approx(4)
    assert balance_loss(torch.zeros(7, 4), 4).item() == pytest.approx(1)


@pytest.mark.parametrize(("top_k", "is_normalized", "learns"), [(1, None, True), (1, True, False), (2, None, True)])
def test_the_task_trains_the_router_unless_one_expert_has_all_the_weight(top_k, is_normalized, learns):
    model = perturbed(wb.zoo.moe(top_k=top_k, normalizes_top_k=is_normalized, **TEXT))
    model(inputs_for(model)).square().mean().backward()
    assert all((block.mlp.router.weight.grad.abs().max() > 1e-7) == learns for block in model.blocks)


def test_the_graph_is_kept_until_the_next_forward_pass_and_is_not_copied():
    model = wb.zoo.moe(**TEXT)
    model(inputs_for(model))
    first = weakref.ref(model.blocks[0].mlp.logits)
    copied = copy.deepcopy(model)
    assert copied.blocks[0].mlp.logits is None
    assert model.blocks[0].mlp.logits is first()
    with torch.no_grad():
        model(inputs_for(model))
    assert first() is None


def test_profiling_between_forward_and_backward_pass_changes_nothing():
    model = wb.zoo.moe(**TEXT)
    model(inputs_for(model))
    loss = model.auxiliary_loss()
    wb.profile(model, inputs_for(model, n_examples=8), progress=False)
    assert torch.equal(model.auxiliary_loss(), loss)
    assert model.auxiliary_loss().requires_grad


NAMES = {
    "mixer_norm": "norm", "mixer.expand": "mixer.in_proj", "mixer.convolution": "mixer.conv1d",
    "mixer.selection": "mixer.x_proj", "mixer.time_step": "mixer.dt_proj", "mixer.log_decay": "mixer.A_log",
    "mixer.skip": "mixer.D", "mixer.out": "mixer.out_proj",
}  # fmt: skip
ENDS = {"token_embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"}


def their_name(name):
    """Return the name of a parameter of the zoo in the Mamba of transformers."""
    if not name.startswith("blocks."):
        module, _, kind = name.rpartition(".")
        return f"{ENDS[module]}.{kind}"
    _, layer, rest = name.split(".", 2)
    ours = next(ours for ours in NAMES if rest.startswith(ours))
    return f"backbone.layers.{layer}.{NAMES[ours]}{rest.removeprefix(ours)}"


def transformers_mamba(config):
    """Return the Mamba of transformers with the same sizes and its own initial parameters."""
    from transformers import MambaConfig, MambaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaForCausalLM(
            MambaConfig(
                hidden_size=config.d_model, num_hidden_layers=config.n_layers, vocab_size=config.vocab_size,
                state_size=config.state_size, conv_kernel=config.conv_width, expand=config.expand,
                use_bias=config.has_bias, layer_norm_epsilon=config.norm_eps, initializer_range=config.init_std,
                tie_word_embeddings=config.ties_embeddings, pad_token_id=None, bos_token_id=None, eos_token_id=None,
            )
        ).eval()  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"has_bias": True, "state_size": 3, "conv_width": 2, "expand": 3}, {"ties_embeddings": True}]
)
def test_mamba_computes_the_same_as_that_of_transformers(options):
    model = perturbed(wb.zoo.mamba(**TEXT, **options)).eval()
    theirs = transformers_mamba(model.config)
    theirs.load_state_dict({their_name(name): tensor for name, tensor in model.state_dict().items()})
    expected = theirs(inputs_for(model)).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(inputs_for(model)), expected, rtol=0, atol=1e-6)


def test_mamba_is_initialized_like_that_of_transformers():
    model = wb.zoo.mamba(d_model=64, n_layers=2, init_std=0.05)
    theirs = dict(transformers_mamba(model.config).named_parameters())
    ours = dict(model.named_parameters())
    assert {their_name(name) for name in ours} == set(theirs)
    for name, tensor in ours.items():
        other = theirs[their_name(name)]
        assert tensor.std(correction=0).item() == pytest.approx(other.std(correction=0).item(), rel=0.12), name
        assert tensor.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.4), name
    mixer = model.blocks[0].mixer
    step = torch.nn.functional.softplus(mixer.time_step.bias)
    assert 0.00099 < step.min() < 0.0015 < 0.07 < step.max() < 0.1001
    assert step.log().mean().item() == pytest.approx(-4.605, abs=0.4)  # log of the geometric mean of 0.001 and 0.1
    assert torch.equal(mixer.log_decay.exp().round(), torch.arange(1.0, 17).expand(128, 16))


def test_the_scan_follows_its_recursion_and_is_differentiable_twice():
    generator = torch.Generator().manual_seed(0)
    signal, step = (torch.rand(2, 5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    rate = -torch.rand(3, 4, dtype=torch.float64, generator=generator)
    write, read = (torch.randn(2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    found = selective_scan(signal, step, rate, write, read)
    for row in range(2):
        for channel in range(3):
            state = torch.zeros(4, dtype=torch.float64)
            for t in range(5):
                size = step[row, t, channel]
                state = torch.exp(size * rate[channel]) * state + size * write[row, t] * signal[row, t, channel]
                torch.testing.assert_close(found[row, t, channel], read[row, t] @ state)
    arguments = [tensor[:1, :3].requires_grad_() if tensor.ndim == 3 else tensor.requires_grad_()
                 for tensor in (signal, step, rate, write, read)]  # fmt: skip
    torch.autograd.gradcheck(selective_scan, arguments)
    torch.autograd.gradgradcheck(selective_scan, arguments)


def test_the_last_map_is_scaled_by_the_number_of_branches():
    unscaled, scaled = (wb.zoo.mamba(scales_residual_init=flag, **TEXT).state_dict() for flag in (False, True))
    for name, tensor in unscaled.items():
        is_last = name.endswith("out.weight")
        torch.testing.assert_close(scaled[name], tensor / 2**0.5 if is_last else tensor)
