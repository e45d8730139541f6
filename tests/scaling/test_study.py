"""The study of a ladder: what its dataset holds, that it is the sum of its parts, and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.errors import OptionError
from workbench.scaling import Design, Rung, Workshop, extrapolated, fit_trend, pilot_edge
from workbench.scaling.designs import design
from workbench.scaling.explosion_edges import explosion_edge
from workbench.scaling.ladder_study import scaling_study
from workbench.scaling.size_ladder import rungs_of

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
    thin = design(OPTIONS).build(8, 2, vocabulary=64)  # cut to the task's
    assert int(study["n_weights"][0]) == sum(weight.numel() for weight in thin.parameters())
    assert (study.attrs["target_width"], study.attrs["target_depth"]) == (32, 2)


def test_quantities_are_means_of_what_each_seed_gave(study):
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


def test_it_is_the_sum_of_its_parts(study):
    workshop = Workshop(design(OPTIONS), task)
    rung = Rung(16, 2)
    model = workshop.model(rung, 2)
    spectra = wb.profile(model, task(2).probe(64), n_snapshots=64, n_workers=1, progress=False)
    one = study.isel(rung=1).sel(seed=2)
    assert float(one["measured"].sel(quantity="spectral_radius")) == pytest.approx(
        float(spectra["spectral_radius"].mean())
    )
    edge = explosion_edge(workshop, rung, 2, n_steps=3)
    assert float(one["edge_low_of_seed"]) == pytest.approx(edge.low)
    assert float(one["edge_high_of_seed"]) == pytest.approx(edge.high)


def test_rehearsed_edges_are_those_of_ten_updates():
    found = scaling_study(
        OPTIONS, (8,), task=task, edge="pilot", **{**SETTINGS, "seeds": (1,), "n_coordinate_steps": 0}
    )
    edge = pilot_edge(Workshop(design(OPTIONS), task), Rung(8, 2), 1)
    assert found["explosion_edge"].item() == pytest.approx(edge.middle)


def test_the_trend_is_fitted_to_what_was_measured_on_the_ladder_alone(study):
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


def test_other_sizes_can_be_asked_about_later(study):
    nearer = extrapolated(study, (28, 2)).sel(quantity="explosion_edge")
    further = extrapolated(study, (512, 2)).sel(quantity="explosion_edge")
    assert further["reason"].item().startswith("The target's width is 21.3 times that of the last rung")
    spans = [float(one["at_target_high"] / one["at_target_low"]) for one in (nearer, further)]
    assert spans[0] < spans[1]


def test_the_curve_begins_at_the_smallest_rung_and_ends_at_the_target(study):
    of_width = study.isel(curve_point=(study["curve_along"] == "width").values)
    assert of_width["curve_width"].values[[0, -1]].tolist() == [8, 32]
    assert set(of_width["curve_depth"].values) == {2}
    end = of_width.sel(quantity="explosion_edge").isel(curve_point=-1)
    np.testing.assert_allclose(end["curve"], study["at_target"].sel(quantity="explosion_edge"), rtol=1e-5)
    of_depth = study.isel(curve_point=(study["curve_along"] == "depth").values)
    assert of_depth["curve_depth"].values[[0, -1]] == pytest.approx([2, 3])


def test_the_coordinate_check_is_of_the_widths_alone(study):
    is_there = np.isfinite(study["update_size"]).all(("step", "layer_group"))
    assert is_there.values.tolist() == [True, True, True, False]
    assert study["coordinate_state"].item() in ("passes", "grows", "vanishes")
    assert study["update_size"].dims == ("rung", "step", "layer_group")


def test_provenance_and_units(study):
    assert json.loads(study.attrs["seeds"]) == [1, 2]
    assert json.loads(study.attrs["design"])["family"] == "transformer"
    assert {"versions", "created", "duration", "task", "training", "subject"} <= set(study.attrs)
    assert study["explosion_edge"].attrs["units"] == "1"


def test_a_function_is_asked_for_its_ladder():
    asked = []

    def make(width, depth, seed):
        asked.append((width, depth, seed))
        return wb.zoo.transformer(d_model=width, n_layers=depth, n_heads=1, vocab_size=64, max_length=16, seed=seed)

    found = scaling_study(
        make, (8, 16), (2,), task=task, edge="none", target_width=32, **{**SETTINGS, "n_coordinate_steps": 0}
    )
    assert {(8, 2, 1), (8, 2, 2), (16, 2, 1), (16, 2, 2)} <= set(asked)
    assert 32 not in {width for width, _, seed in asked if seed}
    assert "explosion_edge" not in found
    assert "coordinate_state" not in found
    assert not found["is_supported"].any()
    assert found["reason"].values[0] == "The ladder has 2 widths, a claim about another takes 3."


def test_a_parametrization_is_on_every_model_and_in_every_optimizer():
    mup = wb.baselines.MuP(base_width=8, base_heads=1)
    workshop = Workshop(design(OPTIONS), task, {"optimizer_options": {"weight_decay": 0.0}}, mup)
    model = workshop.model(Rung(32, 2), 1)
    plain = Workshop(design(OPTIONS), task).model(Rung(32, 2), 1)
    ratio = model.blocks[0].mlp.state_dict()
    assert all(
        torch.allclose(2 * ratio[name], value)
        for name, value in plain.blocks[0].mlp.state_dict().items()
        if "weight" in name
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    next(workshop.runs(model, 1, 0.01, 1))
    moved = {name: (value - before[name]).abs().max().item() for name, value in model.named_parameters()}
    hidden = [size for name, size in moved.items() if "mlp" in name and "weight" in name and "norm" not in name]
    assert max(hidden) == pytest.approx(0.01 / 4, rel=1e-3)  # a quarter of the rate at four times the width
    assert max(moved.values()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"widths": ()}, "widths is empty, expected at least one"),
        ({"widths": (8, 8)}, r"widths holds a size twice \(\[8, 8\]\)"),
        ({"widths": (8, 12)}, "transformer cannot be 12 wide, for each of its heads takes 8; choose 8"),
        ({"depths": (1, 2)}, "depths begins with 1, expected at least 2"),
        ({"seeds": (1, 1)}, r"seeds is \[1, 1\], expected at least one, each once"),
        ({"edge": "guessed"}, "edge is 'guessed', expected one of trained, pilot, none"),
        ({"optimizer": "Adim"}, "optimizer is 'Adim', expected one of"),
        (
            {"optimizer": torch.optim.SGD, "parametrization": wb.baselines.MuP()},
            "A parametrization makes the optimizer itself; pass optimizer= by its name",
        ),
        ({"make_model": lambda width, depth, seed: None, "depths": None}, "A function has no depth of its own"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_is_built(changes, says, monkeypatch):
    monkeypatch.setattr(Design, "build", lambda *_, **__: pytest.fail("something was built"))
    arguments = {"make_model": OPTIONS, "widths": (8, 16), "task": task, **SETTINGS, **changes}
    with pytest.raises(OptionError, match=says):
        scaling_study(**arguments)


def test_rungs_are_sorted():
    assert rungs_of(design(OPTIONS), (16, 8), (3, 2)) == [Rung(8, 2), Rung(16, 2), Rung(16, 3)]
