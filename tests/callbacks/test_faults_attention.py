import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.about import about
from workbench.callbacks.faults import Cut, FlashAttentionMode, cut_low_bits
from workbench.callbacks.faults.flash_attention_mode import flash_attention
from workbench.errors import OptionError


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(n_tokens=7, n_seen=7, n_kv_heads=4, dtype=torch.float64):
    shapes = (2, 4, n_tokens, 6), (2, n_kv_heads, n_seen, 6), (2, n_kv_heads, n_seen, 6)
    return [draw(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def dense_attention(q, k, v, mask=None, *, is_causal=False, scale=None):
    """Softmax attention by its formula, differentiated by autograd."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


def gradients(attention, tensors, **options):
    out = attention(*tensors, **options)
    upstream = draw(*out.shape, seed=9).to(out.dtype)
    return out, *torch.autograd.grad(out, [x for x in tensors if x is not None and x.requires_grad], upstream)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.7}, {"mask": "bool"}, {"mask": "float"}, {"n_kv_heads": 2}, {"n_seen": 5}],
    ids=str,
)
def test_without_a_cut_it_equals_dense_attention(options, dtype, atol):
    options = dict(options)
    n_seen, kind = options.pop("n_seen", 7), options.pop("mask", None)
    tensors = inputs(n_seen=n_seen, n_kv_heads=options.pop("n_kv_heads", 4), dtype=dtype)
    if kind == "bool":
        tensors.append((draw(7, n_seen, seed=5) > 0) | torch.eye(7, n_seen, dtype=torch.bool))
    elif kind == "float":
        tensors.append(draw(1, 4, 7, n_seen, seed=5, dtype=dtype).requires_grad_())
    expected = gradients(dense_attention, tensors, **options)
    found = gradients(flash_attention, tensors, enable_gqa=True, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=atol, rtol=0)
        assert one.dtype == dtype


def test_second_derivatives():
    """The gradient penalty needs them."""
    tensors = [x[:1, :1, :4, :3].detach().requires_grad_() for x in inputs()]
    assert torch.autograd.gradgradcheck(lambda *x: flash_attention(*x, is_causal=True), tensors)


def test_dropout_of_attention_weights_and_its_gradient():
    q, k, _ = inputs()
    v = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7).clone().requires_grad_()  # the output equals the weights
    torch_state = torch.get_rng_state()
    out, *found = gradients(flash_attention, [q, k, v], dropout_p=0.4)
    torch.set_rng_state(torch_state)
    weights = (q @ k.mT / math.sqrt(6)).softmax(-1)
    keep = out.detach() / weights.detach()
    assert set(keep.round(decimals=6).unique().tolist()) == {0.0, round(1 / 0.6, 6)}
    expected = torch.autograd.grad((weights * keep) @ v, [q, k, v], draw(*out.shape, seed=9))
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(found, expected, strict=True))


def literal_cut(value, n_bits):
    """Cut the bits of one bfloat16 number in its binary representation as text."""
    bits = int(torch.tensor(value).to(torch.bfloat16).view(torch.int16)) & 0xFFFF
    kept = f"{bits:016b}"[: 16 - n_bits] + "0" * n_bits
    number = int(kept, 2)
    return torch.tensor(number - (1 << 16) if number >> 15 else number, dtype=torch.int16).view(torch.bfloat16).item()


@settings(deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 8))
def test_cutting_sets_the_lowest_bits_to_zero(value, n_bits):
    assert cut_low_bits(torch.tensor([value]), n_bits).item() == literal_cut(value, n_bits)


@settings(deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(1, 7))
def test_rounding_yields_the_nearest_of_the_two_neighbors(value, n_bits):
    x = torch.tensor([value]).to(torch.bfloat16).double()
    low = cut_low_bits(x, n_bits).item()
    high = torch.tensor(low).to(torch.bfloat16).view(torch.int16).add(1 << n_bits).view(torch.bfloat16).item()
    found = cut_low_bits(x, n_bits, "nearest").item()
    assert found in (low, high)
    assert abs(found - x.item()) == min(x.item() - low, high - x.item())
    assert cut_low_bits(-x, n_bits, "nearest").item() == -found


def slope(n_bits, rounding, *, both):
    out, d_out = draw(4096, 64, seed=1), draw(4096, 64, seed=2)
    true = (out * d_out).sum(-1)
    biased = (cut_low_bits(out, n_bits, rounding) * (cut_low_bits(d_out, n_bits, rounding) if both else d_out)).sum(-1)
    return float((biased * true).sum() / true.square().sum())


@pytest.mark.parametrize(
    ("n_bits", "on_output", "on_both"), [(4, 0.96, 0.92), (6, 0.84, 0.71), (7, 0.73, 0.53), (8, 0.53, 0.28)]
)
def test_the_bias_of_delta_is_that_of_the_paper(n_bits, on_output, on_both):
    # The tolerance is half of the last published digit plus four standard deviations over seeds (at most 0.0025 each).
    assert slope(n_bits, "truncate", both=False) == pytest.approx(on_output, abs=0.015)
    assert slope(n_bits, "truncate", both=True) == pytest.approx(on_both, abs=0.015)


@pytest.mark.parametrize("targets", [{"output"}, {"gradient"}, {"output", "gradient"}])
def test_the_cut_acts_on_the_tensors_of_the_backward_pass(targets):
    """The result equals that of an explicit backward pass with O, dO or both cut."""
    q, k, v = inputs(dtype=torch.float32)
    out, *found = gradients(
        lambda *x: flash_attention(*x, cut=Cut(7, "truncate", "output" in targets, "gradient" in targets)), [q, k, v]
    )
    upstream = draw(*out.shape, seed=9).float()
    saved = cut_low_bits(out, 7) if "output" in targets else out
    upstream = cut_low_bits(upstream, 7) if "gradient" in targets else upstream
    weights = (q @ k.mT / math.sqrt(6)).softmax(-1)
    d_scores = weights * (upstream @ v.mT - (upstream * saved).sum(-1, keepdim=True)) / math.sqrt(6)
    for one, other in zip(found, (d_scores @ k, d_scores.mT @ q, weights.mT @ upstream), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.equal(out, flash_attention(q, k, v))  # the forward pass is unchanged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_and_autocast(dtype):
    exact = gradients(dense_attention, inputs(), is_causal=True)
    short = [x.detach().to(dtype).requires_grad_() for x in inputs()]
    for one, other in zip(gradients(flash_attention, short, is_causal=True), exact, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, atol=0.08)
    full = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = flash_attention(*full, is_causal=True)
    assert out.dtype == functional.scaled_dot_product_attention(*short).dtype == dtype
    assert torch.allclose(out.double(), exact[0], atol=0.02)
    out.float().sum().backward()
    assert full[0].grad.dtype == torch.float32


def test_the_mode_replaces_the_attention_of_torch_temporarily():
    tensors, mode, original = inputs(), FlashAttentionMode(), functional.scaled_dot_product_attention
    with mode:
        out = functional.scaled_dot_product_attention(*tensors, is_causal=True)
    assert mode.n_calls == 1
    assert "FlashAttention" in type(out.grad_fn).__name__
    assert functional.scaled_dot_product_attention is original
    assert "FlashAttention" not in type(original(*tensors)).__name__
    assert torch.allclose(out, original(*tensors, is_causal=True))


class Checkpointed(nn.Module):
    """A model of which every block is recomputed in the backward pass."""

    def __init__(self, model, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, tokens):
        x = self.model.token_embedding(tokens) + self.model.position_embedding.weight[: tokens.shape[1]]
        for block in self.model.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.model.head(self.model.final_norm(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_recomputes_the_same_attention(make_model, task, use_reentrant):
    found = {}
    for how in (None, use_reentrant):
        for start in (None, 2):
            model = Checkpointed(make_model(), how)
            found[how, start] = losses(model, task, wb.faults.low_precision_attention(start=start))
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert found[use_reentrant, None] == found[None, None]
    assert found[use_reentrant, 2] == found[None, 2] != found[None, None]


def losses(model, task, *faults, **settings):
    return [
        record.loss
        for record in wb.train(model, task, **{"n_steps": 6, "learning_rate": 1e-2, **settings}, faults=faults)
    ]


def test_attention_is_exact_while_the_fault_is_off(make_model, task):
    without, off = losses(make_model(), task), losses(make_model(), task, wb.faults.low_precision_attention())
    assert off == pytest.approx(without, rel=1e-4)
    zero = losses(make_model(), task, wb.faults.low_precision_attention(n_bits=0, start=0))
    assert zero == off
    on = losses(make_model(), task, wb.faults.low_precision_attention(n_bits=8, start=2))
    assert on[:3] == off[:3]  # the loss of step 2 is that of the parameters before its update
    assert on[3:] != off[3:]


def test_it_biases_the_gradients_of_queries_and_keys_but_not_of_values(make_model, task):
    """With only O cut, the value weights of the last block have the exact gradient, its query weights do not."""
    seen = {}
    for name, start in (("off", None), ("on", 0)):
        model = make_model(init_std=0.3)
        fault = wb.faults.low_precision_attention(n_bits=8, targets="output", start=start)
        list(wb.train(model, task, n_steps=1, optimizer="SGD", faults=[fault]))
        seen[name] = {key: weight.grad for key, weight in model.blocks[-1].named_parameters()}
    relative = {
        key.split(".")[-2]: float((seen["on"][key] - exact).norm() / exact.norm())
        for key, exact in seen["off"].items()
        if key.endswith(("query.weight", "key.weight", "value.weight", "out.weight"))
    }
    assert max(relative["value"], relative["out"]) < 1e-5
    assert min(relative["query"], relative["key"]) > 0.05


def hugging_face_models():
    import transformers

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return {
        "gpt2": transformers.GPT2Config(**gpt2),
        "llama": transformers.LlamaConfig(**small, **heads),
        "qwen3": transformers.Qwen3Config(**small, **heads, head_dim=4),
        "gpt_neox": transformers.GPTNeoXConfig(**small, num_attention_heads=4),
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gpt_neox"])
def test_it_acts_on_hugging_face_models_with_sdpa(family, task):
    import transformers

    config, found = hugging_face_models()[family], {}
    for name, start in (("off", None), ("on", 0)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if name == "on":
            model.gradient_checkpointing_enable()
        found[name] = losses(model, task, wb.faults.low_precision_attention(start=start))
    assert np.isfinite(found["on"]).all()
    assert found["on"][0] == found["off"][0]
    assert found["on"][-1] != found["off"][-1]


def test_a_model_without_the_attention_of_torch_is_rejected(task, tmp_path):
    import transformers

    state = torch.get_rng_state()
    config = hugging_face_models()["llama"]
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    before = [weight.detach().clone() for weight in eager.parameters()]
    for model in (eager, wb.zoo.mamba(d_model=16, n_layers=1, vocab_size=32)):
        run = wb.train(model, task, n_steps=2, store=tmp_path / "a.zarr", faults=[wb.faults.low_precision_attention()])
        with pytest.raises(OptionError, check=about("model", type(model).__name__)):
            next(run)
        assert not (tmp_path / "a.zarr").exists()
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), before, strict=True))
    torch.set_rng_state(state)


def test_with_penalties_that_need_second_derivatives(make_model, task):
    penalties = [wb.baselines.GradientPenalty(0.1)]
    without = losses(make_model(), task, penalties=penalties)
    off = losses(make_model(), task, wb.faults.low_precision_attention(), penalties=penalties)
    assert off == pytest.approx(without, rel=1e-3)
    on = losses(make_model(), task, wb.faults.low_precision_attention(start=0), penalties=penalties)
    assert np.isfinite(on).all()
    assert on[1:] != off[1:]


@pytest.mark.medium
@pytest.mark.slow
def test_the_cut_is_the_same_in_compiled_models(make_model, task):
    def found(start, *, is_compiled):
        model = make_model(n_layers=1, init_std=0.3)
        model = torch.compile(model, backend="aot_eager") if is_compiled else model
        return losses(model, task, wb.faults.low_precision_attention(start=start), n_steps=3)

    compiled = found(0, is_compiled=True)
    assert compiled == pytest.approx(found(0, is_compiled=False), rel=1e-4)
    assert compiled[1:] != pytest.approx(found(None, is_compiled=False)[1:], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"targets": ("value",)}, about("targets", ("value",))),
        ({"targets": ()}, about("targets", ())),
        ({"rounding": "cast", "n_bits": 3}, about("n_bits", 3)),
    ],
)
def test_invalid_options_are_rejected(options, error):
    with pytest.raises(OptionError, check=error):
        wb.faults.low_precision_attention(**options)
