"""The part ``evidence`` of a run: its rows, in several training loops, after a resume, and for runs without it."""

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.callbacks.test_recorder_alarms import loop, parts  # noqa: F401
from workbench.callbacks.alarms import WATCHED, Calibration, Observation, evidence_of
from workbench.io.run_writer import RunWriter

pytestmark = pytest.mark.medium

EVERY = {**dict.fromkeys(("attention", "router", "activations", "precision", "reduction", "update")), "optimizer": 2}
NAMES = [watched.name for watched in WATCHED]


@pytest.fixture(autouse=True)
def _evaluated_early(monkeypatch):
    monkeypatch.setattr("workbench.callbacks.alarms.run_evidence._FIRST_EVALUATED", 20)


def alarms_of_exact_p():
    """Return alarms whose thresholds do not depend on the shipped calibration."""
    return wb.Alarms(calibration=Calibration({}, n_steps=0))


def run_of(loss):
    monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(len(loss))})
    return xr.DataTree.from_dict({"/monitors": monitors})


def calm(n_steps):
    return 3.0 + 0.1 * np.random.default_rng(0).normal(size=n_steps)


def test_a_row_contains_the_largest_evidence_since_the_last_one():
    alarms, run = wb.Alarms(), run_of(calm(153))
    rows, largest, since = [], [], []
    for observation in wb.alarms.observations(run):
        alarms.observe(observation)
        since.append(alarms.scores()["loss"] if observation.step >= 20 else np.nan)
        if (row := alarms._evidence_row(observation)) is not None:
            rows.append(row)
            largest.append(np.nan if np.isnan(since).all() else np.nanmax(since))
            since = []
    assert [row.step for row in rows] == list(range(9, 153, 10))
    values = np.stack([row.values["evidence"] for row in rows])
    np.testing.assert_array_equal(values[:, NAMES.index("loss")], largest)
    assert np.isfinite(largest[8:]).all()
    assert np.isnan(largest[:2]).all()  # not evaluated yet
    others = np.delete(values, [NAMES.index(name) for name in ("loss", "loss rise", "loss fall")], axis=1)
    assert np.isnan(others).all()  # not recorded
    assert alarms._evidence_row(Observation(153, "monitors", {})) is None


def test_it_reaches_one_where_an_alarm_is_raised_and_not_before():
    loss = calm(150)
    loss[104:] += 5
    alarms = alarms_of_exact_p()
    found = evidence_of(run_of(loss), alarms)["evidence"]
    first = alarms.raised[0]
    assert 104 <= first.step < 109  # between two rows
    assert found["step"].values[(found >= 1).any("signal").values][0] == first.step
    assert float(found.sel(step=first.step, signal="loss")) == first.score
    loss[110:] = np.nan
    broken = evidence_of(run_of(loss))["evidence"].sel(signal="loss")
    assert np.isinf(broken.sel(step=slice(110, None)).max())


def test_a_custom_loop_writes_the_same_as_a_replay(parts, tmp_path):  # noqa: F811
    recorder = wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=alarms_of_exact_p())
    loop(recorder, 47, **parts, rate_from=999, broken_at=33)
    run = wb.open_run(tmp_path / "a.zarr")
    stored = run["evidence"].to_dataset()
    wb.schema.runs.validate_part("evidence", stored)
    xr.testing.assert_equal(stored, evidence_of(run, alarms_of_exact_p()))
    known = stored["evidence"].notnull().any("step")
    assert {"grad_norm", "update_ratio", "adam_staleness"} <= set(stored["signal"].values[known.values])
    assert {9, 19, 29, 39} <= set(stored["step"].values.tolist())
    assert float(stored["evidence"].max()) >= 1


@pytest.mark.parametrize("has_part", [True, False])
def test_a_resumed_run_continues_it(parts, tmp_path, has_part, monkeypatch):  # noqa: F811
    """The run resumes between two rows, and some rows are recomputed; a run without the part starts it."""
    path, options = tmp_path / "a.zarr", {"rate_from": 999, "broken_at": 41}
    row = wb.Alarms._evidence_row
    if not has_part:
        monkeypatch.setattr(wb.Alarms, "_evidence_row", lambda self, observation: None)
    loop(wb.Recorder(path, every=EVERY, alarms=wb.Alarms()), 33, **parts, **options)
    RunWriter.reopen(path, before_step=25)
    monkeypatch.setattr(wb.Alarms, "_evidence_row", row)
    loop(wb.Recorder(path, every=EVERY, alarms=wb.Alarms(), resume=True), 52, start=25, **parts, **options)
    run = wb.open_run(path)
    replayed = evidence_of(run)
    expected = replayed if has_part else replayed.sel(step=slice(25, None))
    xr.testing.assert_equal(run["evidence"].to_dataset(), expected)


def test_train_writes_and_continues_it(tmp_path):
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)

    def training(n_steps, **options):
        model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
        faults = [wb.faults.low_precision_attention(n_bits=4, start=30)]
        settings = {
            "learning_rate": 1e-2,
            "faults": faults,
            "recorder": wb.Recorder(every=EVERY),
            "alarms": wb.Alarms(),
        }
        run = wb.train(model, task, n_steps=60, checkpoint_every=17, store=tmp_path / "a.zarr", **settings, **options)
        for record in run:
            if record.step == n_steps - 1:
                run.close()

    training(42)
    training(60, resume=True)
    run = wb.open_run(tmp_path / "a.zarr")
    stored = run["evidence"].to_dataset()
    xr.testing.assert_equal(stored, evidence_of(run))
    assert {9, 19, 29, 39, 49, 59} <= set(stored["step"].values.tolist())


def test_watching_writes_it_and_runs_without_alarms_have_none(parts, tmp_path):  # noqa: F811
    model, optimizer, task = parts["model"], parts["optimizer"], parts["task"]
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False) as watched:
        for number in range(31):
            inputs, targets = task.batch(number)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            watched.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    run = wb.open_run(watched.path)
    assert run["evidence"]["step"].values.tolist() == [9, 19, 29]
    xr.testing.assert_equal(run["evidence"].to_dataset(), evidence_of(run))
    loop(wb.Recorder(tmp_path / "b.zarr", every=EVERY), 12, **parts)
    assert "evidence" not in wb.open_run(tmp_path / "b.zarr").children
