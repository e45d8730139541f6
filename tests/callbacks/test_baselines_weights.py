import pytest
import torch
from torch.nn.utils import parametrize

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from workbench.errors import CheckpointError, OptionError

baselines = wb.baselines
BOTH = [baselines.SpectralNorm(), baselines.WeightNorm()]


def name_of(parametrization):
    return type(parametrization).__name__


def block_matrices(model):
    return [m.weight for block in model.blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]


def norms_of(model):
    return [float(torch.linalg.matrix_norm(weight.detach(), ord=2)) for weight in block_matrices(model.eval())]


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("rate", [1e-2, 5e-2])
def test_spectral_norm_bounds_the_linear_maps_of_the_blocks_during_training(make_model, task, rate):
    model, control = make_model("none", d_model=32), make_model("none", d_model=32)
    baselines.SpectralNorm().apply(model)
    assert norms_of(model) == pytest.approx([1.0] * 12, abs=1e-4)
    norms = []
    for _ in wb.train(model, task, n_steps=30, learning_rate=rate):
        norms.append(max(norms_of(model)))
        model.train()
    assert max(norms) < 1.1
    assert norms[-1] < 1.01
    list(wb.train(control, task, n_steps=30, learning_rate=rate))
    assert max(norms_of(control)) > 1.5  # otherwise there is nothing to bound


def test_reading_a_weight_in_eval_mode_changes_no_state(make_model, task):
    model = make_model("none")
    baselines.SpectralNorm().apply(model)
    with torch.no_grad():
        model.blocks[0].mlp.up.parametrizations.weight.original.add_(0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()(task.batch(0)[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.train()(task.batch(0)[0])
    assert not torch.equal(
        model.blocks[0].mlp.up.parametrizations.weight[0].direction,
        before["blocks.0.mlp.up.parametrizations.weight.0.direction"],
    )


def test_the_gradient_includes_that_of_the_singular_value(make_model):
    model = make_model("none", init_std=0.3).double()
    weight = model.blocks[0].mlp.up.weight.detach().clone().requires_grad_()
    random = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((random * weight / torch.linalg.matrix_norm(weight, ord=2)).sum(), weight)
    baselines.SpectralNorm(100).apply(model)
    (random * model.blocks[0].mlp.up.weight).sum().backward()
    found = model.blocks[0].mlp.up.parametrizations.weight.original.grad
    assert torch.allclose(found, expected, atol=1e-8)


def test_weight_norm_changes_nothing_at_first(make_model, task):
    model = make_model("none")
    tokens, _ = task.batch(0)
    before = model(tokens)
    baselines.WeightNorm().apply(model)
    assert torch.allclose(model(tokens), before, atol=1e-6)


@pytest.mark.parametrize("parametrization", BOTH, ids=name_of)
def test_removing_a_parametrization_keeps_the_function_of_the_model(make_model, task, parametrization, tmp_path):
    model = make_model("none")
    remove = parametrization.apply(model)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-2))
    tokens = task.batch(9)[0]
    expected, copied = model.eval()(tokens), baselines.plain_copy(model)
    assert torch.allclose(copied(tokens), expected, atol=1e-6)
    assert any(parametrize.is_parametrized(m) for m in model.modules())
    remove()
    assert torch.allclose(model(tokens), expected, atol=1e-6)
    assert model.state_dict().keys() == make_model("none").state_dict().keys()
    assert same_weights(copied, model)
    wb.save_checkpoint(model, tmp_path)
    assert same_weights(wb.open_checkpoint(tmp_path).model, model)


def test_a_parametrized_model_is_saved_only_in_checkpoints_of_a_run(make_model, task, tmp_path):
    model = make_model("none")
    baselines.SpectralNorm().apply(model)
    with pytest.raises(CheckpointError, check=says("The weights of the model are parametrized; save")):
        wb.save_checkpoint(model, tmp_path)
    list(wb.train(model, task, n_steps=2, checkpoints=tmp_path, checkpoint_every=2))
    opened, tokens = wb.open_checkpoint(tmp_path / "step-00000002"), task.batch(0)[0]
    assert torch.allclose(opened.model(tokens), model.eval()(tokens), atol=1e-6)


@pytest.mark.parametrize("parametrization", BOTH, ids=name_of)
def test_spectra_are_those_of_the_effective_weights(make_model, task, parametrization):
    model = make_model("none", init_std=0.3)
    parametrization.apply(model)
    seen = next(wb.train(model, task, n_steps=1, spectra_every=1, profile_options={"n_snapshots": 96})).spectra
    untrained = make_model("none", init_std=0.3)
    parametrization.apply(untrained)
    expected = wb.profile(baselines.plain_copy(untrained), task.probe(96), n_snapshots=96, progress=False)
    assert abs(seen["eigenvalue"][0] - expected["eigenvalue"]).max() < 1e-3 * abs(expected["eigenvalue"]).max()


@pytest.mark.parametrize("parametrization", BOTH, ids=name_of)
def test_hugging_face_models_can_be_parametrized(task, parametrization):
    model = dropout_model()
    with pytest.raises(OptionError, check=says("is not a model of the zoo; pass inputs= to find its")):
        parametrization.apply(model)
    parametrization.apply(model, task.batch(0)[0])
    assert len(list(wb.train(model, task, n_steps=3))) == 3


def test_models_that_cannot_be_parametrized_are_rejected(make_model):
    model = make_model()
    baselines.WeightNorm().apply(model)
    with pytest.raises(OptionError, check=says("are parametrized already; remove that first")):
        baselines.SpectralNorm().apply(model)
    zero = wb.zoo.transformer("none", d_model=16, n_heads=2, n_layers=2, initialization="fixup")
    with pytest.raises(OptionError, check=says("is zero and has no norm to scale to")):
        baselines.SpectralNorm().apply(zero)
    assert not any(parametrize.is_parametrized(m) for m in zero.modules())
    with pytest.raises(OptionError, check=about("n_iterations", 0)):
        baselines.SpectralNorm(0)
