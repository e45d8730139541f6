import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import workbench as wb
from tests.small_training import same_weights
from tests.training.test_resuming import run_to
from workbench.callbacks.baselines.mup import hidden_matrices
from workbench.errors import OptionError

MuP = wb.baselines.MuP
WIDTHS = (32, 64, 128, 256)


def look(model, tokens):
    """Logits and the last state of the stream."""
    seen = []
    handle = model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        logits = model(tokens)
    handle.remove()
    return logits, seen[0]


def changes(norm, task, parametrize):
    """How far logits and stream move in five steps at each width, and the slope over the width, both logarithmic."""
    tokens, moved = task.batch(-1)[0], []
    for width in WIDTHS:
        model = wb.zoo.transformer(
            norm, d_model=width, n_layers=2, n_heads=2, vocab_size=32, max_length=16, init_std=0.05
        )
        settings = parametrize(model)
        before = look(model, tokens)
        list(wb.train(model, task, n_steps=5, **settings))
        moved.append([float((b - a).abs().mean()) for a, b in zip(before, look(model, tokens), strict=True)])
    return np.polyfit(np.log(WIDTHS), np.log(moved), 1)[0]


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("norm", ["none", "pre_ln"])
def test_activations_move_alike_at_every_width(task, norm):
    """The coordinate check of Yang et al. 2022, appendix D.1: with muP flat, with the standard rule growing."""

    def with_mup(model):
        MuP(32).apply(model)
        return {"optimizer": MuP(32).optimizer(model, 1e-2)}

    def standard(model):
        with torch.no_grad():  # LeCun's rule, equal at the base width
            for weight in [*hidden_matrices(model), model.head.weight]:
                weight.mul_(math.sqrt(32 / weight.shape[1] * (weight.shape[1] / model.config.d_model)))
        return {"learning_rate": 1e-2}

    assert np.abs(changes(norm, task, with_mup)).max() < 0.3
    logits, stream = changes(norm, task, standard)
    assert logits > 0.2
    assert stream > 0.8


def test_at_the_base_width_nothing_changes(make_model, task):
    model, plain = make_model("none"), make_model("none")
    MuP(16).apply(model)
    assert same_weights(model, plain)
    list(wb.train(model, task, n_steps=4, optimizer=MuP(16).optimizer(model, 1e-2)))
    list(wb.train(plain, task, n_steps=4, learning_rate=1e-2))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_sizes_rates_and_multipliers(make_model):
    model, plain = make_model(d_model=64), make_model(d_model=64)
    tokens = torch.arange(12)[None]
    MuP(16).apply(model)
    assert torch.equal(model.token_embedding.weight, plain.token_embedding.weight)
    assert torch.allclose(model.blocks[1].mlp.down.weight, plain.blocks[1].mlp.down.weight / 2)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.head(x), plain.head(x) / 4)
    attention, expected = model.blocks[0].attention, plain.blocks[0].attention
    q, k = (layer(x) / 2 for layer in (expected.query, expected.key))
    # logits q.k sqrt(8) / 32 with heads of 32 features instead of 8 at the base width
    assert torch.allclose(attention.query(x) @ attention.key(x).T / math.sqrt(32), q @ k.T * math.sqrt(8) / 32)
    optimizer = MuP(16).optimizer(model, 1e-2)(list(model.parameters()))
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        is_hidden = name.startswith("blocks.") and weight.ndim == 2
        assert rates[id(weight)] == pytest.approx((2.5e-3, 0.04) if is_hidden else (1e-2, 0.01)), name
    assert model(tokens).shape == plain(tokens).shape


def test_more_heads_of_one_width_keep_their_scale(make_model):
    model, plain = make_model(d_model=64, n_heads=8), make_model(d_model=64, n_heads=8)
    MuP(16, base_heads=2).apply(model)
    assert torch.allclose(model.blocks[0].attention.query.weight, plain.blocks[0].attention.query.weight / 2)


