"""The recorded runs most like a case: against distances typed out, in order, with ties, and for cells as a whole."""

import numpy as np
import pytest

from tests.risk.made_sweep import made_sweep
from workbench.errors import OptionError, SchemaError
from workbench.risk.applicability import Applicability
from workbench.risk.feature_map import FeatureMap
from workbench.risk.neighbours import Neighbours, nearest_runs
from workbench.risk.risk_model import RiskModel

FEATURES = ("near_unit_mass mean", "spectral_radius max", "d_model", "warmup", "optimizer")


@pytest.fixture(scope="module")
def sweep():
    return made_sweep(n_configurations=9, n_rates=4, seed=3)[0]


@pytest.fixture(scope="module")
def model(sweep):
    """Only what neighbours depend on is real; the weights are 0."""
    design = FeatureMap.of(sweep, FEATURES)
    base = design.matrix(design.read(sweep))[:, : design.n_base]
    applicability = Applicability.of(base, sweep["cell"].values, sweep["configuration"].values)
    weights = np.zeros((1, 2 + len(design.columns)))
    return RiskModel(
        feature_map=design, applicability=applicability, weights=weights, seen=(-1.0, 1.0), log_rate=(-2.0, 1.0),
        spread=(1.0, 1.0), about={"options": {"level": 0.95}},
    )  # fmt: skip


def distances(model, case, sweep):
    """Typed out for these features: standardised over the model's runs, an optimizer as a 0 or 1 for each name."""

    def columns(data):
        mass = data["near_unit_mass"].mean("layer").values
        radius = np.log10(data["spectral_radius"].max("layer").values)
        width, warmup = np.log10(data["d_model"].values), np.log10(1 + data["warmup"].values)
        return np.stack([mass, radius, width, warmup, *(data["optimizer"].values == n for n in ("AdamW", "SGD"))], 1)

    everything = columns(sweep).astype(float)
    center, scale = everything.mean(0), everything.std(0)
    ours, theirs = ((columns(data).astype(float) - center) / scale for data in (case, sweep))
    return np.linalg.norm(theirs - ours, axis=1) / model.applicability.unit


def test_the_nearest_runs_are_those_of_the_smallest_distance_in_order(model, sweep):
    case = sweep.isel(run=[17])
    expected = distances(model, case, sweep)
    found = nearest_runs(model, case, sweep, n=25)
    np.testing.assert_allclose(found["distance"], np.sort(expected)[:25], rtol=1e-6, atol=1e-7)
    assert (np.diff(found["distance"]) >= 0).all()
    assert found["distance"].values[0] == pytest.approx(0, abs=1e-7)
    assert found["learning_rate"].values[0] == case["learning_rate"].values[0]
    assert set(found.data_vars) == {*sweep.data_vars, "distance"}


def test_the_learning_rate_plays_no_part_and_equally_far_runs_keep_their_order(model, sweep):
    numbered = sweep.isel(run=np.repeat(np.arange(sweep.sizes["run"]), 2)).assign_coords(
        seed=("run", np.arange(2 * sweep.sizes["run"]))
    )
    case = sweep.isel(run=[5])
    found = nearest_runs(model, case, numbered, n=9)
    faster = nearest_runs(model, case.assign_coords(learning_rate=("run", [3.0])), numbered, n=9)
    np.testing.assert_array_equal(found["seed"], faster["seed"])
    np.testing.assert_array_equal(found["seed"].values[0::2][:4] + 1, found["seed"].values[1::2][:4])


def test_the_nearest_cells_come_whole_one_after_the_other_by_rate(model, sweep):
    case = sweep.isel(run=[17])
    distance = distances(model, case, sweep)
    cells = sweep["cell"].values
    nearest = {cell: distance[cells == cell].min() for cell in np.unique(cells)}
    expected = sorted(nearest, key=nearest.get)[:3]
    found = Neighbours(model, sweep).cells(case, 3)
    assert list(dict.fromkeys(found["cell"].values.tolist())) == expected
    assert found.sizes["run"] == sum((cells == cell).sum() for cell in expected)
    for cell in expected:
        of_cell = found.isel(run=found["cell"].values == cell)
        assert (np.diff(of_cell["learning_rate"]) >= 0).all()
        np.testing.assert_allclose(of_cell["distance"], nearest[cell], atol=1e-7)


def test_runs_of_no_cell_stand_alone(model, sweep):
    loose = sweep.assign_coords(cell=("run", np.full(sweep.sizes["run"], "")))
    case = sweep.isel(run=[17])
    one_by_one = nearest_runs(model, case, sweep, n=4)
    found = Neighbours(model, loose).cells(case, 4)
    np.testing.assert_array_equal(found["learning_rate"], one_by_one["learning_rate"])


def test_runs_without_a_feature_are_left_out(model, sweep):
    case = sweep.isel(run=[0])
    bare = sweep.copy(deep=True)
    bare["near_unit_mass"][:10] = np.nan
    found = nearest_runs(model, case, bare, n=10**6)
    np.testing.assert_allclose(found["distance"], np.sort(distances(model, case, sweep)[10:]), rtol=1e-6)
    bare["near_unit_mass"][:] = np.nan
    with pytest.raises(SchemaError, match="No run of the sweep has every feature of the risk model"):
        nearest_runs(model, case, bare)


def test_what_it_cannot_use_is_refused_in_one_sentence(model, sweep):
    case = sweep.isel(run=[0])
    with pytest.raises(SchemaError, match="There are 2 cases, expected one; choose it with"):
        nearest_runs(model, sweep.isel(run=[0, 1]), sweep)
    with pytest.raises(SchemaError, match="The dataset is no sweep: it lacks has_diverged"):
        nearest_runs(model, case, sweep.drop_vars("has_diverged"))
    with pytest.raises(SchemaError, match="The sweep has no run; select less narrowly"):
        nearest_runs(model, case, sweep.isel(run=[]))
    with pytest.raises(SchemaError, match="lack d_model"):
        nearest_runs(model, case.drop_vars("d_model"), sweep)
    for n in (0, -3, 1.5, True):
        with pytest.raises(OptionError, match=f"n is {n!r}, expected a whole number of at least 1"):
            nearest_runs(model, case, sweep, n=n)
