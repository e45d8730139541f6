"""The recorded study of learning rates is consistent with its script, with itself and with a re-run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import FOLDER, load_script
from workbench.rates.outcomes import design_key
from workbench.schema.sweeps import CURVES, OUTCOMES, SETTINGS

pytestmark = pytest.mark.recorded

FILE = FOLDER / "rates.nc"


@pytest.fixture(scope="module")
def script():
    return load_script("make_rates")


@pytest.fixture(scope="module")
def runs():
    return wb.samples.open("rate_study")


def test_it_states_its_origin_and_is_small_enough(script, runs):
    assert FILE.stat().st_size < 10e6
    assert {"call", "seeds", "families", "versions", "core_minutes"} <= set(runs.attrs)
    assert json.loads(runs.attrs["families"]) == {name: list(of) for name, of in script.FAMILIES.items()}
    assert set(runs.coords) == {*SETTINGS, "stage"}
    assert {*OUTCOMES, *CURVES} <= set(runs.data_vars)


@pytest.mark.slow
def test_its_runs_are_those_of_the_script(script, runs, tmp_path, monkeypatch):
    # Every stage is planned from the recorded stages before it; a stage with other runs is rejected.
    monkeypatch.setattr(wb.sweeps, "run", lambda *_, **__: pytest.fail("a stage is not recorded"))
    record = script.Record(FILE, tmp_path, 1)
    for name in dict.fromkeys(set_name for set_name, _ in record.stages):
        last = max((stage for set_name, stage in record.stages if set_name == name), key=script.STAGES.index)
        script.make(record, name, last)


def test_a_set_contains_only_its_own_families(script, runs):
    designs = {design_key(design.run(0, 1).as_dict()): design for design in script.designs()}
    for text, study in set(zip(runs["settings"].values.tolist(), runs["study"].values.tolist(), strict=True)):
        design = designs[design_key(json.loads(text))]
        assert design.set == study
        assert design.architecture.family in script.FAMILIES[study]


@pytest.mark.slow
def test_most_useful_edges_lie_within_the_tried_rates(runs):
    # The test set ("locked") is excluded.
    is_rate = np.isin(runs["stage"].values, ["coarse", "fine", "wider"]) & (runs["study"].values != "locked")
    outcomes = wb.rates.rate_outcomes(
        runs.isel(run=is_rate), shorter=runs.isel(run=(runs["stage"] == "shorter").values)
    )
    is_learned = outcomes["is_learned"].values
    assert is_learned.mean() > 0.9
    edge, best = outcomes["useful_edge"].values[is_learned], outcomes["best_rate"].values[is_learned]
    assert np.isfinite(edge).mean() > 0.9
    assert (edge >= best)[np.isfinite(edge)].all()


def test_the_best_rate_of_a_design_is_that_of_its_lowest_mean_loss(runs):
    of = runs.isel(run=(runs["architecture"] == "GPT-2").values & np.isin(runs["stage"], ["coarse", "fine", "wider"]))
    of = of.isel(run=(of["cell"] == of["cell"][0]).values)
    outcome = wb.rates.rate_outcomes(of).isel(cell=0)
    losses = {}
    for rate, loss in zip(of["learning_rate"].values, of["held_out_loss"].values[:, -1], strict=True):
        losses.setdefault(rate, []).append(loss)
    means = {rate: np.mean(found) for rate, found in losses.items() if len(found) == 3}
    assert float(outcome["best_rate"]) == min(means, key=means.get)
    assert float(outcome["best_loss"]) == pytest.approx(min(means.values()))


def test_a_repeated_run_has_the_recorded_losses(script, runs):
    i = int(np.flatnonzero((runs["architecture"] == "Pre-LN").values & (runs["stage"] == "coarse").values)[2])
    row = runs.isel(run=i)
    run = next(
        one for one in script.coarse_runs([script.designs()[0]])
        if math.isclose(one.training["learning_rate"], float(row["learning_rate"]))
    )  # fmt: skip
    assert run.as_dict() == json.loads(str(row["settings"].item()))
    n_steps = 3 * run.training["n_steps"] // script.N_EVALUATIONS  # at a constant rate the beginning is the same
    shorter = replace(run, training={**run.training, "n_steps": n_steps}, n_evaluations=3)
    found = wb.sweeps.make_run(shorter.as_dict())
    np.testing.assert_allclose(found["held_out_loss"], row["held_out_loss"].values[:3], rtol=0.02)
    assert found["trivial_loss"] == pytest.approx(float(row["trivial_loss"]), rel=1e-6)
