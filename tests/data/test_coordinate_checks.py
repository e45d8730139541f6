"""Tests of the coordinate check: its layer groups, and that it distinguishes muP from the standard parametrization."""

import math

import numpy as np
import pytest
import torch
from coordinate_checks import LARGEST_EXPONENT, coordinate_check, coordinate_sizes, layer_outputs
from size_ladder import LadderTrainer, Rung

import workbench as wb
from workbench.models.anatomy import read_anatomy
from workbench.scaling.designs import design

pytestmark = pytest.mark.medium

OPTIONS = {"d_model": 128, "n_heads": 8, "n_layers": 2, "vocab_size": 64, "max_length": 16}
RUNGS = [Rung(width, 2) for width in (16, 32, 64)]
RATE, SEEDS = 3e-3, (1, 2)


def task(seed):
    return wb.tasks.associative_recall(length=16, vocab_size=64, n_pairs=3, batch_size=8, seed=seed)


def trainer(parametrization=None, **options):
    return LadderTrainer(design({**OPTIONS, **options}), task, {}, parametrization)


@pytest.fixture(scope="module")
def standard():
    return coordinate_check(trainer(), RUNGS, SEEDS, learning_rate=RATE)


@pytest.fixture(scope="module")
def mup():
    return coordinate_check(trainer(wb.baselines.MuP(base_width=16, base_heads=1)), RUNGS, SEEDS, learning_rate=RATE)


def test_the_standard_parametrization_is_flagged(standard):
    assert standard["coordinate_state"] == "grows"
    assert not standard["passes_coordinate_check"]
    assert standard["coordinate_reason"].item().startswith("Updates grow with the width in ")
    grows = standard["layer_group"].values[standard["coordinate_exponent_low"].values > LARGEST_EXPONENT]
    assert {"logits", "block 1 mlp", "block 0 attention scores"} <= set(grows.tolist())
    assert "embedding" not in grows  # a lookup, whose entries Adam changes by the learning rate


def test_mup_passes(mup):
    assert mup["coordinate_state"] == "passes"
    assert mup["passes_coordinate_check"]
    assert np.abs(mup["coordinate_exponent"]).max() < 0.4
    assert mup["coordinate_reason"].item().startswith("Updates have about the same magnitude at every width")


def test_at_the_base_width_the_two_are_the_same(standard, mup):
    np.testing.assert_allclose(standard["update_size"][0], mup["update_size"][0], rtol=1e-5)


def test_initial_outputs_grow_only_in_the_standard_parametrization(standard, mup):
    """With the same standard deviation at every width, branches are larger in wide models; in muP they are not."""
    of_mlp = standard["layer_group"].values == "block 0 mlp"
    assert standard["initial_exponent"].values[of_mlp].item() == pytest.approx(
        1, abs=0.25
    )  # two maps, each by width^(1/2)
    assert abs(mup["initial_exponent"].values[of_mlp].item()) < 0.25


def test_the_exponent_is_the_slope_of_the_mean_logarithm(standard):
    logarithm = np.log(standard["update_size_of_seed"]).mean(("step", "seed"))
    x = np.log(standard["width"].values)
    slopes = np.polyfit(x, logarithm.transpose("rung", "layer_group").values, 1)[0]
    np.testing.assert_allclose(standard["coordinate_exponent"], slopes, rtol=1e-8)
    np.testing.assert_allclose(
        standard["update_size"], np.exp(np.log(standard["update_size_of_seed"]).mean("seed")), rtol=1e-12
    )


def test_the_first_update_of_adam_changes_the_embedding_by_the_learning_rate():
    """Every entry with a gradient changes by the learning rate; the changes of token and position add up."""
    _, changes = coordinate_sizes(trainer(), Rung(16, 2), 1, learning_rate=1e-4, n_steps=1)
    assert changes["embedding"][0] == pytest.approx(math.sqrt(2) * 1e-4, rel=0.25)


def test_outputs_are_those_of_the_parts_and_the_model_is_not_changed():
    model = wb.zoo.transformer(norm="pre_ln", **{**OPTIONS, "d_model": 32, "n_heads": 2})
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    anatomy = read_anatomy(model, tokens)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = layer_outputs(model, tokens, anatomy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training
    with torch.no_grad():
        block = model.blocks[0]
        x = outputs["embedding"]
        normed = block.attention_norm(x)
        torch.testing.assert_close(outputs["block 0 attention"], block.attention(normed))
        torch.testing.assert_close(outputs["block 0 stream"], block(x))
        q, k = (
            linear(normed).unflatten(-1, (2, 16)).transpose(1, 2)
            for linear in (block.attention.query, block.attention.key)
        )
        torch.testing.assert_close(outputs["block 0 attention scores"], q @ k.mT / 4)
        torch.testing.assert_close(outputs["logits"], model(tokens))
    assert len(outputs) == 2 + 2 * 4


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gpt2", {"attention scores", "attn", "mlp", "stream"}),
        ("llama-3-8b", {"attention scores", "self_attn", "mlp", "stream"}),
        ("mixtral-8x7b", {"attention scores", "self_attn", "mlp", "stream"}),
        ("mamba-130m", {"mixer", "stream"}),
    ],
)
def test_models_of_other_libraries_have_the_same_groups(name, parts):
    of = design(name)
    model = of.build(of.nearest_width(64), 2, vocabulary=32)
    tokens = torch.arange(8)[None]
    outputs = layer_outputs(model, tokens, read_anatomy(model, tokens))
    expected = {f"block {i} {part}" for i in (0, 1) for part in parts}
    assert set(outputs) == {"embedding", "logits", *expected}


def test_a_run_that_diverges_is_reported():
    check = coordinate_check(trainer(norm="none"), RUNGS[:1], (1,), learning_rate=30.0, n_steps=4)
    assert check["coordinate_state"] == "diverged"
    assert check["coordinate_reason"].item().startswith("At width 16 the run diverged at update ")
    assert np.isnan(check["update_size"].values[0, -1]).all()


def test_too_few_widths_have_no_verdict():
    check = coordinate_check(trainer(), RUNGS[:2], (1,), learning_rate=RATE, n_steps=1)
    assert check["coordinate_state"] == "too few widths"
    assert not check["passes_coordinate_check"]
