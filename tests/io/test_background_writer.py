import errno
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from tests.io.killed_writer import EVERY, PARTS, attention, monitors
from tests.waiting import wait_for
from workbench.errors import OptionError, StoreError
from workbench.io.background_writer import BackgroundWriter, Part, RecordingWarning
from workbench.io.run_writer import RunWriter
from workbench.schema.events import Event

ROOT = Path(__file__).parents[2]


def begin(path, **options):
    """Create a writer that writes only on `flush`, unless ``options`` differ."""
    options = {"rows_per_block": 10**6, "seconds_per_block": 1e6, **options}
    writer = BackgroundWriter(RunWriter(path, {}), **options)
    for part in PARTS:
        writer.declare(part)
    return writer


def add(writer, steps):
    for step in steps:
        writer.add("monitors", step, monitors(step))
        if step % EVERY == 0:
            writer.add("attention", step, attention(step))


def check_rows(run, monitored, measured):
    """Check that a run has exactly the rows of these steps, in order, with their values."""
    found = run["monitors"]
    assert found["step"].values.tolist() == list(monitored)
    for name in ("loss", "grad_norm", "is_on"):
        assert found[name].values.tolist() == [monitors(step)[name] for step in monitored]
    found = run["attention"]
    assert found["step"].values.tolist() == list(measured)
    expected = np.array([attention(step)["stable_rank"] for step in measured])
    np.testing.assert_array_equal(found["stable_rank"].values, expected.reshape(-1, 3, 4, 2))


def check_prefix(run):
    """Check that each part has the rows of the first steps without gaps, and return their number."""
    sizes = [run[part].sizes["step"] if part in run.children else 0 for part in ("monitors", "attention")]
    if all(sizes):
        check_rows(run, range(sizes[0]), range(0, sizes[1] * EVERY, EVERY))
    return sizes