def test_a_norm_of_the_queries_does_not_undo_the_scale(make_model):
    model, plain = make_model(d_model=64, qk_norm=True), make_model(d_model=64, qk_norm=True)
    MuP(16).apply(model)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    ours, theirs = model.blocks[0].attention, plain.blocks[0].attention
    heads = [layer(x).unflatten(-1, (2, 32)).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value)]
    q, k, v = theirs.query_norm(heads[0]), theirs.key_norm(heads[1]), heads[2] / 2
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(8) / 32)
    expected = theirs.out(mixed.transpose(1, 2).flatten(2)) / 2
    assert torch.allclose(ours(x), expected, atol=1e-6)


def test_warm_up_keeps_the_ratio_of_the_rates(make_model, task):
    model = make_model(d_model=32)
    MuP(16).apply(model)
    made = []
    factory = MuP(16).optimizer(model, 1e-2)
    rates = []
    run = wb.train(model, task, n_steps=4, warmup=4, optimizer=lambda weights: made.append(factory(weights)) or made[0])
    for record in run:
        rates.append([group["lr"] for group in made[0].param_groups])
        assert record.learning_rate == rates[-1][0]
    assert np.allclose(rates[:-1], [[0.0025, 0.00125], [0.005, 0.0025], [0.0075, 0.00375]])


def test_stopping_and_resuming_gives_the_bits_of_running_through(make_model, task, tmp_path):
    def prepared():
        model = make_model("none", d_model=32)
        MuP(16).apply(model)
        return model, {"n_steps": 6, "checkpoint_every": 2, "optimizer": MuP(16).optimizer(model, 1e-2)}

    through, settings = prepared()
    list(wb.train(through, task, checkpoints=tmp_path / "a", **settings))
    model, settings = prepared()
    run_to(3, model, task, checkpoints=tmp_path / "b", **settings)
    resumed, settings = prepared()
    list(wb.train(resumed, task, checkpoints=tmp_path / "b", resume=True, **settings))
    assert same_weights(resumed, through)


def test_taking_it_off_leaves_the_model_as_it_acts(make_model, task, tmp_path):
    model = make_model(d_model=32)
    undo = MuP(16).apply(model)
    list(wb.train(model, task, n_steps=3, optimizer=MuP(16).optimizer(model, 1e-2)))
    tokens = task.batch(9)[0]
    expected = model(tokens)
    undo()
    assert torch.allclose(model(tokens), expected, atol=1e-6)
    wb.save_checkpoint(model, tmp_path)
    assert torch.allclose(wb.open_checkpoint(tmp_path).model(tokens), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: wb.zoo.mamba(d_model=16, n_layers=2), "the model is a Mamba; choose another control"),
        (lambda: wb.zoo.transformer("none", d_model=16, initialization="rezero"), "initialization is 'rezero'; choose"),
        (lambda: wb.zoo.gpt2_style(d_model=16), "pass ties_embeddings=False"),
    ],
)
def test_models_that_do_not_fit_are_refused(make, sentence):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OptionError, match=sentence):
        MuP().apply(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_bad_options_are_refused(make_model):
    with pytest.raises(OptionError, match="base_width is 0, expected a whole number of at least 1"):
        MuP(0)
    with pytest.raises(OptionError, match="base_heads is 0, expected a whole number of at least 1"):
        MuP(16, base_heads=0)
    with pytest.raises(OptionError, match="muP's rates are those of Adam, AdamW, not of 'SGD'"):
        MuP(16).optimizer(make_model(), 1e-2, "SGD")
    with pytest.raises(OptionError, match="The learning rate is -1, expected a positive number"):
        MuP(16).optimizer(make_model(), -1)
    model = make_model(d_model=32)
    MuP(16).apply(model)
    with pytest.raises(OptionError, match="parametrized already"):
        MuP(16).apply(model)
