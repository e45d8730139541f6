"""Tests of scaling studies: the dataset, agreement with separate measurements, and errors."""

import json
import math

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about
from workbench.errors import OptionError
from workbench.scaling import Design, extrapolated
from workbench.scaling.designs import design
from workbench.scaling.explosion_edges import explosion_edge, pilot_edge
from workbench.scaling.ladder_study import scaling_study
from workbench.scaling.size_ladder import LadderTrainer, Rung, rungs_of
from workbench.scaling.trend import fit_trend

pytestmark = pytest.mark.medium

OPTIONS = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "max_length": 16}
SETTINGS = {"n_steps": 3, "n_coordinate_steps": 2, "n_snapshots": 64, "seeds": (1, 2)}


def task(seed):
    return wb.tasks.associative_recall(length=16, vocab_size=64, n_pairs=3, batch_size=4, seed=seed)


@pytest.fixture(scope="module")
def study():
    state = torch.get_rng_state()
    found = scaling_study(OPTIONS, (8, 16, 24), (2, 3), task=task, measures_target=True, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)
    return found


@pytest.mark.slow
def test_rungs_are_the_widths_at_the_smallest_depth_and_the_depths_at_the_largest_width(study):
    assert study["width"].values.tolist() == [8, 16, 24, 24]
    assert study["depth"].values.tolist() == [2, 2, 2, 3]
    narrow = design(OPTIONS).build(8, 2, vocabulary=64)  # the vocabulary of the task
    assert int(study["n_weights"][0]) == sum(parameter.numel() for parameter in narrow.parameters())
    assert (study.attrs["target_width"], study.attrs["target_depth"]) == (32, 2)


def test_quantities_are_means_over_seeds(study):
    measured = study["measured"]
    assert measured.dims == ("quantity", "rung", "seed")
    assert {"explosion_edge", "near_unit_mass", "spectral_radius", "total_gradient_gain"} <= set(
        study["quantity"].values
    )
    np.testing.assert_allclose(study["near_unit_mass"], measured.sel(quantity="near_unit_mass").mean("seed"))
    edges = measured.sel(quantity="explosion_edge")
    np.testing.assert_allclose(study["explosion_edge"], np.exp(np.log(edges).mean("seed")))
    np.testing.assert_allclose(edges, np.sqrt(study["edge_low_of_seed"] * study["edge_high_of_seed"]))
    assert (study["edge_low"] <= study["explosion_edge"]).all()
    assert (study["explosion_edge"] <= study["edge_high"]).all()


def test_a_study_agrees_with_separate_measurements(study):
    trainer = LadderTrainer(design(OPTIONS), task)
    rung = Rung(16, 2)
    model = trainer.model(rung, 2)
    spectra = wb.profile(model, task(2).probe(64), n_snapshots=64, n_workers=1, progress=False)
    one = study.isel(rung=1).sel(seed=2)
    assert float(one["measured"].sel(quantity="spectral_radius")) == pytest.approx(
        float(spectra["spectral_radius"].mean())
    )
    edge = explosion_edge(trainer, rung, 2, n_steps=3)
    assert float(one["edge_low_of_seed"]) == pytest.approx(edge.low)
    assert float(one["edge_high_of_seed"]) == pytest.approx(edge.high)


def test_edges_of_a_pilot_are_those_of_ten_updates():
    found = scaling_study(
        OPTIONS, (8,), task=task, edge="pilot", **{**SETTINGS, "seeds": (1,), "n_coordinate_steps": 0}
    )
    edge = pilot_edge(LadderTrainer(design(OPTIONS), task), Rung(8, 2), 1)
    assert found["explosion_edge"].item() == pytest.approx(edge.middle)


def test_the_trend_is_fitted_only_to_the_ladder(study):
    for name in study["quantity"].values.tolist():
        one = study.sel(quantity=name)
        rungs = (one["measured"].values, study["width"].values, study["depth"].values)
        bounds = (0, 1) if name.endswith("_mass") else (-math.inf, math.inf)
        expected = fit_trend(*rungs, (32, 2), scale=str(one["scale"].values), bounds=bounds)
        assert float(one["slope"]) == pytest.approx(expected.width.slope)
        assert float(one["depth_slope"]) == pytest.approx(expected.depth.slope)
        if name.endswith("_mass") or name == "explosion_edge":
            assert float(one["at_target"]) == pytest.approx(expected.at_target)
    assert np.isfinite(study["measured_at_target"]).all()
    assert study["is_supported"].dtype == bool


def test_a_study_can_be_extrapolated_to_other_sizes(study):
    near = extrapolated(study, (28, 2)).sel(quantity="explosion_edge")
    far = extrapolated(study, (512, 2)).sel(quantity="explosion_edge")
    assert far["reason"].item().startswith("The target width differs from that of the nearest rung by a factor of 21.3")
    spans = [float(one["at_target_high"] / one["at_target_low"]) for one in (near, far)]
    assert spans[0] < spans[1]