def fail_writing(monkeypatch, code=errno.ENOSPC):
    def put(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("zarr.storage._local._put", put)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


@pytest.mark.medium
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    rows_per_block=st.integers(1, 40),
    flushes=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_rows_in_blocks_of_any_size_read_back_as_added(tmp_path_factory, sizes, rows_per_block, flushes):
    path, first = tmp_path_factory.mktemp("blocks") / "run.zarr", 0
    with begin(path, rows_per_block=rows_per_block) as writer:
        for size, is_flushed in zip(sizes, flushes, strict=False):
            add(writer, range(first, first + size))
            first += size
            if is_flushed:
                assert writer.flush()
                check_rows(wb.open_run(path), range(first), range(0, first, EVERY))
    check_rows(wb.open_run(path), range(first), range(0, first, EVERY))


def test_a_full_block_is_written_without_a_flush(path):
    writer = begin(path, rows_per_block=20)
    add(writer, range(20))
    wait_for(lambda: "monitors" in wb.open_run(path).children)
    check_rows(wb.open_run(path), range(20), range(0, 20, EVERY))
    writer.close()


def test_a_block_is_written_after_its_time(path):
    writer = begin(path, seconds_per_block=0.1)
    add(writer, range(3))
    wait_for(lambda: "monitors" in wb.open_run(path).children)
    wait_for(lambda: not threads_of(path))  # ended, as there is nothing to write
    add(writer, range(3, 6))
    wait_for(lambda: wb.open_run(path)["monitors"].sizes["step"] == 6)
    writer.close()


def threads_of(path):
    return [thread for thread in threading.enumerate() if thread.name == f"writer of {path.name}"]


def test_values_are_copied_and_may_be_omitted(path):
    writer = BackgroundWriter(RunWriter(path, {}))
    attrs = {"a": {"units": "nat", "meaning": "an example"}}
    coords = {"layer": [2, 5], "layer_name": ("layer", ["two", "five"])}
    writer.declare(Part("part", {"a": (), "b": ("layer",), "c": ("layer",)}, coords, attrs, {"c": "int64"}))
    buffer, counts = np.zeros(2), np.zeros(2, int)
    for step in range(3):
        buffer[:], counts[:] = step, 10 * step
        writer.add("part", step, {"a": step, "b": buffer, "c": counts} if step != 1 else {"c": counts})
    assert writer.close(state="finished")
    assert threads_of(path) == []
    expected = xr.Dataset(
        {
            "a": ("step", [0.0, np.nan, 2.0]),
            "b": (("step", "layer"), [[0.0, 0.0], [np.nan, np.nan], [2.0, 2.0]]),
            "c": (("step", "layer"), [[0, 0], [10, 10], [20, 20]]),
        },
        {"step": [0, 1, 2], **coords},
    )
    run = wb.open_run(path)
    assert run.attrs["state"] == "finished"
    xr.testing.assert_equal(run["part"].to_dataset(), expected)
    assert run["part"]["a"].attrs == attrs["a"]
    assert run["part"]["c"].dtype == np.int64


def test_parts_of_scalars_keep_their_types(path):
    values = {"loss": 0.5, "is_on": True, "n": 3, "rate": np.float32(0.5)}
    with BackgroundWriter(RunWriter(path, {})) as writer:
        writer.declare(Part.of_scalars("monitors", values))
        writer.add("monitors", 0, values)
    kinds = {name: variable.dtype.kind for name, variable in wb.open_run(path)["monitors"].data_vars.items()}
    assert kinds == {"loss": "f", "is_on": "b", "n": "i", "rate": "f"}


def test_events_have_a_place(path):
    with begin(path) as writer:
        writer.event(Event(3, "alarm", source="effective_rank D2", score=2.5, message="low", layer=1, head=4))
        writer.event(Event(3, "finished"))
    events = wb.schema.runs.validate_events(wb.open_run(path)["events"].to_dataset())
    assert events["layer"].values.tolist() == [1, -1]
    assert events["head"].values.tolist() == [4, -1]
    assert events["kind"].values.tolist() == ["alarm", "finished"]
    assert events["score"].values[0] == 2.5
    assert all(variable.attrs["meaning"] for variable in events.data_vars.values())


def test_events_of_an_older_store_continue_without_layer_and_head(path):
    older = RunWriter(path, {})
    columns = {"step": [1], "kind": ["fault"], "source": [""], "score": [np.nan], "message": ["old"]}
    older.append("events", xr.Dataset({name: ("event", column) for name, column in columns.items()}))
    older.commit()
    older.release()
    with BackgroundWriter(RunWriter.reopen(path, before_step=10)) as writer:
        writer.event(Event(11, "alarm", message="new", layer=3, head=1))
    events = wb.open_run(path)["events"]
    assert events["message"].values.tolist() == ["old", "new"]
    assert "layer" not in events


def spectra(step, n_modes=4):
    eigenvalue = np.full((1, 2, n_modes), step + 1j)
    return xr.Dataset(
        {
            "eigenvalue": (("step", "layer", "mode"), eigenvalue),
            "is_reliable": (("step", "layer", "mode"), eigenvalue.real > 3),
        },
        {"step": [step], "layer": [0, 1], "layer_name": ("layer", ["a", "bc"])},
    )


def test_datasets_of_one_step_are_written_too(path):
    with begin(path) as writer:
        for step in (0, 5):
            writer.add_dataset("spectra", spectra(step))
    with BackgroundWriter(RunWriter.reopen(path, before_step=6)) as writer:
        with pytest.raises(StoreError, check=says("record the same variables as before, or write to another")):
            writer.add_dataset("spectra", spectra(7, n_modes=3))
        with pytest.raises(StoreError, check=says("needs exactly one step; use expand_dims(step=[...]).")):
            writer.add_dataset("spectra", spectra(7).squeeze("step"))
        writer.add_dataset("spectra", spectra(9))
    found = wb.open_run(path)["spectra"].to_dataset()
    xr.testing.assert_equal(found, xr.concat([spectra(step) for step in (0, 5, 9)], "step"))


def test_a_reopened_store_continues_at_the_given_step(path):
    with begin(path) as writer:
        add(writer, range(30))
    writer = BackgroundWriter(RunWriter.reopen(path, before_step=17))
    for part in PARTS:
        writer.declare(part)
    add(writer, range(17, 40))
    assert writer.close()
    check_rows(wb.open_run(path), range(40), range(0, 40, EVERY))


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (
            Part("attention", {"stable_rank": ("layer", "head")}),
            says("has term, which the rows lack; record the same variables as"),
        ),
        (
            Part("attention", {"other": ("layer", "head", "term")}, {"term": ["D2", "D3"]}),
            says("has stable_rank, which the rows lack and lacks other, which"),
        ),
        (
            Part("attention", {"stable_rank": ("head", "layer", "term")}, {"term": ["D2", "D3"]}),
            says("record the same variables as before, or write to another"),
        ),
        (
            Part("attention", {"stable_rank": ("layer", "head", "term")}, {"term": ["D2", "W"]}),
            says("than the rows; record the same variables as before, or"),
        ),
        (
            Part("attention", {"stable_rank": ("layer", "head", "term")}, {"term": ["D2", "D3", "W"]}),
            says("record the same variables as before, or write to another"),
        ),
        (
            Part("monitors", dict.fromkeys(("loss", "grad_norm", "is_on"), ())),
            says("record the same variables as before, or write to another"),
        ),
    ],
)
def test_a_part_unlike_the_stored_one_is_rejected_before_anything_is_written(path, part, error):
    with begin(path) as writer:
        add(writer, range(12))
    reopened = RunWriter.reopen(path, before_step=100)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with pytest.raises(StoreError, check=error):
        BackgroundWriter(reopened).declare(part)
    assert before == {file: file.stat().st_mtime_ns for file in path.rglob("*")}


