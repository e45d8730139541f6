import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_resuming import run_to
from workbench.callbacks.baselines.mup import hidden_matrices
from workbench.errors import OptionError

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


def test_heads_of_constant_width_are_not_scaled(make_model):
    model, standard = make_model(d_model=64, n_heads=8), make_model(d_model=64, n_heads=8)
    MuP(16, base_heads=2).apply(model)
    assert torch.allclose(model.blocks[0].attention.query.weight, standard.blocks[0].attention.query.weight / 2)


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


def test_warm_up_keeps_the_ratio_of_the_rates(make_model, task):
    model = make_model(d_model=32)
    MuP(16).apply(model)
    optimizers, rates = [], []
    factory = MuP(16).optimizer(model, 1e-2)

    def create(parameters):
        optimizers.append(factory(parameters))
        return optimizers[0]

    for record in wb.train(model, task, n_steps=4, warmup=4, optimizer=create):
        rates.append([group["lr"] for group in optimizers[0].param_groups])
        assert record.learning_rate == rates[-1][0]
    assert np.allclose(rates[:-1], [[0.0025, 0.00125], [0.005, 0.0025], [0.0075, 0.00375]])


def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(make_model, task, tmp_path):
    def prepared():
        model = make_model("none", d_model=32)
        MuP(16).apply(model)
        return model, {"n_steps": 6, "checkpoint_every": 2, "optimizer": MuP(16).optimizer(model, 1e-2)}

    uninterrupted, settings = prepared()
    list(wb.train(uninterrupted, task, checkpoints=tmp_path / "a", **settings))
    model, settings = prepared()
    run_to(3, model, task, checkpoints=tmp_path / "b", **settings)
    resumed, settings = prepared()
    list(wb.train(resumed, task, checkpoints=tmp_path / "b", resume=True, **settings))
    assert same_weights(resumed, uninterrupted)


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


def test_invalid_options_are_rejected(make_model):
    with pytest.raises(OptionError, check=about("base_width", 0)):
        MuP(0)
    with pytest.raises(OptionError, check=about("base_heads", 0)):
        MuP(16, base_heads=0)
    with pytest.raises(OptionError, check=about("name", "SGD", ("Adam", "AdamW"))):
        MuP(16).optimizer(make_model(), 1e-2, "SGD")
    with pytest.raises(OptionError, check=about("rate", -1)):
        MuP(16).optimizer(make_model(), -1)
    model = make_model(d_model=32)
    MuP(16).apply(model)
    with pytest.raises(OptionError, check=says("are parametrized already; remove that parametrization")):
        MuP(16).apply(model)
