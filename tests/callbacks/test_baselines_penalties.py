import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import assert_resumes_bit_for_bit
from workbench.callbacks.baselines.penalties import PenaltyTerms, Stream, pulled_back_square
from workbench.errors import AnatomyError, OptionError

baselines = wb.baselines
ALL = [baselines.GradientPenalty(), baselines.RandomL2(), baselines.JacobianPenalty(), baselines.ActivationVariance()]


def name_of(penalty):
    return type(penalty).__name__


def explicit_pass(model, tokens):
    """Return the logits and the residual stream of an explicit forward pass."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = model.token_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))
        entering, leaving = [], []
        for block in model.blocks:
            entering.append(x)
            x = block(x)
            leaving.append(x)
        logits = model.head(model.final_norm(x))
    return logits, Stream(tuple(entering), tuple(leaving))


def value_of(penalty, model, batch, *, step=0, seed=0):
    tokens, targets = batch
    terms = PenaltyTerms([penalty], model=model, seed=seed)
    terms.read_anatomy(tokens)
    with terms.watch(step) as penalty_of:
        logits = model(tokens)
        return penalty_of(cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.fixture
def batch(task):
    tokens, targets = task.batch(0)
    return tokens[:4], targets[:4]


def test_the_gradient_penalty_is_the_mean_squared_gradient_of_sequences(make_model, batch):
    model = make_model("none", init_std=0.3)
    total = 0.0
    for tokens, targets in zip(*batch, strict=True):
        logits, stream = explicit_pass(model, tokens[None])
        (gradient,) = torch.autograd.grad(cross_entropy(logits.flatten(0, 1), targets), stream.entering[0])
        total += float(gradient.square().sum())
    value = value_of(baselines.GradientPenalty(0.1), model, batch)
    assert value.item() == pytest.approx(0.1 * total / len(batch[0]), rel=1e-4)


def test_the_sum_over_a_basis_is_the_squared_norm_of_the_jacobian(make_model):
    block = make_model("none", d_model=6, n_heads=2, init_std=0.5).blocks[0].double()
    x = torch.randn(1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    dense = torch.autograd.functional.jacobian(block, x).reshape(18, 18)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y = block(x)
    basis = torch.eye(18, dtype=torch.float64).view(18, 1, 3, 6)
    squares = torch.stack([pulled_back_square(x, y, direction) for direction in basis])
    assert squares.sum().item() == pytest.approx(float(dense.square().sum()), rel=1e-6)


@pytest.mark.medium
def test_the_jacobian_penalty_estimates_the_dense_norm_without_bias(make_model, batch):
    model = make_model("none", d_model=6, n_heads=2, init_std=0.5)
    tokens, targets = batch[0][:2], batch[1][:2]
    _, stream = explicit_pass(model, tokens)
    expected = []
    for block, x in zip(model.blocks, stream.entering, strict=True):
        squares = [torch.autograd.functional.jacobian(block, state[None]).square().sum() for state in x.detach()]
        expected.append(float(sum(squares)) / x.numel())
    penalty = baselines.JacobianPenalty(1.0, layers="all", n_projections=16)
    draws = [value_of(penalty, model, (tokens, targets), step=step).item() for step in range(40)]
    error = np.std(draws) / math.sqrt(len(draws))
    assert abs(np.mean(draws) - np.mean(expected)) < 4 * error
    assert error < 0.02 * np.mean(expected)


def test_the_variance_agrees_with_numpy(make_model, batch):
    model = make_model("none", init_std=0.3)
    _, stream = explicit_pass(model, batch[0])
    states = [state.detach().flatten(0, 1).numpy() for state in stream.leaving]
    expected = np.mean([state.var(axis=0).mean() for state in states])
    value = value_of(baselines.ActivationVariance(1.0, layers="all"), model, batch)
    assert value.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.medium
def test_random_l2_is_or_estimates_the_mean_square(make_model, batch):
    model = make_model("none", init_std=0.3)
    _, stream = explicit_pass(model, batch[0])
    expected = np.mean([state.square().mean().item() for state in stream.leaving])
    complete = baselines.RandomL2(1.0, layers="all", token_share=1.0)
    assert value_of(complete, model, batch).item() == pytest.approx(expected, rel=1e-4)
    part = baselines.RandomL2(1.0, layers="all", token_share=0.5)
    draws = [value_of(part, model, batch, step=step).item() for step in range(60)]
    assert len(set(draws)) == 60
    assert np.mean(draws) == pytest.approx(expected, rel=0.03)


@pytest.mark.medium
def test_half_of_the_layers_are_drawn_in_each_step(make_model, batch):
    model = make_model("none", n_layers=4, init_std=0.3)
    _, stream = explicit_pass(model, batch[0])
    by_layer = [state.square().mean().item() for state in stream.leaving]
    pairs = np.array([(by_layer[i] + by_layer[j]) / 2 for i in range(4) for j in range(i)])
    penalty = baselines.RandomL2(1.0, token_share=1.0)
    values = np.array([value_of(penalty, model, batch, step=step).item() for step in range(40)])
    is_of_pair = np.isclose(values[:, None], pairs, rtol=1e-4)
    assert is_of_pair.any(axis=1).all()
    assert is_of_pair.any(axis=0).all()


@pytest.mark.parametrize("penalty", ALL, ids=name_of)
def test_the_gradient_of_the_penalty_against_finite_differences(make_model, batch, penalty):
    """Differences are taken along the gradient, in double precision."""
    model = make_model("none", init_std=0.3).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(value_of(penalty, model, batch), parameters, allow_unused=True)
    direction = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    square = sum(float(g.square().sum()) for g in direction)
    assert square > 0
    size, values = 1e-4 / math.sqrt(square), []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, step in zip(parameters, direction, strict=True):
                parameter.add_(step, alpha=sign * size)
        values.append(value_of(penalty, model, batch).item())
        with torch.no_grad():
            for parameter, step in zip(parameters, direction, strict=True):
                parameter.add_(step, alpha=-sign * size)
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(square, rel=1e-4)


def test_the_loop_adds_the_penalty_to_the_loss_and_records_it_separately(make_model, task):
    penalty = baselines.GradientPenalty(0.5)
    model, reference = make_model("none"), make_model("none")
    record = next(wb.train(model, task, n_steps=1, optimizer="SGD", learning_rate=0.1, penalties=[penalty]))
    tokens, targets = task.batch(0)
    logits, stream = explicit_pass(reference, tokens)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(loss, stream.entering[0], create_graph=True)
    term = 0.5 * len(tokens) * gradient.square().sum()
    (loss + term).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert record.loss == pytest.approx(loss.item(), rel=1e-6)
    assert record.auxiliary_loss == pytest.approx(term.item(), rel=1e-5)
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-7), name


@pytest.mark.parametrize("penalties", [(), [type(penalty)(0.0) for penalty in ALL]], ids=["none", "all off"])
def test_without_active_penalties_training_is_bitwise_identical(task, penalties):
    model, control = dropout_model(), dropout_model()
    records = list(wb.train(model, task, n_steps=5, penalties=penalties))
    expected = list(wb.train(control, task, n_steps=5))
    assert [record.loss for record in records] == [record.loss for record in expected]
    assert same_weights(model, control)
    assert math.isnan(records[-1].auxiliary_loss)


def test_penalties_do_not_change_dropout_or_global_random_states(task):
    before = torch.get_rng_state()
    penalties = [baselines.RandomL2(1e-12), baselines.JacobianPenalty(1e-12)]
    with_them = [record.loss for record in wb.train(dropout_model(), task, n_steps=5, seed=7, penalties=penalties)]
    without = [record.loss for record in wb.train(dropout_model(), task, n_steps=5, seed=7)]
    assert np.allclose(with_them, without, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def test_penalties_are_added_to_the_auxiliary_loss_of_the_model(task):
    model = wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=16, n_experts=4, init_std=0.3)
    of_model = next(wb.train(model, task, n_steps=1, learning_rate=1e-9)).auxiliary_loss
    penalty = baselines.RandomL2(2.0, layers="all", token_share=1.0)
    both = next(wb.train(model, task, n_steps=1, learning_rate=1e-9, penalties=[penalty])).auxiliary_loss
    assert both == pytest.approx(of_model + value_of(penalty, model, task.batch(0)).item(), rel=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ["AdamW", "LBFGS"])
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(task, tmp_path, optimizer):
    penalties = [baselines.RandomL2(0.5), baselines.JacobianPenalty(0.1), baselines.GradientPenalty(interval=2)]
    settings = {"n_steps": 6, "checkpoint_every": 2, "penalties": penalties, "optimizer": optimizer, "seed": 5}
    assert_resumes_bit_for_bit(dropout_model, task, tmp_path, **settings)


@pytest.mark.medium
def test_penalties_act_in_the_closure_of_lbfgs(make_model, task):
    settings = {"n_steps": 3, "optimizer": "LBFGS", "learning_rate": 0.1}
    model, control = make_model("none", init_std=0.2), make_model("none", init_std=0.2)
    penalty = baselines.RandomL2(1.0, layers="all", token_share=1.0)
    list(wb.train(model, task, penalties=[penalty], **settings))
    list(wb.train(control, task, **settings))
    assert value_of(penalty, model, task.batch(9)) < 0.5 * value_of(penalty, control, task.batch(9))


def test_two_penalties_of_a_kind_are_both_described(make_model):
    terms = PenaltyTerms([baselines.RandomL2(0.5), baselines.RandomL2(0.25, layers="all")], model=make_model())
    assert terms.describe() == {
        "RandomL2": {"coefficient": 0.5, "interval": 1, "layers": "half", "token_share": 0.5},
        "RandomL2 2": {"coefficient": 0.25, "interval": 1, "layers": "all", "token_share": 0.5},
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "mamba", "vit", "rms_norm"])
@pytest.mark.parametrize("penalty", ALL, ids=name_of)
def test_other_architectures_train_with_every_penalty(make_model, task, family, penalty):
    import transformers

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    makers = {
        "gpt2": dropout_model,
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **small)),
        "mamba": lambda: wb.zoo.mamba(d_model=16, n_layers=2, vocab_size=32, max_length=16),
        "vit": lambda: wb.zoo.vit(d_model=16, n_layers=2, n_heads=2, image_size=8, n_channels=1),
        "rms_norm": lambda: make_model("rms_norm"),
    }
    data = task
    if family == "vit":
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        data = [(images, torch.arange(8))] * 3
    records = list(wb.train(makers[family](), data, n_steps=3, penalties=[penalty]))
    assert len(records) == 3
    assert all(math.isfinite(record.auxiliary_loss) and record.auxiliary_loss > 0 for record in records)


def test_penalties_with_a_frozen_embedding(make_model, task):
    model = make_model("none")
    model.token_embedding.requires_grad_(False)
    model.position_embedding.requires_grad_(False)
    record = next(wb.train(model, task, n_steps=1, penalties=ALL))
    assert record.auxiliary_loss > 0


def test_a_model_without_blocks_is_rejected_before_a_store_is_created(task, tmp_path):
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    with pytest.raises(AnatomyError):
        next(wb.train(model, task, n_steps=3, store=tmp_path / "a.zarr", penalties=[baselines.RandomL2()]))
    assert not (tmp_path / "a.zarr").exists()


def test_unknown_blocks_and_blocks_that_do_not_run_raise(make_model, task):
    model = make_model()
    terms = PenaltyTerms([baselines.RandomL2()], model=model)
    with pytest.raises(AnatomyError, check=says("The residual blocks of the model are unknown; call")), terms.watch(0):
        pass
    terms.read_anatomy(task.batch(0)[0])
    with (
        terms.watch(0) as penalty_of,
        pytest.raises(AnatomyError, check=says("Not all blocks of Transformer ran as modules in this step,")),
    ):
        penalty_of(torch.zeros(()))


def test_invalid_lists_are_rejected(make_model, task):
    with pytest.raises(OptionError, check=about("penalties", "RandomL2")):
        wb.train(make_model(), task, n_steps=1, penalties=baselines.RandomL2())
    with pytest.raises(OptionError, check=about("penalties", 0.1)):
        wb.train(make_model(), task, n_steps=1, penalties=[0.1])
    with pytest.raises(OptionError, check=about("token_share", 0.0)):  # of a class that users may derive from
        baselines.RandomL2(token_share=0.0)