def test_rows_unlike_those_declared_are_rejected(path):
    writer = begin(path)
    add(writer, range(2))
    for action, error in [
        (lambda: writer.declare(PARTS[0]), says("exists already; declare each part once, before its first")),
        (lambda: writer.add("other", 3, {}), says("declare it before its first row.")),
        (
            lambda: writer.add("monitors", 3, {"is_on": True, "lost": 1.0}),
            says("has no variable lost; declare it in its Part."),
        ),
        (
            lambda: writer.add("monitors", 3, {"loss": 1.0}),
            says("expected one bool; only floating-point variables may be"),
        ),
        (
            lambda: writer.add("monitors", 3, {"loss": "x", "is_on": 1}),
            says("expected one float; only floating-point variables may be"),
        ),
        (
            lambda: writer.add("attention", 3, {"stable_rank": np.zeros((3, 5, 2))}),
            says("pass the same shape at every step."),
        ),
        (lambda: writer.add("monitors", 1, monitors(1)), says("add rows in increasing order.")),
        (lambda: writer.add_dataset("monitors", spectra(3)), says("was declared, so it consists of rows; use add().")),
    ]:
        with pytest.raises(StoreError, check=error):
            action()
    assert writer.close()
    check_rows(wb.open_run(path), range(2), [0])
    with pytest.raises(StoreError, check=says("is closed; add rows before close().")):
        writer.add("monitors", 9, monitors(9))
    assert writer.close()
    with pytest.raises(OptionError, check=about("rows_per_block", 0)):
        BackgroundWriter(RunWriter(path, {}, overwrite=True), rows_per_block=0)


def test_adding_never_waits_for_a_write_and_memory_stays_bounded(path, monkeypatch):
    may_write, is_writing = threading.Event(), threading.Event()

    def slow(self, part, rows, append=RunWriter.append):
        is_writing.set()
        may_write.wait()
        append(self, part, rows)

    monkeypatch.setattr(RunWriter, "append", slow)
    writer = begin(path, max_bytes=20_000, rows_per_block=5)
    add(writer, range(5))
    is_writing.wait()
    add(writer, range(5, 1000))  # would block forever if it waited
    assert not writer.flush(timeout=0.01)
    may_write.set()
    assert writer.close()
    run = wb.open_run(path).load()
    steps = {part: run[part]["step"].values for part in ("monitors", "attention")}
    gaps = {source: (n, text) for source, n, text in zip(*(run["events"][c].values for c in EVENT), strict=True)}
    for part, every in (("monitors", 1), ("attention", EVERY)):
        n_lost = 1000 // every - steps[part].size
        last = steps[part][np.argmax(np.diff(steps[part]) > every)], steps[part][-1] - 0
        assert gaps[part][0] == n_lost > 0
        jump = int(np.flatnonzero(np.diff(steps[part]) > every).item())
        first, last = steps[part][jump] + every, steps[part][jump + 1] - every
        sentence = f"Part '{part}' lacks {n_lost} rows of steps {first} to {last}: the disk does not keep up."
        assert gaps[part][1] == sentence
    check_rows(run, steps["monitors"], steps["attention"])


