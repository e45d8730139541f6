"""Tests of a scaling study: the dataset, and its agreement with separate measurements."""

import json
import math

import make_scaling
import numpy as np
import pytest
import torch
from ladder_trend import extrapolated, fit_trend
from size_ladder import LadderTrainer, Rung, rungs_of

import workbench as wb
from workbench.scaling.designs import design

pytestmark = pytest.mark.medium

OPTIONS = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_length": 16}


def task(seed):
    return wb.tasks.associative_recall(length=16, vocab_size=64, n_pairs=3, batch_size=4, seed=seed)


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_scaling, "N_STEPS", 3)
        patch.setattr(make_scaling, "N_SNAPSHOTS", 64)
        state = torch.get_rng_state()
        rungs = rungs_of((8, 16, 24), (2, 3))
        found = make_scaling.scaling_study(LadderTrainer(design(OPTIONS), task, {}), rungs, (1, 2), 2, True)
        assert torch.equal(torch.get_rng_state(), state)
    return found


@pytest.mark.slow
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
    trainer = LadderTrainer(design(OPTIONS), task, {})
    rung = Rung(16, 2)
    model = trainer.model(rung, 2)
    spectra = wb.profile(model, task(2).probe(64), n_snapshots=64, n_workers=1, progress=False)
    one = study.isel(rung=1).sel(seed=2)
    assert float(one["measured"].sel(quantity="spectral_radius")) == pytest.approx(
        float(spectra["spectral_radius"].mean())
    )
    edge = trainer.explosion_edge(rung, 2, n_steps=3)
    assert float(one["edge_low_of_seed"]) == pytest.approx(edge.low)
    assert float(one["edge_high_of_seed"]) == pytest.approx(edge.high)


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
