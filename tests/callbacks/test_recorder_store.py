"""The store of a recorder, and resuming from it."""

import json

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import says
from tests.callbacks.test_recorder import ALL, adam, dense, events_of, loss_of, moe, of_part, recorder_with, run
from workbench.errors import OptionError, StoreError
from workbench.io.run_output import RecordingWarning, RunOutput
from workbench.io.run_writer import RunWriter

pytestmark = pytest.mark.medium


def same_rows(one, other):
    """Check that two runs have the same rows in every part except events."""
    one, other = wb.open_run(one), wb.open_run(other)
    assert set(one.children) == set(other.children)
    return all(one[part].to_dataset().equals(other[part].to_dataset()) for part in one.children if part != "events")


def test_the_store_follows_the_schema(task, tmp_path):
    every = {**ALL, "spectra": 4, "curvature": 6, "precision": 3, "reduction": 3, "update": 3}
    recorder = recorder_with(tmp_path / "run.zarr", every=every, loss_of=loss_of_probe)
    run(moe(), task, 6, recorder)
    stored = wb.open_run(tmp_path / "run.zarr")
    wb.save(stored, tmp_path / "copy.zarr")  # which checks every part
    of_alarms = {"evidence"}  # there are none
    assert set(stored.children) == {"monitors", "spectra", "events", *wb.schema.PARTS} - of_alarms
    assert stored.attrs["state"] == "finished"
    assert stored.attrs["subject"] == "MoeTransformer"
    assert json.loads(stored.attrs["configuration"])["recorder"]["every"]["attention"] == 3
    assert stored["attention"]["layer_name"].values.tolist() == ["blocks.0", "blocks.1"]
    assert stored["attention"]["term"].values.tolist() == ["D2", "D3", "dWq", "dWk", "W"]
    assert stored["optimizer"]["module_name"].values.tolist() == ["blocks.0", "blocks.1", "outside"]
    assert stored["optimizer"]["layer"].values.tolist() == [0, 1, -1]
    for o in recorder.heard:
        row = stored[o.part].to_dataset().sel(step=o.step)
        for name, value in o.values.items():
            assert np.array_equal(row[name].values, value, equal_nan=value.dtype.kind in "fc"), name
    assert stored["attention"]["effective_rank"].attrs["long_name"] == "effective rank"


def loss_of_probe(model, probe):
    (tokens,) = probe
    return loss_of(model, (tokens, tokens.roll(1, 1)))


@pytest.mark.slow
def test_curvature_is_that_of_the_probe(task):
    model, probe = dense(), (task.batch(5)[0][:2],)
    recorder = recorder_with(every={**dict.fromkeys(ALL), "curvature": 3}, probe=probe, loss_of=loss_of_probe)
    optimizer = adam(model)
    run(model, task, 3, recorder, optimizer)
    (o,) = of_part(recorder, "curvature")
    sharpness = wb.monitors.sharpness(model, lambda model: loss_of_probe(model, probe))
    scaled = wb.monitors.preconditioned_sharpness(model, lambda model: loss_of_probe(model, probe), optimizer)
    expected = {
        "sharpness": sharpness,
        "sharpness_rate": sharpness * 1e-2,
        "preconditioned_sharpness": scaled,
        "preconditioned_sharpness_rate": scaled * 1e-2,
    }
    assert {name: float(value) for name, value in o.values.items()} == pytest.approx(expected, rel=1e-6)
    plain = recorder_with(every={**dict.fromkeys(ALL), "curvature": 1}, probe=probe, loss_of=loss_of_probe)
    run(model, task, 1, plain, torch.optim.SGD(model.parameters(), lr=0.1))
    assert np.isnan(of_part(plain, "curvature")[0].values["preconditioned_sharpness"])


