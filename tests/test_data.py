import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from tests.data_scripts import load_script
from tests.docs.page_numbers import page_module
from workbench.errors import CheckpointError, StoreError
from workbench.studies.samples import STUDIES

pytestmark = pytest.mark.recorded

ROOT = Path(__file__).parent.parent
NAMES = ("pre_ln", "no_norm")


def record_of(name):
    return json.loads((wb.samples.embedded(name) / "record.json").read_text())


@pytest.fixture(scope="module")
def script():
    return load_script("make_checkpoints")


@pytest.fixture(scope="module")
def make_runs():
    return load_script("make_runs")


@pytest.fixture(scope="module")
def make_shaping():
    return load_script("make_shaping")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_recorded_ones_and_small(name):
    weights = wb.samples.embedded(name) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == record_of(name)["sha256"]
    assert weights.stat().st_size < 2_000_000
    assert record_of(name)["sha256"] in (ROOT / "data" / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_validation_loss_is_the_recorded_one(name, script):
    model = wb.open_checkpoint(wb.samples.embedded(name)).model
    assert script.validation_loss(model) == pytest.approx(record_of(name)["validation_loss"], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_first_losses_of_a_rerun_are_the_recorded_ones(name, script, one_thread):
    norm, peak_rate = script.RECIPES[name]
    record = record_of(name)
    _, losses = script.train(norm, peak_rate, record["n_steps"], stop_at=21)
    recorded = {step: record["training_loss"][step] for step in losses}
    assert len(recorded) == 5
    assert losses == pytest.approx(recorded, abs=2e-3)


def test_unknown_samples_are_named():
    with pytest.raises(CheckpointError, check=says("choose from no_norm, pre_ln.")):
        wb.samples.embedded("gpt")


# ---- recorded runs


def test_recorded_files_are_those_of_the_record_and_small():
    record = json.loads((ROOT / "data" / "runs" / "record.json").read_text())
    files = [*(ROOT / "data" / "runs").glob("*.nc"), *(ROOT / "data" / "initialization").glob("*.nc")]
    files.append(ROOT / "data" / "divergence.nc")
    assert sum(file.stat().st_size for file in files) < 20e6
    found = {
        file.relative_to(ROOT / "data").as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    assert found == record["sha256"]


def test_all_architectures_have_a_healthy_and_a_diverged_run(make_runs):
    healthy, diverged = wb.samples.recorded_runs("healthy"), wb.samples.recorded_runs("diverged")
    assert list(healthy) == list(make_runs.PARTS["runs"][1])
    assert list(diverged) == list(healthy)
    for runs, state in ((healthy, "finished"), (diverged, "diverged")):
        for name, run in runs.items():
            wb.schema.runs.validate_spectra(run["spectra"].to_dataset())
            wb.schema.runs.validate_monitors(run["monitors"].to_dataset())
            assert run.attrs["state"] == state, name
            assert run["spectra"].sizes["step"] >= 2
            assert np.isfinite(run["monitors"]["loss"].values[:-1]).all()
            rate = json.loads(run.attrs["configuration"])["training"]["learning_rate"]
            assert (rate == make_runs.RATES[0]) == (state == "finished")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Pre-LN",
        "MoE top-2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("No-Norm", "Mamba", "KAN B=4", "ViT Pre-LN")),
    ],
)
def test_the_first_steps_of_a_rerun_are_the_recorded_ones(make_runs, tmp_path, name, one_thread):
    make_runs.record_run(name, make_runs.RATES[0], tmp_path / "run.zarr", n_steps=4)
    rerun, recorded = wb.open_run(tmp_path / "run.zarr"), wb.samples.recorded_runs("healthy")[name]
    for variable in ("loss", "grad_norm", "accuracy"):
        expected = recorded["monitors"][variable].values[:4]
        np.testing.assert_allclose(rerun["monitors"][variable].values, expected, atol=2e-3)
    for measure in ("near_unit_mass", "nonlinearity_ratio"):
        expected = recorded["spectra"][measure].sel(step=0).values
        np.testing.assert_allclose(rerun["spectra"][measure].sel(step=0).values, expected, atol=0.02)


@pytest.mark.parametrize(("table", "name"), [("norms", "Post-LN"), ("architectures", "MoE top-1")])
def test_a_row_at_initialization_is_the_recorded_one(make_runs, table, name, one_thread):
    recorded = wb.samples.open(f"initialization/{table}").sel(architecture=name, source="ours")
    seed = int(recorded["seed"][0])
    rerun = wb.compare({name: make_runs.initial_spectra(name, table, seed)}).sel(architecture=name, source="ours")
    for measure in ("near_unit_mass", "contractive_mass", "nonlinearity_ratio"):
        assert float(rerun[measure]) == pytest.approx(float(recorded[measure].sel(seed=seed)), abs=0.02)


def test_the_order_of_the_norms_is_the_published_one():
    table = wb.samples.open("initialization/norms")["near_unit_mass"].mean("seed").dropna("architecture")
    ours, published = table.sel(source="ours"), table.sel(source="published")
    ordered = published.sortby(ours).values
    assert len(ordered) == 6
    assert (np.diff(ordered) >= 0).all()
    deviating = [
        name
        for name in table["architecture"].values
        if abs(float(ours.sel(architecture=name) - published.sel(architecture=name))) > 0.15
    ]
    assert deviating == ["No-Norm"]  # explained in the README


@pytest.mark.slow
def test_no_norm_diverges_where_pre_ln_never_does(make_runs, one_thread):
    table = wb.samples.open("divergence_table")["has_diverged"]
    assert list(table["architecture"].values) == list(make_runs.NORMS)
    assert not table.sel(architecture="Pre-LN").any()
    assert float(table.sel(architecture="No-Norm").mean()) > 0.9
    rate, seed = float(table["learning_rate"][-1]), int(table["seed"][0])
    rerun = make_runs.outcome("No-Norm", rate, seed)
    recorded = wb.samples.open("divergence_table").sel(architecture="No-Norm", learning_rate=rate, seed=seed)
    assert rerun["has_diverged"]
    assert rerun["step"] == pytest.approx(float(recorded["step"]), abs=15)


def test_finished_parts_are_not_generated_again(make_runs, tmp_path):
    file = tmp_path / "parts" / "norms-no_norm.nc"
    file.parent.mkdir()
    file.touch()
    (tmp_path / "parts" / "architectures-no_norm.nc").touch()
    assert "there already" in make_runs.do_initialization("No-Norm", tmp_path)
    assert file.stat().st_size == 0


# ---- the sweep of KSS


def test_the_sweep_is_complete_and_the_recorded_one(make_shaping):
    record = json.loads((ROOT / "data" / "shaping.json").read_text())
    assert record["sha256"] == hashlib.sha256((ROOT / "data" / "shaping.nc").read_bytes()).hexdigest()
    runs = wb.samples.open("shaping")
    coords = (runs[name].values.tolist() for name in ("study", "control", "learning_rate", "seed"))
    found = [*zip(*coords, strict=True)]
    assert len(found) == len(set(found)) == record["n_runs"]
    for study in make_shaping.STUDIES:  # all studies are complete
        assert {row for row in found if row[0] == study} == set(make_shaping.jobs([study])), study
    assert set(runs["seed"].values.tolist()).isdisjoint(make_shaping.TUNING_SEEDS)
    assert set(runs["seed"].values[runs["study"] == "doses"].tolist()).isdisjoint(make_shaping.SEEDS)
    settings = {"model": make_shaping.MODEL, "task": make_shaping.TASK, "tuning_seeds": [*make_shaping.TUNING_SEEDS]}
    assert {name: json.loads(runs.attrs[name]) for name in settings} == settings
    assert (runs.attrs["n_steps"], runs.attrs["warmup"]) == (make_shaping.N_STEPS, make_shaping.WARMUP)


def test_outcomes_of_the_sweep_are_consistent(make_shaping):
    runs = wb.samples.open("shaping")
    has_diverged = runs["has_diverged"].values
    assert has_diverged.any()
    assert not has_diverged.all()
    assert set(runs["cause"].values[has_diverged]) <= {"loss", "grad_norm", "non-finite"}
    assert set(runs["cause"].values[~has_diverged]) == {""}
    assert (runs["step"].values[~has_diverged] == make_shaping.N_STEPS - 1).all()
    assert (runs["step"].values[has_diverged] < make_shaping.N_STEPS).all()
    for name in ("loss", "accuracy"):
        np.testing.assert_array_equal(np.isnan(runs[name].values), has_diverged)
    for name in ("accuracy", "near_unit_mass"):
        assert ((runs[name].fillna(0) >= 0) & (runs[name].fillna(0) <= 1)).all()


def test_studies_are_selected_by_name_and_have_the_controls_of_the_paper(make_shaping):
    tables = wb.samples.open("shaping", "controls", "tables")
    assert list(dict.fromkeys(tables["study"].values)) == ["controls", "tables"]
    assert tables.sizes["run"] == len(make_shaping.jobs(["controls", "tables"]))
    assert set(page_module("docs/results/kss.md").published().index) <= set(tables["control"].values)
    with pytest.raises(StoreError, check=about("parts", "dose", ("controls", "tables", "doses"))):
        wb.samples.open("shaping", "dose")


@pytest.mark.slow
def test_a_rerun_of_the_sweep_ends_as_recorded(make_shaping, one_thread):
    """The cell that diverged first without a control, and the same cell with the best KSS for some more steps."""
    runs = wb.samples.open("shaping", "controls")
    uncontrolled, shaped = (runs.isel(run=runs["control"].values == name) for name in ("none", "KSS, best"))
    for name in ("learning_rate", "seed"):
        np.testing.assert_array_equal(uncontrolled[name], shaped[name])
    is_prevented = uncontrolled["has_diverged"].values & ~shaped["has_diverged"].values
    first = uncontrolled.isel(run=is_prevented)
    first = first.isel(run=int(first["step"].values.argmin()))
    rate, seed, step = float(first["learning_rate"]), int(first["seed"]), int(first["step"])
    rerun = make_shaping.outcome("controls", "none", rate, seed, n_steps=step + 15)
    assert rerun["has_diverged"]
    assert rerun["step"] == pytest.approx(step, abs=15)
    rerun = make_shaping.outcome("controls", "KSS, best", rate, seed, n_steps=step + 15)
    assert not rerun["has_diverged"]
    assert rerun["loss"] < 2 * np.log(make_shaping.MODEL["vocab_size"])  # twice the loss of uniform predictions


@pytest.mark.parametrize(
    ("call", "name", "value", "expected"),
    [
        (lambda: wb.samples.recorded_runs("broken"), "kind", "broken", ("healthy", "diverged")),
        (lambda: wb.samples.open("initialization/moe"), "name", "initialization/moe", tuple(STUDIES)),
    ],
)
def test_unknown_recordings_are_named(call, name, value, expected):
    with pytest.raises(StoreError, check=about(name, value, expected)):
        call()


def test_a_missing_table_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(wb.samples, "_DATA", tmp_path)
    with pytest.raises(StoreError, check=about("divergence.nc", tmp_path / "divergence.nc")):
        wb.samples.open("divergence_table")