def test_the_curve_begins_at_the_smallest_rung_and_ends_at_the_target(study):
    of_width = study.isel(curve_point=(study["curve_along"] == "width").values)
    assert of_width["curve_width"].values[[0, -1]].tolist() == [8, 32]
    assert set(of_width["curve_depth"].values) == {2}
    end = of_width.sel(quantity="explosion_edge").isel(curve_point=-1)
    np.testing.assert_allclose(end["curve"], study["at_target"].sel(quantity="explosion_edge"), rtol=1e-5)
    of_depth = study.isel(curve_point=(study["curve_along"] == "depth").values)
    assert of_depth["curve_depth"].values[[0, -1]] == pytest.approx([2, 3])


def test_the_coordinate_check_covers_only_the_widths(study):
    is_there = np.isfinite(study["update_size"]).all(("step", "layer_group"))
    assert is_there.values.tolist() == [True, True, True, False]
    assert study["coordinate_state"].item() in ("passes", "grows", "vanishes")
    assert study["update_size"].dims == ("rung", "step", "layer_group")


def test_provenance_and_units(study):
    assert json.loads(study.attrs["seeds"]) == [1, 2]
    assert json.loads(study.attrs["design"])["family"] == "transformer"
    assert {"versions", "created", "duration", "task", "training", "subject"} <= set(study.attrs)
    assert study["explosion_edge"].attrs["units"] == "1"


def test_a_function_is_called_for_each_model_of_the_ladder():
    calls = []

    def make(width, depth, seed):
        calls.append((width, depth, seed))
        return wb.zoo.transformer(d_model=width, n_layers=depth, n_heads=1, vocab_size=64, max_length=16, seed=seed)

    found = scaling_study(
        make, (8, 16), (2,), task=task, edge="none", target_width=32, **{**SETTINGS, "n_coordinate_steps": 0}
    )
    assert {(8, 2, 1), (8, 2, 2), (16, 2, 1), (16, 2, 2)} <= set(calls)
    assert 32 not in {width for width, _, seed in calls if seed}
    assert "explosion_edge" not in found
    assert "coordinate_state" not in found
    assert not found["is_supported"].any()
    assert found["reason"].values[0] == (
        "The ladder has 2 widths, but a prediction for another width needs at least 3."
    )


def test_a_parametrization_applies_to_every_model_and_optimizer():
    mup = wb.baselines.MuP(base_width=8, base_heads=1)
    trainer = LadderTrainer(design(OPTIONS), task, {"optimizer_options": {"weight_decay": 0.0}}, mup)
    model = trainer.model(Rung(32, 2), 1)
    standard = LadderTrainer(design(OPTIONS), task).model(Rung(32, 2), 1)
    scaled = model.blocks[0].mlp.state_dict()
    assert all(
        torch.allclose(2 * scaled[name], value)
        for name, value in standard.blocks[0].mlp.state_dict().items()
        if "weight" in name
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    next(trainer.runs(model, 1, 0.01, 1))
    change = {name: (value - before[name]).abs().max().item() for name, value in model.named_parameters()}
    hidden = [size for name, size in change.items() if "mlp" in name and "weight" in name and "norm" not in name]
    assert max(hidden) == pytest.approx(0.01 / 4, rel=1e-3)  # a quarter of the rate at four times the width
    assert max(change.values()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"widths": ()}, "widths", ()),
        ({"widths": (8, 8)}, "widths", (8, 8)),
        ({"widths": (8, 12)}, "width", 12),
        ({"depths": (1, 2)}, "depths", 1),
        ({"seeds": (1, 1)}, "seeds", (1, 1)),
        ({"edge": "guessed"}, "edge", "guessed"),
        ({"n_coordinate_steps": -1}, "n_coordinate_steps", -1),
        ({"optimizer": "Adim"}, "optimizer", "Adim"),
        ({"optimizer": torch.optim.SGD, "parametrization": wb.baselines.MuP()}, "optimizer", "SGD"),
        ({"make_model": lambda width, depth, seed: None, "depths": None}, "depths", None),
    ],
)
def test_invalid_arguments_are_rejected_before_any_model_is_built(changes, name, value, monkeypatch):
    monkeypatch.setattr(Design, "build", lambda *_, **__: pytest.fail("a model was built"))
    arguments = {"make_model": OPTIONS, "widths": (8, 16), "task": task, **SETTINGS, **changes}
    with pytest.raises(OptionError, check=about(name, value)):
        scaling_study(**arguments)


def test_rungs_are_sorted():
    assert rungs_of(design(OPTIONS), (16, 8), (3, 2)) == [Rung(8, 2), Rung(16, 2), Rung(16, 3)]
