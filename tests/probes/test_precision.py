"""Errors of a run's arithmetic: none where everything is exact, and found where attention is broken."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from tests.about import about, says
from tests.launches import launched
from workbench.errors import OptionError
from workbench.models.losses import prediction_of, token_loss
from workbench.models.readable_weights import complete
from workbench.probes.precision import _gradients, _multiplies_by_tf32, precision_reading

TOKENS = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(0))


def zoo(norm="pre_ln"):
    return wb.zoo.transformer(norm=norm, d_model=32, n_layers=3, n_heads=4, vocab_size=16, max_length=8, seed=1)


def mixture():
    return wb.zoo.moe(d_model=32, n_layers=2, n_heads=4, n_experts=4, top_k=2, vocab_size=16, max_length=8, seed=1)


def llama():
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 16,
              "max_position_embeddings": 16}  # fmt: skip
    return wb.design(config).build()


MODELS = {"pre_ln": zoo, "post_ln": lambda: zoo("post_ln"), "moe": mixture, "llama": llama}


def loss_of(model):
    return token_loss(prediction_of(model(TOKENS[:, :-1])), TOKENS[:, 1:])


def fault(n_bits, *, dtype=torch.float32, rounding="truncate", output=True, gradient=True):
    def around():
        stack = ExitStack()
        if dtype != torch.float32:
            stack.enter_context(torch.autocast("cpu", dtype))
        mode = stack.enter_context(wb.faults.FlashAttentionMode())
        mode.cut = wb.faults.Cut(n_bits=n_bits, rounding=rounding, output=output, gradient=gradient)
        return stack

    return around


def worst(errors):
    return float(np.nanmax([np.nanmax(errors["error_excess"]), np.nanmax(errors["query_error_excess"])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rounding_explains_a_healthy_model_but_not_lost_bits(name, dtype):
    model = MODELS[name]()
    found = [wb.probes.precision_errors(model, loss_of, around=fault(n, dtype=dtype)) for n in (0, 2, 5, 8)]
    assert [wb.probes.broken_arithmetic(errors) is not None for errors in found] == [False, True, True, True]
    assert np.diff([worst(errors) for errors in found]).min() > 0
    broken = wb.probes.broken_arithmetic(found[-1])
    assert broken.head == int(found[-1]["query_error_excess"].values[broken.layer].argmax())
    assert "the attention kernel is wrong" in broken.sentence


def test_frozen_queries_have_no_errors_and_the_rest_of_the_block_has():
    model = zoo()
    for block in model.blocks[:2]:
        block.attention.requires_grad_(requires_grad=False)
    errors = wb.probes.precision_errors(model, loss_of)
    is_known = np.isfinite(errors["query_gradient_error"].values)
    assert is_known.tolist() == [[False] * 4, [False] * 4, [True] * 4]
    assert np.isfinite(errors["gradient_error"]).all()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_can_be_measured_one_at_a_time_without_waiting(name):
    model = MODELS[name]()
    anatomy = wb.read_anatomy(model, TOKENS[:, :-1])
    options = {"anatomy": anatomy, "query_keys": wb.query_key_weights(model, TOKENS[:, :-1], anatomy=anatomy)}
    whole = wb.probes.precision_errors(model, loss_of, **options)
    launches, (one, failed) = launched(precision_reading(model, loss_of, **options, layers=[1]))
    assert failed == {}
    # Waits of the models' own code: experts choose tokens by index, and transformers looks for packed sequences.
    assert launches.waits.keys() <= {"moe": {"nonzero"}, "llama": {"_local_scalar_dense"}}.get(name, set())
    for variable, values in one.items():
        if values.ndim:
            assert np.isnan(values[0]).all()
            np.testing.assert_array_equal(values[1], whole[variable].values[1])
    assert wb.probes.broken_arithmetic(one) is None


def test_a_block_that_cannot_run_in_float64_does_not_stop_the_others():
    model = zoo()
    anatomy = wb.read_anatomy(model, TOKENS[:, :-1])

    def refuse(module, args):
        if args[0].dtype == torch.float64:
            raise NotImplementedError("There is no kernel for float64.")

    model.blocks[1].register_forward_pre_hook(refuse)
    values, failed = complete(precision_reading(model, loss_of, anatomy=anatomy, query_keys=()))
    assert [*failed] == [1]
    assert np.isfinite(values["error_excess"]).tolist() == [True, False, True]
    with pytest.raises(NotImplementedError):
        wb.probes.precision_errors(model, loss_of, anatomy=anatomy, query_keys=())


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e3, 1e6])
def test_gradients_in_float16_have_the_largest_scale_without_overflow(factor):
    state = torch.ones(3, dtype=torch.float16, requires_grad=True)
    loss = (state.float() * factor).sum()
    expected = next(s for s in (2.0**16, 2.0**8, 1.0) if s == 1 or factor * s < 65504) * factor
    torch.testing.assert_close(_gradients(loss, [state])[0], torch.full((3,), expected).half())


def test_errors_are_those_against_the_model_in_float64():
    model = zoo()
    with torch.autocast("cpu", torch.bfloat16):
        own = torch.autograd.grad(loss_of(model), list(model.blocks[2].parameters()))
    errors = wb.probes.precision_errors(model, loss_of, around=lambda: torch.autocast("cpu", torch.bfloat16))
    exact_model = zoo().double()
    exact = torch.autograd.grad(loss_of(exact_model), list(exact_model.blocks[2].parameters()))
    flat = [torch.cat([g.double().flatten() for g in gradients]) for gradients in (own, exact)]
    # The last block only: in the full model its input has errors too.
    expected = float((flat[0] - flat[1]).norm() / flat[1].norm())
    assert 0.2 * expected < float(errors["gradient_error"][2]) < 2 * expected


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("head", [0, 3])
def test_a_fault_of_one_head_is_found_there(layer, head, monkeypatch):
    model = zoo()
    true = functional.scaled_dot_product_attention
    running = []
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: running.append(i))

    def broken(query, key, value, *args, **kwargs):
        if running[-1] == layer:
            scale = torch.ones(4, 1, 1)
            scale[head] = 0.98  # of the gradient only
            query = query + (scale * query - scale * query.detach()) - (query - query.detach())
        return true(query, key, value, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", broken)
    errors = wb.probes.precision_errors(model, loss_of)
    assert functional.scaled_dot_product_attention is broken  # the run continues with its own kernel
    where = np.argwhere(errors["query_error_excess"].values > 100)
    assert where.tolist() == [[layer, head]]
    assert float(errors["query_gradient_bias"][layer, head]) == pytest.approx(-0.02, abs=1e-4)
    assert np.flatnonzero(errors["error_excess"].values > 100).tolist() == [layer]


class CoarseLinear(torch.autograd.Function):
    """A product whose weight gradient has three digits, like that of a broken kernel."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        exact = given.flatten(0, -2).T @ x.flatten(0, -2)
        return given @ weight, torch.round(exact, decimals=1) if x.dtype == torch.float32 else exact


