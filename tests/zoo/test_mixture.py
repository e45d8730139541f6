import copy
import weakref

import pytest
import torch

import workbench as wb
from tests.about import says
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.errors import WorkbenchError
from workbench.models.router_weights import Router
from workbench.zoo.decoders import balance_loss


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


def test_the_balance_loss_balances():
    model = wb.zoo.moe(n_experts=4, top_k=1, **TEXT)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.weight.mul_(50)
    tokens = inputs_for(model, n_examples=8)
    optimizer = torch.optim.Adam([block.mlp.router.weight for block in model.blocks], lr=0.02)
    model(tokens)
    before = model.auxiliary_losses()["balance"].item()
    for _ in range(30):
        model(tokens)
        optimizer.zero_grad()
        model.auxiliary_losses()["balance"].backward()
        optimizer.step()
    assert model.auxiliary_losses()["balance"].item() < before - 0.1


@pytest.mark.parametrize(("top_k", "is_normalized", "learns"), [(1, None, True), (1, True, False), (2, None, True)])
def test_the_task_trains_the_router_unless_one_expert_has_all_the_weight(top_k, is_normalized, learns):
    model = perturbed(wb.zoo.moe(top_k=top_k, normalizes_top_k=is_normalized, **TEXT))
    model(inputs_for(model)).square().mean().backward()
    assert all((block.mlp.router.weight.grad.abs().max() > 1e-7) == learns for block in model.blocks)


def test_losses_need_a_forward_pass_and_have_gradients_if_it_had():
    model = wb.zoo.moe(**TEXT)
    with pytest.raises(WorkbenchError, check=says("The routers have received no tokens yet; call the model")):
        model.auxiliary_losses()
    with torch.no_grad():
        model(inputs_for(model))
    assert not model.auxiliary_loss().requires_grad
    model(inputs_for(model))
    assert model.auxiliary_loss().requires_grad
    assert not hasattr(wb.zoo.transformer(**TEXT), "auxiliary_loss")


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


def test_routers_are_read(mixtral):
    for model in (mixtral, perturbed(wb.zoo.moe(top_k=1, **TEXT))):
        for block, found in zip(model.blocks, wb.router_weights(model, inputs_for(model)), strict=True):
            assert isinstance(found, Router)
            assert torch.equal(found.weight, block.mlp.router.weight)
            assert (found.n_experts, found.top_k, found.scoring) == (8, model.config.top_k, "softmax")
