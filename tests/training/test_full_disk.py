"""A disk that is full or is removed does not stop training, with a recorder or without."""

import functools
import gc
import resource
import shutil
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.io.test_run_output import fail_writing
from tests.small_training import same_weights
from tests.waiting import wait_for
from workbench.errors import StoreError
from workbench.io.run_output import RecordingWarning, RunOutput
from workbench.models.checkpoint import list_checkpoints
from workbench.training import loop

pytestmark = pytest.mark.medium

SETTINGS = {"n_steps": 24, "learning_rate": 1e-2, "seed": 5, "flush_every": 4}
recorders = pytest.mark.parametrize(
    "has_recorder", [pytest.param(False, marks=pytest.mark.slow), True], ids=["alone", "with a recorder"]
)


def watched(has_recorder):
    """Return settings of `wb.train`, the same each time."""
    every = {"attention": 3, "optimizer": 2, "router": None, "activations": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)  # windows of 3 steps are short
        return {"recorder": wb.Recorder(every=every, n_probe_tokens=16)} if has_recorder else {}


def limit_files(n_bytes):
    """Limit the size of all files that this process writes; as on a full disk, longer files are truncated.

    The limit also applies to files of pytest, so that each test must remove it.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def counted():
    """Collect the warnings about recording."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        found = []
        yield found
    found += [str(warning.message) for warning in issued if warning.category is RecordingWarning]


def train(model, task, events=(), **settings):
    """Train to the end, call functions after some steps, and return all records."""
    events, records = dict(events), []
    try:
        for record in wb.train(model, task, **{**SETTINGS, **settings}):
            records.append(record)
            if record.step in events:
                events[record.step]()
    finally:
        limit_files(resource.RLIM_INFINITY)
    return records


def events_of(run):
    columns = ("step", "kind", "source", "message")
    if "events" not in run.children:
        return []
    return list(zip(*(run["events"][name].values.tolist() for name in columns), strict=True))


@recorders
def test_no_rows_are_lost_if_a_disk_is_full_for_some_time(make_model, task, tmp_path, has_recorder):
    unrecorded, model, store = make_model(), make_model(), tmp_path / "run.zarr"
    expected = train(unrecorded, task)
    full, free = functools.partial(limit_files, 0), functools.partial(limit_files, resource.RLIM_INFINITY)
    with counted() as issued:
        records = train(model, task, [(9, full), (18, free)], store=store, **watched(has_recorder))
    assert [record.loss for record in records] == [record.loss for record in expected]
    assert same_weights(model, unrecorded)
    (sentence,) = issued
    assert sentence.startswith(f"The run at {store} cannot be written (File too large)")
    assert "Training continues" in sentence
    run = wb.open_run(store)
    assert run["monitors"]["step"].values.tolist() == list(range(24))
    assert run["monitors"]["loss"].values.tolist() == [record.loss for record in expected]
    assert run.attrs["state"] == "finished"
    assert [kind for _, kind, *_ in events_of(run)] == ["finished"]  # nothing was lost, so there is no gap
    if has_recorder:
        assert run["attention"]["step"].values.tolist() == list(range(2, 24, 3))


@pytest.mark.slow
@recorders
def test_rows_that_do_not_fit_into_memory_are_a_gap(make_model, task, tmp_path, monkeypatch, has_recorder):
    monkeypatch.setattr(loop, "RunOutput", functools.partial(RunOutput, max_bytes=7_000))
    full, free = functools.partial(limit_files, 0), functools.partial(limit_files, resource.RLIM_INFINITY)
    with counted() as issued:
        events = [(9, full), (44, free)]
        train(make_model(), task, events, store=tmp_path / "run.zarr", n_steps=60, **watched(has_recorder))
    assert len(issued) == 1
    run = wb.open_run(tmp_path / "run.zarr")
    gaps = {source: message for _, kind, source, message in events_of(run) if kind == "gap"}
    missing = sorted(set(range(60)) - set(run["monitors"]["step"].values.tolist()))
    assert missing == list(range(missing[0], missing[-1] + 1)) != []
    sentence = f"Part 'monitors' lacks {len(missing)} rows of steps {missing[0]} to {missing[-1]}: File too large."
    assert gaps["monitors"] == sentence
    assert 8 <= missing[0] < missing[-1] < 48  # the next block after the disk is free ends at step 48
    assert set(gaps) <= (
        {"monitors", "attention", "optimizer", "precision", "reduction", "update"} if has_recorder else {"monitors"}
    )