class NetOfBlocks(nn.Module):
    """Residual blocks, of which the second multiplies with a broken kernel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(is_broken=i == 1) for i in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, *, is_broken):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.is_broken = is_broken

    def forward(self, x):
        if self.is_broken:
            return x + CoarseLinear.apply(x, self.weight).tanh()
        return x + functional.linear(x, self.weight).tanh()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_rounding_that_saturated_attention_magnifies_is_no_broken_kernel(scale):
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
    )
    model.forward = lambda states: model.layers[1](model.layers[0](states))
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight.mul_(scale)
    states = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    errors = wb.probes.precision_errors(
        model, lambda m: m(states).square().mean(), anatomy=wb.read_anatomy(model, states), query_keys=()
    )
    assert bool((errors["gradient_error"] > 1e-3).all()) == (scale > 1)
    assert bool((errors["error_excess"] < 3).all())
    assert wb.probes.broken_arithmetic(errors) is None


def test_a_broken_kernel_outside_of_attention_is_found():
    states = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    model = NetOfBlocks()
    anatomy = wb.read_anatomy(model, states)
    errors = wb.probes.precision_errors(model, lambda m: m(states).square().mean(), anatomy=anatomy, query_keys=())
    assert np.flatnonzero(errors["error_excess"].values > 100).tolist() == [1]
    assert errors.sizes["head"] == 0
    broken = wb.probes.broken_arithmetic(errors)
    assert (broken.layer, broken.head) == (1, -1)
    assert broken.sentence.endswith(
        "a kernel or a cast of this block is wrong. Run it with torch's own kernels, without casts."
    )


def test_values_that_are_not_finite_are_nan_and_raise_nothing():
    model = zoo()
    with torch.no_grad():
        next(model.blocks[1].parameters())[:] = torch.nan
    errors = wb.probes.precision_errors(model, loss_of, anatomy=wb.read_anatomy(zoo(), TOKENS[:, :-1]), query_keys=())
    assert errors["error_excess"].isnull().all()


def test_a_loss_without_a_graph_is_rejected():
    with pytest.raises(OptionError, check=about("loss_of(model)")):
        wb.probes.precision_errors(zoo(), lambda model: model(TOKENS[:, :-1]).detach().mean())
    with pytest.raises(OptionError, check=says("loss_of did not call the model; return a loss of")):
        wb.probes.precision_errors(zoo(), lambda model: torch.zeros((), requires_grad=True))


def test_float16_gradients_neither_overflow_nor_vanish():
    model = zoo()
    for factor in (1e-7, 1.0, 1e4):
        errors = wb.probes.precision_errors(
            model, lambda m, f=factor: loss_of(m) * f, around=lambda: torch.autocast("cpu", torch.float16)
        )
        np.testing.assert_allclose(errors["error_excess"], 1, rtol=0.2)
        assert float(errors["gradient_error"].max()) < 0.05


def tf32(x):
    """Round float32 numbers on the host as a CUDA device does before a tf32 multiplication."""
    x = x.detach().contiguous()
    if x.dtype != torch.float32:
        return x.numpy()
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).numpy()


def product(a, b):
    return torch.from_numpy(np.matmul(tf32(a), tf32(b)))


def with_sum(start, a, b, *, beta=1, alpha=1):
    return alpha * product(a, b) + (beta * start if beta else 0)


@pytest.fixture
def multiplies_by_tf32():
    """Compute float32 products on the CPU as in tf32."""
    kernels = {"mm": product, "bmm": product, "addmm": with_sum, "baddbmm": with_sum}
    with warnings.catch_warnings(), torch.library._scoped_library("aten", "IMPL") as library:
        warnings.simplefilter("ignore")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        yield


@pytest.mark.parametrize("name", ["pre_ln", "llama"])
def test_tf32_products_are_not_broken_arithmetic(name, multiplies_by_tf32, monkeypatch):
    """They round a thousand times more coarsely than float32, and are a common setting on CUDA devices."""
    model = MODELS[name]()
    monkeypatch.setattr("workbench.probes.precision._multiplies_by_tf32", lambda call: True)
    for kernel in (nullcontext, fault(0)):
        errors = wb.probes.precision_errors(model, loss_of, around=kernel)
        assert float(errors["gradient_error"].max()) > 1e-4
        assert wb.probes.broken_arithmetic(errors) is None
    assert wb.probes.broken_arithmetic(wb.probes.precision_errors(model, loss_of, around=fault(3))) is not None
    # Without taking tf32 into account they would be.
    monkeypatch.setattr("workbench.probes.precision._multiplies_by_tf32", lambda call: False)
    assert wb.probes.broken_arithmetic(wb.probes.precision_errors(model, loss_of, around=fault(0))) is not None


def test_tf32_is_read_from_the_settings():
    def call_of(module):
        here = SimpleNamespace(device=torch.device("cuda"))
        return SimpleNamespace(gradient=here, site=SimpleNamespace(module=module))

    dense, image = call_of(nn.Linear(2, 2)), call_of(nn.Sequential(nn.Conv2d(2, 2, 1)))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert not _multiplies_by_tf32(dense)
        assert _multiplies_by_tf32(image)  # what torch sets for convolutions
        torch.set_float32_matmul_precision("high")
        assert _multiplies_by_tf32(dense)
        dense.gradient.device = torch.device("cpu")
        assert not _multiplies_by_tf32(dense)
    finally:
        torch.set_float32_matmul_precision(before)