def test_a_resumed_run_equals_an_uninterrupted_one(task, tmp_path):
    """The rows are bitwise identical, with windows, the probe of the first batch, and spikes."""
    through, parts = tmp_path / "through.zarr", tmp_path / "parts.zarr"
    run(moe(), task, 12, recorder_with(through))
    model = moe()
    optimizer = adam(model)
    run(model, task, 6, recorder_with(parts), optimizer)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = {name: {**state} for name, state in checkpoint.items()}
    torch.save(checkpoint, tmp_path / "at-6.pt")
    run(model, task, 2, recorder_with(parts, resume=True), optimizer, start=6, step=6)  # which is lost
    again = moe()
    state = torch.load(tmp_path / "at-6.pt", weights_only=True)
    again.load_state_dict(state["model"])
    optimizer = adam(again)
    optimizer.load_state_dict(state["optimizer"])
    recorder = recorder_with(parts, resume=True)
    run(again, task, 6, recorder, optimizer, start=6, step=6)
    assert same_rows(through, parts)
    assert [o.step for o in of_part(recorder, "attention")] == [8, 11]
    assert [e["kind"] for e in events_of(parts)] == ["started", "resumed", "finished"]
    assert events_of(parts)[1]["message"] == "Resumed at step 6."


def test_attaching_again_continues(task, tmp_path):
    run(dense(), task, 6, recorder_with(tmp_path / "through.zarr"))
    model, recorder = dense(), recorder_with(tmp_path / "parts.zarr")
    optimizer = adam(model)
    run(model, task, 3, recorder, optimizer)
    run(model, task, 3, recorder, optimizer, start=3)
    assert same_rows(tmp_path / "through.zarr", tmp_path / "parts.zarr")


def test_resuming_with_other_options_or_another_model_is_rejected(task, tmp_path):
    run(dense(), task, 3, recorder_with(tmp_path / "run.zarr"))
    model = dense()
    with pytest.raises(StoreError, check=says("use the same value, or record into another run.")):
        recorder_with(tmp_path / "run.zarr", alpha=1.0, resume=True).attach(model, adam(model))
    model = dense("none")
    with pytest.raises(StoreError, check=says("was recorded with model.config.norm = pre_ln, but this")):
        recorder_with(tmp_path / "run.zarr", resume=True).attach(model, adam(model))
    assert wb.open_run(tmp_path / "run.zarr")["monitors"].sizes["step"] == 3


def test_an_error_in_training_keeps_the_record(task, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(dense(), task, 9, recorder_with(tmp_path / "run.zarr"), before=lambda i: 1 / (4 - i))
    stored = wb.open_run(tmp_path / "run.zarr")
    assert stored.attrs["state"] == "stopped"
    assert stored["monitors"].sizes["step"] == 4
    assert events_of(tmp_path / "run.zarr")[-1]["kind"] == "stopped"


def test_the_store_of_a_host_receives_only_the_parts(task, tmp_path):
    """The host writes the metrics of each update and closes the store."""
    host = RunOutput(RunWriter(tmp_path / "run.zarr", {"subject": "x"}))
    recorder = recorder_with()
    run(dense(), task, 3, recorder, host=host, probe=task.probe(50))
    host.close()
    stored = wb.open_run(tmp_path / "run.zarr")
    assert set(stored.children) == {"attention", "optimizer", "activations"}
    assert "state" not in stored.attrs
    assert len(of_part(recorder, "monitors")) == 3


def test_metrics_that_begin_late_are_reported(task, tmp_path):
    recorder = recorder_with(tmp_path / "run.zarr", every=None)
    logged = ({"yours": 1.0}, {}, {"mine": 5.0})  # metrics logged between two batches belong to the first of them
    with pytest.warns(RecordingWarning, match="'mine' was first logged at step 1"):
        run(dense(), task, 3, recorder, before=lambda i: recorder.log(**logged[i]))
    stored = wb.open_run(tmp_path / "run.zarr")["monitors"]
    assert "mine" not in stored
    assert stored["yours"].values.tolist()[0] == 1.0
    assert np.isnan(stored["yours"].values[1:]).all()
    assert float(recorder.heard[1].values["mine"]) == 5.0
    (told,) = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not recorded"]
    assert told["source"] == "mine"


def test_events_of_the_caller(task, tmp_path):
    model, recorder = dense(), recorder_with(tmp_path / "run.zarr")
    with recorder.attach(model, adam(model)):
        recorder.event("alarm", source="effective_rank D2", score=3.0, message="It falls.", layer=1, head=0)
    (told,) = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "alarm"]
    assert (told["layer"], told["head"], told["score"], told["step"]) == (1, 0, 3.0, 0)
    with pytest.raises(OptionError, check=says("event() needs an attached recorder; call")):
        recorder.event("alarm")
