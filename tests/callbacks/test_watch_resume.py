"""Runs of a loop that are continued, left open, written twice, or whose settings follow a plan."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.callbacks.test_recorder import adam, dense, loss_of, task  # noqa: F401
from workbench.errors import OptionError, StoreError


def updates(model, optimizer, task, steps):  # noqa: F811
    for i in steps:
        loss_of(model, task.batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(task, path, steps, model=None, optimizer=None, **options):  # noqa: F811
    model = dense() if model is None else model
    optimizer = adam(model) if optimizer is None else optimizer
    with wb.watch(model, optimizer, store=path, shows=False, every=None, **options) as found:
        updates(model, optimizer, task, steps)
    return found


def monitors(path):
    return wb.open_run(path)["monitors"].to_dataset().load()


class TestResume:
    def test_a_run_continues_after_its_last_row(self, task, tmp_path):  # noqa: F811
        watched(task, tmp_path / "a.zarr", range(7))
        watched(task, tmp_path / "a.zarr", range(7, 12), resume=True)
        assert monitors(tmp_path / "a.zarr")["step"].values.tolist() == [*range(12)]
        kinds = wb.open_run(tmp_path / "a.zarr")["events"]["kind"].values.tolist()
        assert kinds == ["started", "resumed", "finished"]

    @pytest.mark.parametrize(("first", "expected"), [(7, 0.0), (0, 1.0)])
    def test_data_that_come_again_after_a_resume_are_seen(self, task, tmp_path, first, expected):  # noqa: F811
        watched(task, tmp_path / "a.zarr", range(7))
        watched(task, tmp_path / "a.zarr", range(first, first + 5), resume=True)
        assert (monitors(tmp_path / "a.zarr")["repeated_examples"][7:] == expected).all()

    def test_a_checkpoint_before_the_last_row_drops_later_rows(self, task, tmp_path):  # noqa: F811
        """Their examples come again, which is no fault."""
        watched(task, tmp_path / "a.zarr", range(7))
        watched(task, tmp_path / "a.zarr", range(4, 9), resume=4)
        assert monitors(tmp_path / "a.zarr")["step"].values.tolist() == [*range(9)]
        assert (monitors(tmp_path / "a.zarr")["repeated_examples"] == 0).all()

    def test_settings_are_compared_across_the_resume(self, task, tmp_path):  # noqa: F811
        watched(task, tmp_path / "a.zarr", range(7))
        model = dense()
        found = watched(task, tmp_path / "a.zarr", range(7, 12), model, adam(model, weight_decay=0.5), resume=True)
        assert [alarm.signal for alarm in found.alarms.raised] == ["weight_decay"]
        again = watched(task, tmp_path / "a.zarr", range(12, 14), model, adam(model, weight_decay=0.5), resume=True)
        assert (again.status.n_alarms, again.status.first_alarm.step) == (1, 7)

    def test_existing_runs_are_neither_replaced_nor_continued_by_accident(self, task, tmp_path):  # noqa: F811
        watched(task, tmp_path / "a.zarr", range(3))
        with pytest.raises(StoreError, match="resume=True.*overwrite=True"):
            watched(task, tmp_path / "a.zarr", range(3))
        assert monitors(tmp_path / "a.zarr").sizes["step"] == 3
        watched(task, tmp_path / "a.zarr", range(2), overwrite=True)
        assert monitors(tmp_path / "a.zarr").sizes["step"] == 2
        for resume in (0, -1, 2.5):
            with pytest.raises(OptionError, check=about("resume", resume)):
                watched(task, tmp_path / "a.zarr", range(3), resume=resume)
        with pytest.raises(StoreError, check=says("resume it from a checkpoint, or pass overwrite=True instead")):
            wb.Recorder(tmp_path / "a.zarr", every=None, resume=True).attach(model := dense(), adam(model), step=0)
        assert monitors(tmp_path / "a.zarr").sizes["step"] == 2


class TestEnd:
    @pytest.mark.subprocess
    @pytest.mark.parametrize(
        "end", ["pass", pytest.param("raise SystemExit(3)", marks=pytest.mark.slow), "os._exit(0)"]
    )
    def test_a_script_that_closes_nothing_loses_nothing(self, tmp_path, end):
        """After a kill, rows that were not written are lost, but readers see that no process writes the run."""
        script = f"""
            import os, torch, workbench as wb
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            watched = wb.watch(model, optimizer, store="a.zarr", every=None, shows=False)
            for i in range(5):
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if {"_exit" in end}:
                watched.recorder._attached.flush()
            {end}
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, check="raise" not in end)
        run = wb.open_run(tmp_path / "a.zarr")
        assert run.attrs["state"] == "ended without being closed"
        assert run["monitors"]["step"].values.tolist() == [*range(5)]
        assert np.isfinite(run["monitors"]["loss"].values).all()

    def test_a_store_has_one_writer(self, task, tmp_path):  # noqa: F811
        model = dense()
        optimizer = adam(model)
        with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=None, shows=False) as first:
            updates(model, optimizer, task, range(2))
            first.recorder._attached.flush()
            assert wb.open_run(tmp_path / "a.zarr").attrs["state"] == "running"
            for option in ("resume", "overwrite"):
                with pytest.raises(StoreError, match="being written by an unclosed recorder"):
                    watched(task, tmp_path / "a.zarr", range(2, 4), **{option: True})
            updates(model, optimizer, task, range(2, 4))
        assert monitors(tmp_path / "a.zarr").sizes["step"] == 4
        watched(task, tmp_path / "a.zarr", range(4, 5), resume=True)


def test_planned_changes_raise_no_alarm(task, tmp_path):  # noqa: F811
    def run(path, **options):
        model = dense()
        optimizer = adam(model, rate=1e-3)
        with wb.watch(model, optimizer, store=path, every=None, shows=False, **options) as found:
            for i in range(60):
                optimizer.param_groups[0]["lr"] = 1e-3 if i < 40 else 4e-3
                tokens, targets = task.batch(i)
                n = 2 if i < 20 else 8
                loss_of(model, (tokens[:n], targets[:n])).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {alarm.signal for alarm in found.alarms.raised}

    assert run(tmp_path / "a.zarr") == {"batch_size", "learning_rate"}
    plan = {"learning_rate": lambda step: 1 if step < 40 else 4, "batch_size": {0: 2, 20: 8}}
    assert run(tmp_path / "b.zarr", plan=plan) == set()


def test_copies_of_a_watched_model_are_not_recorded(task, tmp_path):  # noqa: F811
    import copy

    model = dense()
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=None, shows=False):
        for i in range(3):
            loss_of(model, task.batch(i)).backward()
            twin = copy.deepcopy(model)
            loss_of(twin, task.batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitors(tmp_path / "a.zarr")["batch_size"].values.tolist() == [8] * 3
    assert torch.is_tensor(next(twin.parameters()).grad)