EVENT = ("source", "score", "message")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_write_errors_are_reported_once_and_writing_is_retried(path, monkeypatch, code):
    writer = begin(path)
    add(writer, range(10))
    assert writer.flush()
    fail_writing(monkeypatch, code)
    add(writer, range(10, 20))
    with pytest.warns(RecordingWarning, match=f"cannot be written .{os.strerror(code)}.*Training continues") as issued:
        assert not writer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported only once
        add(writer, range(20, 30))
        assert not writer.flush()
        assert os.strerror(code) in writer.trouble
        check_rows(wb.open_run(path), range(10), range(0, 10, EVERY))
        monkeypatch.undo()
        add(writer, range(30, 40))
        assert writer.flush()
    assert len(issued) == 1
    assert writer.trouble is None
    check_rows(wb.open_run(path), range(40), range(0, 40, EVERY))
    assert "events" not in wb.open_run(path).children  # nothing was lost
    writer.close()


def test_a_commit_that_failed_is_retried(path, monkeypatch):
    writer = begin(path, seconds_per_block=0.5)
    add(writer, range(10))
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "_write_root", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.warns(RecordingWarning, match="cannot be written"):
            assert not writer.flush()
    wait_for(lambda: "monitors" in wb.open_run(path).children)  # retried without further rows
    check_rows(wb.open_run(path), range(10), range(0, 10, EVERY))
    writer.close()


def test_dropped_rows_are_recorded_as_a_gap(path, monkeypatch):
    writer = begin(path, max_bytes=12_000)
    add(writer, range(10))
    writer.event(Event(9, "fault", message="kept"))
    assert writer.flush()
    fail_writing(monkeypatch)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        for first in range(10, 400, 30):
            add(writer, range(first, first + 30))
            writer.flush()
    assert [warning.category for warning in issued] == [RecordingWarning]
    assert sum(waiting.n_bytes for waiting in writer._parts.values()) <= 12_000
    monkeypatch.undo()
    assert writer.close()
    run = wb.open_run(path).load()
    events = run["events"]
    assert events["kind"].values.tolist() == ["fault", "gap", "gap"]
    wb.schema.runs.validate_events(events.to_dataset())
    missing = {}
    for part, every in (("monitors", 1), ("attention", EVERY)):
        missing[part] = sorted(set(range(0, 400, every)) - set(run[part]["step"].values.tolist()))
    for event in (1, 2):
        lost = missing[str(events["source"].values[event])]
        assert lost == list(range(lost[0], lost[-1] + 1, lost[1] - lost[0]))  # the oldest ones, contiguous
        assert lost[0] == 10
        sentence = f"lacks {len(lost)} rows of steps {lost[0]} to {lost[-1]}: No space left on device."
        assert str(events["message"].values[event]).endswith(sentence)
        assert events["score"].values[event] == len(lost)
        assert events["step"].values[event] == 399
    check_rows(run, run["monitors"]["step"].values, run["attention"]["step"].values)


def test_rows_that_never_reach_the_disk_are_reported_at_the_end(path, monkeypatch):
    writer = begin(path)
    add(writer, range(10))
    fail_writing(monkeypatch)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        assert not writer.close()
    lost = r"12 rows of the run at .* were not written \(No space left on device\) and are lost\."
    assert re.fullmatch(lost, str(issued[-1].message))


def test_a_removed_store_is_not_created_again(path):
    writer = begin(path)
    add(writer, range(10))
    assert writer.flush()
    shutil.rmtree(path)
    add(writer, range(10, 20))
    with pytest.warns(RecordingWarning, match="was removed.*Training continues without being recorded"):
        assert not writer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported only once
        add(writer, range(20, 30))
        writer.event(Event(30, "finished"))
        assert not writer.close()
    assert not path.exists()


def test_a_run_that_replaced_another_is_not_changed(path):
    writer = begin(path)
    add(writer, range(10))
    with replace_run(path) as other:
        add(other, range(3))
    add(writer, range(10, 20))
    with pytest.warns(RecordingWarning, match="replaced while it was being written"):
        assert not writer.close(state="finished")
    run = wb.open_run(path)
    assert "state" not in run.attrs
    check_rows(run, range(3), [0])


