"""Runs on other machines and in buckets are read by URL as if they were here, or refused; never with other values."""

import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.io.services import bucket, ssh_server
from tests.io.test_run_index import PLANTED, written
from workbench.io import far_places, watched_store
from workbench.io.run_index import status_of
from workbench.io.run_output import RunOutput
from workbench.training.recording import new_run


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(far_places, "_WAITS", (0.0, 0.05, 0.1))


@contextmanager
def far(kind, folder, monkeypatch):
    """Yield the URL of an empty folder far away, and the link to it."""
    if kind == "memory":
        fsspec.filesystem("memory").store.clear()
        yield "memory://runs", None
    elif kind == "s3":
        with bucket(monkeypatch) as link:
            yield "s3://runs", link
    else:
        (folder / "there").mkdir()
        with ssh_server(folder, monkeypatch) as link:
            yield f"ssh://far{folder}/there", link


def put(path, url):
    place = far_places.FarPlace(url)
    for file in Path(path).rglob("*"):
        if file.is_file():
            place.write(file.read_bytes(), str(file.relative_to(path)))


@pytest.mark.parametrize("kind", ["memory", "s3", pytest.param("ssh", marks=pytest.mark.slow)])
def test_a_run_far_away_is_the_run_here(kind, tmp_path, monkeypatch):
    path = written(tmp_path / "a.zarr")
    saved = wb.save(wb.open_run(wb.samples.failed_run("precision")), tmp_path / "saved.zarr")
    with far(kind, tmp_path, monkeypatch) as (url, _):
        for each in (path, saved):
            put(each, f"{url}/{each.name}")
            xr.testing.assert_identical(wb.open_run(f"{url}/{each.name}").load(), wb.open_run(each).load())
        here, there = wb.diagnose(saved), wb.diagnose(f"{url}/saved.zarr")
        assert there.attrs["summary"] == here.attrs["summary"]
        found = status_of(f"{url}/a.zarr")
        assert {name: found[name] for name in PLANTED} == PLANTED
        with pytest.raises(wb.errors.StoreError, match="there is no such file"):
            wb.open_run(f"{url}/none.zarr")


def trained(store, n_steps=60, hook=lambda step: None, **options):
    """Train a small model while it is watched, and return its losses."""
    torch.manual_seed(0)
    random.seed(0)
    model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2, vocab_size=16, max_length=8)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    watched = None if store is None else wb.watch(model, optimizer, store=store, shows=False, **options)
    for step in range(n_steps):
        inputs, targets = task.batch(step + int(random.random() * 5))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        hook(step)
    if watched is not None:
        watched.close()
    return losses, watched


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "ssh"])
def test_a_run_is_written_to_a_url_and_to_disk(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone, _ = trained(None)
    with far(kind, tmp_path, monkeypatch) as (url, _):
        losses, watched = trained(f"{url}/a.zarr")
        assert losses == alone
        xr.testing.assert_identical(wb.open_run(f"{url}/a.zarr").load(), wb.open_run(watched.path).load())
        assert wb.open_run(f"{url}/a.zarr").attrs["state"] == "finished"
        assert wb.list_runs(url)["state"].to_dict() == {"a": "finished"}
        with pytest.raises(wb.errors.StoreError, match="exists already"):
            trained(f"{url}/a.zarr/")
        shutil.rmtree("runs")
        with pytest.raises(wb.errors.StoreError, match="exists already"):
            trained(f"{url}/a.zarr")
        shutil.rmtree("runs", ignore_errors=True)
        # A training that continues elsewhere brings the record first.
        _, again = trained(f"{url}/a.zarr", resume=True, n_steps=15)
        assert wb.open_run(f"{url}/a.zarr")["monitors"]["step"].values[-1] == 74
        xr.testing.assert_identical(wb.open_run(f"{url}/a.zarr").load(), wb.open_run(again.path).load())
        trained(f"{url}/a.zarr", overwrite=True, n_steps=12)
        assert wb.open_run(f"{url}/a.zarr")["monitors"]["step"].values[-1] == 11


@pytest.mark.parametrize("kind", ["memory", pytest.param("ssh", marks=pytest.mark.slow)])
def test_a_timeline_follows_a_run_far_away(kind, tmp_path, monkeypatch):
    path = tmp_path / "a.zarr"
    output = RunOutput(new_run(path, {"model": {"name": "Planted"}}, overwrite=True))

    def add(steps):
        for step in steps:
            output.add("monitors", step, {"loss": 5.0 - step, "learning_rate": 1e-3})
        output.flush()
        put(path, f"{url}/a.zarr")

    with far(kind, tmp_path, monkeypatch) as (url, link):
        add(range(5))
        timeline = wb.widgets.Timeline(f"{url}/a.zarr", poll_every=1000)
        assert timeline.runs["a"].line("loss", None).value.tolist() == [5, 4, 3, 2, 1]
        add(range(5, 8))
        assert timeline.poll()
        assert timeline.runs["a"].line("loss", None).value.tolist() == [5, 4, 3, 2, 1, 0, -1, -2]
        assert timeline.states == {"a": "running"}
        if link is not None:
            link.cut()
            assert timeline.poll()
            assert "was not reached" in timeline.runs["a"].problem
            link.mend()
            add([8])
            assert timeline.poll()
            assert (timeline.runs["a"].problem, timeline.states) == ("", {"a": "running"})
        far_places.FarPlace(f"{url}/a.zarr").remove(is_folder=True)
        assert timeline.poll()
        assert timeline.states == {"a": "removed"}
        assert len(timeline.runs["a"].line("loss", None).value) >= 8
        timeline.close()


def test_a_lost_chunk_or_another_run_far_away_is_an_error_and_never_a_value(tmp_path, monkeypatch):
    path, other = written(tmp_path / "a.zarr"), written(tmp_path / "b.zarr", alarm_at=None)
    with far("memory", tmp_path, monkeypatch) as (url, _):
        put(path, f"{url}/a.zarr")
        whole = wb.open_run(f"{url}/a.zarr")  # whose small parts are read at once
        monkeypatch.setattr(watched_store, "_SMALL", 0)
        by_chunk = wb.open_run(f"{url}/a.zarr")
        put(other, f"{url}/a.zarr")
        xr.testing.assert_identical(whole.load(), wb.open_run(path).load())
        with pytest.raises(wb.errors.StoreError, match="removed or replaced"):
            by_chunk.load()
        place = far_places.FarPlace(f"{url}/a.zarr")
        place.remove("monitors/loss/c/0")
        with pytest.raises(wb.errors.StoreError, match="values are lost"):
            wb.open_run(f"{url}/a.zarr").load()
        place.write(b"garbage", "monitors/loss/c/0")
        with pytest.raises(wb.errors.StoreError):
            wb.open_run(f"{url}/a.zarr").load()


def test_what_cannot_be_reached_is_named_without_a_password():
    with pytest.raises(wb.errors.StoreError, match="this-is-no-protocol"):
        wb.open_run("this-is-no-protocol://host/a.zarr")
    with pytest.raises(wb.errors.StoreError, match="user@127.0.0.1") as found:
        wb.open_run("ssh://user:secret@127.0.0.1:1/a.zarr")
    assert "secret" not in str(found.value)
