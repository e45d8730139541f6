"""The state of runs in a few facts, from the index beside the stores or from the stores."""

import json
import shutil

import pytest

import workbench as wb
from workbench.io.run_index import entry_path, status_of
from workbench.io.run_output import RunOutput
from workbench.schema.events import Event
from workbench.training.recording import new_run


def written(path, n_steps=12, *, alarm_at=7, state="finished"):
    """Write a run with an alarm and its cause."""
    output = RunOutput(new_run(path, {"model": {"name": "Planted"}}, overwrite=True), rows_per_block=5)
    for step in range(n_steps):
        output.add("monitors", step, {"loss": 5.0 - step / 10, "learning_rate": 1e-3})
        if step == alarm_at:
            output.event(Event(step, "alarm", "grad_norm", 1.5, "The gradient norm rose.", 1, 2))
            output.event(Event(step, "attribution", "learning_rate", 0.9, "It was raised."))
            output.event(Event(step + 1, "alarm", "loss", 1.2, "The loss rose."))
    output.close(state=state)
    return path


PLANTED = {
    "subject": "Planted", "state": "finished", "step": 11, "learning_rate": 1e-3, "n_alarms": 2,
    "first_alarm": {"step": 7, "source": "grad_norm", "message": "The gradient norm rose.", "layer": 1, "head": 2},
    "cause": {"name": "learning rate", "score": 0.9, "message": "It was raised."}, "contracts_failed": [],
}  # fmt: skip


def test_the_facts_of_a_run_are_those_that_were_written(tmp_path):
    path = written(tmp_path / "a.zarr")
    found = status_of(path)
    assert {name: found[name] for name in PLANTED} == PLANTED
    assert found["loss"] == pytest.approx(3.9)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    tree = status_of(wb.open_run(path))
    assert {name: tree[name] for name in PLANTED} == PLANTED


def test_a_lost_or_stale_entry_is_made_again_from_the_store(tmp_path):
    path = written(tmp_path / "a.zarr")
    right = status_of(path)
    entry_path(path).unlink()
    assert status_of(path) == right
    assert entry_path(path).exists()
    entry_path(path).write_text("{")
    assert status_of(path) == right
    kept = entry_path(path).read_text()
    written(path, n_steps=20, alarm_at=None)
    entry_path(path).write_text(kept)  # of the run that was replaced
    assert status_of(path)["step"] == 19
    assert status_of(path)["first_alarm"] is None


def test_a_folder_is_listed_with_state_first_alarm_and_cause(tmp_path):
    written(tmp_path / "a.zarr")
    written(tmp_path / "b.zarr", alarm_at=None)
    (tmp_path / "notes").mkdir()
    shutil.copytree(tmp_path / "b.zarr", tmp_path / "broken.zarr")
    (tmp_path / "broken.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "broken.zarr" / "zarr.json").write_text("[")
    runs = wb.list_runs(tmp_path)
    assert runs["state"].to_dict() == {"a": "finished", "b": "finished", "broken": "unreadable"}
    assert runs.loc["a", ["first_alarm", "alarm", "cause"]].tolist() == [7, "grad_norm", "learning rate"]
    assert runs["first_alarm"].isna()["b"]
    assert runs.loc["b", "alarm"] == ""


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(wb.errors.StoreError, match="cannot be listed"):
        wb.list_runs(tmp_path / "none")