def replace_run(path):
    shutil.rmtree(path)  # a program that does not look at the lock
    writer = BackgroundWriter(RunWriter(path, {}, overwrite=True))
    for part in PARTS:
        writer.declare(part)
    return writer


class FailingDisk:
    """Makes some file operations below a folder fail, counted from the first."""

    def __init__(self, monkeypatch, folder, first, n_failing):
        self.folder, self.n_done = str(folder), 0
        self.failing = range(first, first + n_failing)
        for module, name in ((os, "replace"), (os, "mkdir"), (io, "open")):
            monkeypatch.setattr(module, name, self.wrapped(getattr(module, name)))

    def wrapped(self, operation):
        def perform(path, *args, **options):
            is_writing = operation is not OPEN or "w" in str((*args, *options.values())[:1])
            if is_writing and str(path).startswith(self.folder):
                self.n_done += 1
                if self.n_done - 1 in self.failing:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return operation(path, *args, **options)

        return perform


OPEN = io.open


def write_on_failing_disk(path, monkeypatch, first, n_failing):
    """Write three blocks while some operations fail, check the store after each, and return the operation count."""
    writer = begin(path)
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, path.parent, first, n_failing)
        for steps in (range(4), range(4, 9), range(9, 11)):
            add(writer, steps)
            writer.event(Event(steps.stop, "fault", message=str(steps.stop)))
            is_written = writer.flush()
            sizes = check_prefix(wb.open_run(path).load())
            assert not is_written or sizes == [steps.stop, len(range(0, steps.stop, EVERY))]
    assert writer.close()
    run = wb.open_run(path).load()
    check_rows(run, range(11), range(0, 11, EVERY))
    assert run["events"]["message"].values.tolist() == ["4", "9", "11"]
    return disk.n_done