@recorders
def test_training_finishes_on_a_disk_that_stays_full(make_model, task, tmp_path, has_recorder):
    store = tmp_path / "run.zarr"
    with counted() as issued:
        full = functools.partial(limit_files, 0)
        records = train(make_model(), task, [(9, full)], store=store, **watched(has_recorder))
    assert len(records) == 24
    first, last = issued
    assert "Training continues" in first
    assert last.endswith("were not written (File too large) and are lost.")
    run = wb.open_run(store).load()  # the last commit before the disk was full
    assert run["monitors"]["step"].values.tolist() == list(range(8))
    assert run.attrs["state"] == "ended without being closed"


@recorders
def test_a_store_that_is_removed_is_not_created_again(make_model, task, tmp_path, has_recorder):
    store = tmp_path / "run.zarr"
    with counted() as issued:
        events = [(9, lambda: shutil.rmtree(store))]
        records = train(make_model(), task, events, store=store, **watched(has_recorder))
    assert len(records) == 24
    (sentence,) = issued
    assert sentence.startswith(f"The run at {store} was removed, moved or replaced")
    assert [each for each in tmp_path.iterdir() if each.name != ".index"] == []


def test_rows_lost_at_the_end_of_a_run_are_recorded_when_it_is_resumed(make_model, task, tmp_path, monkeypatch):
    """The checkpoint was written, but not the rows of the steps before it."""
    killed, settings = tmp_path / "killed", {"checkpoint_every": 6, "checkpoints": tmp_path / "live" / "checkpoints"}
    through = make_model()
    train(through, task)
    with counted() as issued:
        events = [(9, lambda: fail_writing(monkeypatch)), (13, lambda: shutil.copytree(tmp_path / "live", killed))]
        train(make_model(), task, events, store=tmp_path / "live" / "run.zarr", **settings)
    assert len(issued) == 2
    monkeypatch.undo()
    resumed, settings["checkpoints"] = make_model(), killed / "checkpoints"
    train(resumed, task, store=killed / "run.zarr", resume=True, **settings)
    assert same_weights(resumed, through)
    run = wb.open_run(killed / "run.zarr")
    assert run["monitors"]["step"].values.tolist() == [*range(10), *range(12, 24)]
    sentence = "Part 'monitors' lacks 2 rows of steps 10 to 11: the run ended before they were written."
    assert events_of(run)[:2] == [
        (12, "resumed", "", "Resumed from the checkpoint of step 12."),
        (12, "gap", "monitors", sentence),
    ]
    wb.schema.runs.validate_events(run["events"].to_dataset())


