"""SAM, Lion and LAMB against their algorithms, and muP by the growth of activations with the width."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import assert_resumes_bit_for_bit
from workbench.callbacks.baselines.optimizers import hidden_matrices
from workbench.callbacks.baselines.penalties import PenaltyTerms
from workbench.errors import OptionError

baselines = wb.baselines
ALL = [baselines.SAM(0.05), baselines.SAM(0.1, "SGD", {"momentum": 0.9}), baselines.Lion(), baselines.LAMB()]


def close(model, other, atol=1e-6):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def loss_of(model, task, step, penalty=None):
    tokens, targets = task.batch(step)
    if penalty is None:
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    terms = PenaltyTerms([penalty], model=model)
    terms.read_anatomy(tokens)
    with terms.watch(step) as penalty_of:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        return loss + penalty_of(loss)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("penalty", [None, baselines.JacobianPenalty(0.5)], ids=["no penalty", "penalty"])
def test_sam_against_an_explicit_loop(make_model, task, clip_norm, penalty):
    # The exact gradient of the bias of keys is 0; Adam would amplify its rounding errors.
    options = {"init_std": 0.2, "has_bias": False}
    reference, rho = make_model("none", **options), 0.1
    parameters = list(reference.parameters())
    optimizer, norms = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4), []
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step, penalty), parameters)
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(rho * gradient / norms[-1])
        optimizer.zero_grad()
        loss_of(reference, task, step, penalty).backward()
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    model = make_model("none", **options)
    settings = {"learning_rate": 1e-2, "clip_norm": clip_norm, "penalties": [] if penalty is None else [penalty]}
    records = list(wb.train(model, task, n_steps=5, optimizer=baselines.SAM(rho, options={"eps": 1e-4}), **settings))
    assert np.allclose([record.grad_norm for record in records], norms, rtol=1e-4)
    assert close(model, reference, atol=1e-5)
    without = make_model("none", **options)
    list(wb.train(without, task, n_steps=5, learning_rate=1e-2, clip_norm=clip_norm))
    assert not close(model, without, atol=1e-3)


def test_lion_against_its_algorithm(make_model, task):
    reference, model = (make_model(has_bias=False, init_std=0.2) for _ in range(2))
    parameters = list(reference.parameters())
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step), parameters)
        with torch.no_grad():
            for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                update = (0.9 * momentum + 0.1 * gradient).sign()
                parameter.sub_(1e-3 * (update + 0.01 * parameter))
                momentum.mul_(0.99).add_(0.01 * gradient)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-3, optimizer=baselines.Lion()))
    assert close(model, reference)


def test_lamb_against_its_algorithm(task):
    """You et al. 2020, Algorithm 2, with decoupled decay, for initial parameters that are not zero."""

    def make():
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3, generator=generator)
        return model

    reference, model = make(), make()
    parameters = list(reference.parameters())
    first, second = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step), parameters)
        with torch.no_grad():
            for parameter, m, v, gradient in zip(parameters, first, second, gradients, strict=True):
                m.mul_(0.9).add_(0.1 * gradient)
                v.mul_(0.999).add_(0.001 * gradient.square())
                update = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
                parameter.mul_(1 - 1e-2 * 0.01)
                parameter.sub_(1e-2 * parameter.norm() / update.norm() * update)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-2, optimizer=baselines.LAMB(eps=1e-12)))
    assert close(model, reference)


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(task, tmp_path, optimizer):
    settings = {"n_steps": 7, "optimizer": optimizer, "checkpoint_every": 2, "seed": 5, "warmup": 3}
    settings |= {"learning_rate": 1e-2, "penalties": [baselines.JacobianPenalty()], "clip_norm": 1.0}
    assert_resumes_bit_for_bit(dropout_model, task, tmp_path, **settings)


def test_the_diverged_step_of_sam_is_not_applied(task):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, tokens):
            return (self.weight * torch.inf).log() + torch.zeros(*tokens.shape, 32)

    model = Failing()
    (record,) = wb.train(model, task, n_steps=3, optimizer=baselines.SAM())
    assert record.cause == "non-finite"
    assert torch.equal(model.weight, torch.ones(32))


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_hooks_on_the_inner_optimizer_run_at_each_update(make_model, task, optimizer):
    model, seen = make_model(), []
    optimizer = optimizer(list(model.parameters()))
    inner = getattr(optimizer, "base_optimizer", optimizer)
    inner.register_step_pre_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
    list(wb.train(model, task, n_steps=2, optimizer=optimizer))
    assert len(seen) == 2
    # When the hook runs, SAM has restored the parameters.
    assert all(torch.equal(a, b) for a, b in zip(seen[0], make_model().parameters(), strict=True))


@pytest.mark.parametrize("base", ["Nothing", "LBFGS"])
def test_the_base_of_sam_is_an_optimizer_with_one_update_per_step(base):
    with pytest.raises(OptionError, check=about("base", base)):
        baselines.SAM(base=base)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sam_in_float16_is_rejected_and_penalties_train_on_cuda(make_model, task):
    with pytest.raises(OptionError, check=about("precision", "float16")):
        wb.train(make_model().cuda(), task, n_steps=1, optimizer=baselines.SAM(), precision="float16")
    penalties = [baselines.GradientPenalty(), baselines.JacobianPenalty(), baselines.RandomL2()]
    for optimizer in ALL:
        for precision in ("float32", "bfloat16"):
            settings = {"optimizer": optimizer, "precision": precision, "penalties": penalties}
            records = list(wb.train(make_model().cuda(), task, n_steps=3, learning_rate=1e-3, **settings))
            assert np.isfinite([record.auxiliary_loss for record in records]).all()


MuP = wb.baselines.MuP
WIDTHS = (32, 64, 128, 256)


def outputs_of(model, tokens):
    """Return the logits and the last state of the residual stream."""
    seen = []
    handle = model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        logits = model(tokens)
    handle.remove()
    return logits, seen[0]


def growth(norm, task, parametrize):
    """Return the slopes of the changes of logits and stream in five steps over the width, in logarithms."""
    tokens, changes = task.batch(-1)[0], []
    for width in WIDTHS:
        model = wb.zoo.transformer(
            norm, d_model=width, n_layers=2, n_heads=2, vocab_size=32, max_length=16, init_std=0.05
        )
        settings = parametrize(model)
        before = outputs_of(model, tokens)
        list(wb.train(model, task, n_steps=5, **settings))
        changes.append([float((b - a).abs().mean()) for a, b in zip(before, outputs_of(model, tokens), strict=True)])
    return np.polyfit(np.log(WIDTHS), np.log(changes), 1)[0]


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("norm", ["none", "pre_ln"])
def test_changes_of_activations_do_not_depend_on_the_width(task, norm):
    """The coordinate check of Yang et al. 2022, appendix D.1; with the standard rule the changes grow."""

    def with_mup(model):
        MuP(32).apply(model)
        return {"optimizer": MuP(32).optimizer(model, 1e-2)}

    def standard(model):
        with torch.no_grad():  # LeCun initialization, which is the same at the base width
            for weight in [*hidden_matrices(model), model.head.weight]:
                weight.mul_(math.sqrt(32 / weight.shape[1] * (weight.shape[1] / model.config.d_model)))
        return {"learning_rate": 1e-2}

    assert np.abs(growth(norm, task, with_mup)).max() < 0.3
    logits, stream = growth(norm, task, standard)
    assert logits > 0.2
    assert stream > 0.8


def test_at_the_base_width_nothing_changes(make_model, task):
    model, standard = make_model("none"), make_model("none")
    MuP(16).apply(model)
    assert same_weights(model, standard)
    list(wb.train(model, task, n_steps=4, optimizer=MuP(16).optimizer(model, 1e-2)))
    list(wb.train(standard, task, n_steps=4, learning_rate=1e-2))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), standard.parameters(), strict=True))


def test_initial_values_learning_rates_and_multipliers(make_model):
    model, standard = make_model(d_model=64), make_model(d_model=64)
    tokens = torch.arange(12)[None]
    MuP(16).apply(model)
    assert torch.equal(model.token_embedding.weight, standard.token_embedding.weight)
    assert torch.allclose(model.blocks[1].mlp.down.weight, standard.blocks[1].mlp.down.weight / 2)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.head(x), standard.head(x) / 4)
    attention, expected = model.blocks[0].attention, standard.blocks[0].attention
    q, k = (layer(x) / 2 for layer in (expected.query, expected.key))
    # The logits are q.k sqrt(8) / 32 for heads of 32 features, and 8 features at the base width.
    assert torch.allclose(attention.query(x) @ attention.key(x).T / math.sqrt(32), q @ k.T * math.sqrt(8) / 32)
    optimizer = MuP(16).optimizer(model, 1e-2)(list(model.parameters()))
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        is_hidden = name.startswith("blocks.") and weight.ndim == 2
        assert rates[id(weight)] == pytest.approx((2.5e-3, 0.04) if is_hidden else (1e-2, 0.01)), name
    assert model(tokens).shape == standard(tokens).shape


def test_a_norm_of_the_queries_does_not_undo_the_scale(make_model):
    model, standard = make_model(d_model=64, qk_norm=True), make_model(d_model=64, qk_norm=True)
    MuP(16).apply(model)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    scaled, reference = model.blocks[0].attention, standard.blocks[0].attention
    layers = (reference.query, reference.key, reference.value)
    heads = [layer(x).unflatten(-1, (2, 32)).transpose(1, 2) for layer in layers]
    q, k, v = reference.query_norm(heads[0]), reference.key_norm(heads[1]), heads[2] / 2
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(8) / 32)
    expected = reference.out(attended.transpose(1, 2).flatten(2)) / 2
    assert torch.allclose(scaled(x), expected, atol=1e-6)


def test_removing_it_keeps_the_function_of_the_model(make_model, task, tmp_path):
    model = make_model(d_model=32)
    remove = MuP(16).apply(model)
    list(wb.train(model, task, n_steps=3, optimizer=MuP(16).optimizer(model, 1e-2)))
    tokens = task.batch(9)[0]
    expected = model(tokens)
    remove()
    assert torch.allclose(model(tokens), expected, atol=1e-6)
    wb.save_checkpoint(model, tmp_path)
    assert torch.allclose(wb.open_checkpoint(tmp_path).model(tokens), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: wb.zoo.mamba(d_model=16, n_layers=2), about("model", "Mamba")),
        (lambda: wb.zoo.transformer("none", d_model=16, initialization="rezero"), about("initialization", "rezero")),
        (lambda: wb.zoo.gpt2_style(d_model=16), about("ties_embeddings", True)),
    ],
)
def test_unsuitable_models_are_rejected(make, error):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OptionError, check=error):
        MuP().apply(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_is_parametrized_once(make_model):
    model = make_model(d_model=32)
    MuP(16).apply(model)
    with pytest.raises(OptionError, check=says("are parametrized already; remove that first")):
        MuP(16).apply(model)