@pytest.mark.filterwarnings("ignore::workbench.io.background_writer.RecordingWarning")
@pytest.mark.parametrize("n_trials", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_operations_that_fail_neither_break_the_store_nor_repeat_rows(tmp_path, monkeypatch, n_trials):
    n_operations = write_on_failing_disk(tmp_path / "well.zarr", monkeypatch, 0, 0)
    draw = random.Random(0)
    for trial, first in enumerate(draw.sample(range(n_operations), n_trials)):
        n_failing = draw.choice((1, 2, 10, n_operations))
        write_on_failing_disk(tmp_path / f"{trial}.zarr", monkeypatch, first, n_failing)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    command = [sys.executable, "-m", "tests.io.killed_writer", str(tmp_path_factory.mktemp("first") / "run.zarr")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "ready"
        yield process
        process.stdin.close()


@pytest.mark.subprocess
@pytest.mark.parametrize("index", [pytest.param(i, marks=() if i % 4 == 0 else pytest.mark.slow) for i in range(8)])
def test_a_killed_process_leaves_complete_rows_and_readers_never_see_fewer(process, path, index):
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    timer = threading.Timer(random.Random(index).random() * 0.5, os.kill, (child, signal.SIGKILL))
    timer.start()
    seen = [0, 0]
    while timer.is_alive():
        if path.exists():
            sizes = check_prefix(wb.open_run(path))  # while it grows
            assert all(now >= before for now, before in zip(sizes, seen, strict=True))
            seen = sizes
    last = -1
    while (line := process.stdout.readline().strip()) != "over":
        last = int(line)
    if not path.exists():
        assert last == -1
        return
    run = wb.open_run(path).load()
    n_rows, n_measurements = check_prefix(run)
    assert n_rows > last
    block = 7 + 7 * EVERY  # of a part that does not fill a block itself
    assert abs(n_rows - n_measurements * EVERY) <= block
    if n_rows > 60:
        assert run["events"]["message"].values[0] == "at 0"


def in_new_process(code, *args, seconds=300):
    code = "import sys; from tests.io.test_background_writer import *\n" + code
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.subprocess
def test_open_writers_are_closed_at_interpreter_exit(tmp_path):
    paths = [tmp_path / f"{name}.zarr" for name in "abc"]
    done = in_new_process(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "writers = [begin(Path(path), rows_per_block=30) for path in sys.argv[1:]]\n"
        "with ThreadPoolExecutor() as pool: list(pool.map(lambda writer: add(writer, range(200)), writers))\n"
        "writers[0].commit(state='left')\n",
        *paths,
    )
    assert done.stderr == ""
    for path in paths:
        check_rows(wb.open_run(path), range(200), range(0, 200, EVERY))
    assert wb.open_run(paths[0]).attrs["state"] == "left"


@pytest.mark.slow
@pytest.mark.subprocess
def test_rows_are_written_at_interpreter_exit(path):
    """No block is written before, so that all imports of writing happen at interpreter exit."""
    done = in_new_process(
        "writer = begin(Path(sys.argv[1]), rows_per_block=10_000, seconds_per_block=1e4)\nadd(writer, range(60))\n",
        path,
    )
    assert done.stderr == ""
    check_rows(wb.open_run(path), range(60), range(0, 60, EVERY))


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_forked_child_does_not_write_the_run_of_its_parent(path):
    in_new_process(
        "writer = begin(Path(sys.argv[1]), rows_per_block=10)\n"
        "add(writer, range(25))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    add(writer, range(25, 90)); writer.event(Event(26, 'fault')); writer.flush()\n"
        "    writer.close(state='child')\n"
        "    sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "add(writer, range(25, 40)); assert writer.close(state='parent')\n",
        path,
    )
    run = wb.open_run(path)
    check_rows(run, range(40), range(0, 40, EVERY))
    assert run.attrs["state"] == "parent"
    assert "events" not in run.children


def test_events_are_written_without_places_to_a_store_of_the_first_format(path):
    """A store continues in the format in which it began."""
    for before_step in (None, 9):
        run = RunWriter(path, {}) if before_step is None else RunWriter.reopen(path, before_step=before_step)
        with BackgroundWriter(run) as writer:
            writer.event(Event(3, "alarm", message="here", layer=1, head=4))
        for name in ("layer", "head") if before_step is None else ():
            shutil.rmtree(path / "events" / name)
        zarr.consolidate_metadata(path)
    events = wb.open_run(path)["events"]
    assert set(events.variables) == {"step", "kind", "source", "score", "message"}
    assert events["message"].values.tolist() == ["here", "here"]


def test_large_rows_are_written_immediately_and_no_row_is_too_large(path):
    """Rows of at least 10,000 bytes, each of which exceeds the bound."""
    writer = begin(path, max_bytes=5_000)
    for step in range(3):
        writer.add_dataset("spectra", spectra(step))
        wait_for(lambda n=step + 1: wb.open_run(path).children and wb.open_run(path)["spectra"].sizes["step"] == n)
    assert writer.close()
    assert "events" not in wb.open_run(path).children


def test_a_row_larger_than_the_bound_survives_write_errors(path, monkeypatch):
    writer = begin(path, max_bytes=5_000)
    fail_writing(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        for step in range(3):
            add(writer, [step])
            writer.add_dataset("spectra", spectra(step))
            assert not writer.flush()
    monkeypatch.undo()
    assert writer.close()
    run = wb.open_run(path)
    assert run["spectra"]["step"].values.tolist() == [2]  # the newest
    assert run["monitors"]["step"].values.tolist()[-1] == 2
    assert "Part 'spectra' lacks 2 rows of steps 0 to 1: No space left on device." in run["events"]["message"].values


@pytest.mark.parametrize("is_in_trouble", [False, True])
def test_a_writer_closed_by_the_garbage_collector_in_a_writing_thread_does_not_wait(path, monkeypatch, is_in_trouble):
    """Otherwise the thread would wait for itself."""
    import zarr.core.sync

    writer = begin(path)
    add(writer, range(10))
    if is_in_trouble:
        fail_writing(monkeypatch)
    is_over = threading.Event()

    def close():
        writer.event(Event(9, "stopped"))
        writer.close(state="stopped")
        is_over.set()

    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        zarr.core.sync.loop[0].call_soon_threadsafe(close)
        assert is_over.wait(60)
        wait_for(lambda: not threads_of(path))
    monkeypatch.undo()
    run = wb.open_run(path)
    if is_in_trouble:
        assert any("13 rows" in str(warning.message) and "are lost" in str(warning.message) for warning in issued)
        return
    assert run.attrs["state"] == "stopped"
    check_rows(run, range(10), range(0, 10, EVERY))
    assert run["events"]["kind"].values.tolist() == ["stopped"]