class CustomModel(nn.Module):
    """Model that is not of the zoo, whose parameters are therefore written by another function."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(32, 32, generator=generator))

    def forward(self, tokens):
        return self.table[tokens]


@pytest.mark.parametrize(
    ("kind", "which", "has_recorder"),
    [
        ("zoo", "weights", True),
        ("custom", "other state", False),
        pytest.param("zoo", "other state", True, marks=pytest.mark.slow),
        pytest.param("custom", "weights", False, marks=pytest.mark.slow),
        pytest.param("zoo", "weights", False, marks=pytest.mark.slow),
        pytest.param("zoo", "other state", False, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_does_not_fit_on_the_disk_is_an_event_and_the_previous_one_is_kept(
    make_model, task, tmp_path, kind, which, has_recorder
):
    make = make_model if kind == "zoo" else CustomModel
    options = watched(has_recorder)
    settings = {"checkpoint_every": 5, "checkpoints": tmp_path / "checkpoints", "flush_every": 100}
    through = make()
    train(through, task)

    def full():
        sizes = [(tmp_path / "checkpoints" / "step-00000005" / name).stat().st_size for name in FILES]
        limit_files(1000 if which == "weights" else (sizes[0] + sizes[1]) // 2)

    free = functools.partial(limit_files, resource.RLIM_INFINITY)
    events = [(7, full), (16, free), (17, interrupt)]
    with counted() as issued, pytest.raises(KeyboardInterrupt):
        train(make(), task, events, store=tmp_path / "run.zarr", **options, **settings)
    assert sum("There is no checkpoint of step 10: " in sentence for sentence in issued) == 1
    assert not any("checkpoint of step 15" in sentence for sentence in issued)
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [5, 18]  # the last one is written at the interrupt
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2  # no incomplete checkpoint
    gaps = [event for event in events_of(wb.open_run(tmp_path / "run.zarr")) if event[1] == "gap"]
    assert [(step, source) for step, _, source, _ in gaps] == [(10, "checkpoint"), (15, "checkpoint")]
    assert gaps[0][3].startswith(f"There is no checkpoint of step 10: {tmp_path / 'checkpoints' / 'step-00000010'} ")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000018")
    resumed = make()
    assert train(resumed, task, store=tmp_path / "run.zarr", resume=True, **options, **settings)[0].step == 5
    assert same_weights(resumed, through)


FILES = ("model.safetensors", "training.pt")


def interrupt():
    raise KeyboardInterrupt


def test_a_folder_of_checkpoints_that_is_unavailable_for_some_time(make_model, task, tmp_path):
    """Without a store there is no event, but one warning each time."""
    place, away = tmp_path / "checkpoints", tmp_path / "away"

    def break_it():
        place.rename(away)
        place.touch()

    def bring_back():
        place.unlink()
        away.rename(place)

    with counted() as issued:
        events = [(5, break_it), (10, bring_back), (14, break_it), (18, bring_back)]
        train(make_model(), task, events, checkpoints=place, checkpoint_every=4)
    assert [sentence.split(":")[0] for sentence in issued] == [
        "There is no checkpoint of step 8",
        "There is no checkpoint of step 16",
    ]
    assert all("Training continues; earlier checkpoints are unchanged." in sentence for sentence in issued)
    assert list(list_checkpoints(place)) == [4, 12, 20, 24]


def test_paths_that_cannot_be_written_are_rejected_at_the_start(make_model, task, tmp_path):
    settings = {"store": tmp_path / "run.zarr", "checkpoint_every": 6}
    train(make_model(), task, **settings)
    before = wb.open_run(tmp_path / "run.zarr").load()
    (tmp_path / "file").touch()
    model = make_model()
    for places, error in [
        ({"checkpoints": tmp_path / "file" / "c"}, says("Not a directory); pass another checkpoints=.")),
        (
            {"store": tmp_path / "file" / "run.zarr", "checkpoints": tmp_path / "new"},
            says("cannot be written (File exists); check its folder."),
        ),
    ]:
        run = wb.train(model, task, overwrite=True, **{**SETTINGS, **settings, **places})
        with pytest.raises(StoreError, check=error):
            next(run)
    assert same_weights(model, make_model())
    assert wb.open_run(tmp_path / "run.zarr").identical(before)
    assert sorted(place.name for place in tmp_path.iterdir()) == [".index", "file", "run.checkpoints", "run.zarr"]
    limit_files(0)
    try:
        with pytest.raises(StoreError, check=about("path")):
            next(wb.train(model, task, store=tmp_path / "new.zarr", **SETTINGS))
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert not (tmp_path / "new.zarr").exists()


@recorders
def test_a_run_that_is_not_closed_ends_with_its_generator(make_model, task, tmp_path, has_recorder):
    store = tmp_path / "run.zarr"
    settings = {**SETTINGS, "store": store, "overwrite": True}
    run = wb.train(make_model(), task, **settings, **watched(has_recorder))
    del run  # never started
    gc.collect()
    assert not store.exists()
    run = wb.train(make_model(), task, **settings, **watched(has_recorder))
    next(run)
    keeper = {"run": run}
    keeper["itself"] = keeper
    del run, keeper
    gc.collect()
    wait_for(lambda: wb.open_run(store).attrs["state"] == "stopped")
    assert wb.open_run(store)["monitors"].sizes["step"] == 1


@recorders
def test_an_error_in_the_loop_of_the_caller_keeps_the_rows(make_model, task, tmp_path, has_recorder):
    with pytest.raises(KeyboardInterrupt):
        train(make_model(), task, [(5, interrupt)], store=tmp_path / "run.zarr", **watched(has_recorder))
    run = wb.open_run(tmp_path / "run.zarr")
    assert run["monitors"].sizes["step"] == 6
    assert run.attrs["state"] == "stopped"
