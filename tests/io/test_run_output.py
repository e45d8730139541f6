import errno
import functools
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
from tests.about import says
from tests.io.killed_writer import EVERY, add, attention, monitors
from tests.waiting import wait_for
from workbench.errors import StoreError
from workbench.io.run_output import RecordingWarning, RunOutput
from workbench.io.run_writer import RunWriter
from workbench.schema.events import Event

ROOT = Path(__file__).parents[2]


def begin(path, **options):
    """Create an output that writes only on `flush`, unless ``options`` differ."""
    return RunOutput(RunWriter(path, {}), **{"rows_per_block": 10**6, "seconds_per_block": 1e6, **options})


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
    writer = begin(path, rows_per_block=rows_per_block)
    for size, is_flushed in zip(sizes, flushes, strict=False):
        add(writer, range(first, first + size))
        first += size
        if is_flushed:
            assert writer.flush()
            check_rows(wb.open_run(path), range(first), range(0, first, EVERY))
    assert writer.close()
    check_rows(wb.open_run(path), range(first), range(0, first, EVERY))


def test_blocks_are_written_by_their_rows_time_and_size(path):
    for options, steps in ({"rows_per_block": 20}, 20), ({"seconds_per_block": 0.0}, 1), ({"max_bytes": 4_000}, 12):
        writer = RunOutput(RunWriter(path, {}, overwrite=True), **{"seconds_per_block": 1e6, **options})
        add(writer, range(steps))
        assert "monitors" in wb.open_run(path).children
        writer.close()
        check_rows(wb.open_run(path), range(steps), range(0, steps, EVERY))


def test_values_are_copied_and_may_be_omitted(path):
    writer = begin(path)
    coords = {"layer": np.array([2, 5]), "layer_name": np.array(["two", "five"])}
    buffer, counts = np.zeros(2), {"max_violation": np.zeros(2)}
    for step in range(3):
        buffer[:] = counts["max_violation"][:] = step
        writer.add("router", step, {"router_similarity": buffer, **counts} if step != 1 else counts, coords)
        writer.add("monitors", step, {"loss": 0.5, "is_on": True, "n": 3, "rate": np.float32(0.5)})
    assert writer.close(state="finished")
    expected = xr.Dataset(
        {
            "router_similarity": (("step", "layer"), [[0.0, 0.0], [np.nan, np.nan], [2.0, 2.0]]),
            "max_violation": (("step", "layer"), [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]),
        },
        {"step": [0, 1, 2], "layer": [2, 5], "layer_name": ("layer", ["two", "five"])},
    )
    run = wb.open_run(path)
    assert run.attrs["state"] == "finished"
    xr.testing.assert_equal(run["router"].to_dataset(), expected)
    assert run["router"]["max_violation"].attrs["units"] == "1"
    kinds = {name: variable.dtype.kind for name, variable in run["monitors"].data_vars.items()}
    assert kinds == {"loss": "f", "is_on": "b", "n": "i", "rate": "f"}


def test_events_have_a_place_unless_an_older_store_lacks_it(path):
    writer = begin(path)
    writer.event(Event(3, "alarm", source="effective_rank D2", score=2.5, message="low", layer=1, head=4))
    writer.event(Event(3, "finished"))
    writer.close()
    events = wb.schema.runs.validate_events(wb.open_run(path)["events"].to_dataset())
    assert events["layer"].values.tolist() == [1, -1]
    assert events["head"].values.tolist() == [4, -1]
    assert events["kind"].values.tolist() == ["alarm", "finished"]
    assert events["score"].values[0] == 2.5
    assert all(variable.attrs["meaning"] for variable in events.data_vars.values())
    for name in ("layer", "head"):  # the first format
        shutil.rmtree(path / "events" / name)
    zarr.consolidate_metadata(path)
    writer = RunOutput(RunWriter.reopen(path, before_step=10))
    writer.event(Event(11, "alarm", message="new", layer=3, head=1))
    writer.close()
    events = wb.open_run(path)["events"]
    assert events["message"].values.tolist() == ["low", "", "new"]
    assert set(events.variables) == {"step", "kind", "source", "score", "message"}


def spectra(step, n_modes=4):
    eigenvalue = np.full((1, 2, n_modes), step + 1j)
    return xr.Dataset(
        {
            "eigenvalue": (("step", "layer", "mode"), eigenvalue),
            "is_reliable": (("step", "layer", "mode"), eigenvalue.real > 3),
        },
        {"step": [step], "layer": [0, 1], "layer_name": ("layer", ["a", "bc"])},
    )


def reopened(path, before_step):
    return RunOutput(RunWriter.reopen(path, before_step=before_step), rows_per_block=10**6)


def test_a_reopened_store_continues_at_the_given_step(path):
    writer = begin(path)
    add(writer, range(30))
    writer.add_dataset("spectra", spectra(0))
    writer.add_dataset("spectra", spectra(20))
    writer.close()
    writer = reopened(path, 17)
    add(writer, range(17, 40))
    writer.add_dataset("spectra", spectra(18))
    assert writer.close()
    check_rows(wb.open_run(path), range(40), range(0, 40, EVERY))
    found = wb.open_run(path)["spectra"].to_dataset()
    xr.testing.assert_equal(found, xr.concat([spectra(step) for step in (0, 18)], "step"))


RANKS, MATRIX = "stable_rank", np.zeros((3, 4, 2))


@pytest.mark.parametrize(
    ("part", "values", "terms", "reason"),
    [
        ("attention", {RANKS: MATRIX}, ["D2", "W"], "has other values of 'term' than the rows"),
        ("attention", {RANKS: MATRIX[..., :1]}, ["D2"], "record the same variables as before, or write to another run"),
        ("attention", {RANKS: MATRIX[:2]}, ["D2", "D3"], "pass the same shape at every step"),
        (
            "monitors",
            {**monitors(99), "loss": "x"},
            (),
            "expected one float; only floating-point variables may be omitted",
        ),
        ("monitors", {"loss": 1.0}, (), "which the rows lack; record the same variables as before"),
        ("spectra", spectra(99, n_modes=3), (), "record the same variables as before, or write to another run"),
    ],
)
def test_a_row_unlike_the_stored_ones_ends_its_part_with_one_warning(path, part, values, terms, reason):
    writer = begin(path)
    add(writer, range(12))
    writer.add_dataset("spectra", spectra(0))
    writer.close()
    writer = reopened(path, 100)
    if "same shape" in reason:
        add(writer, [95])
    coords = {"term": np.array(terms)} if terms else {}
    write = writer.add_dataset if part == "spectra" else functools.partial(writer.add, step=99, coords=coords)
    with pytest.warns(RecordingWarning, match=f"Part '{part}' is not written from step 99 on: .*") as issued:
        assert [write(part, **{"dataset" if part == "spectra" else "values": values}) for _ in range(2)] == [None, None]
    assert len(issued) == 1
    assert reason in str(issued[0].message)
    if part != "monitors":
        writer.add("monitors", 101, monitors(101))
    assert writer.close()
    run = wb.open_run(path)
    assert run["events"]["source"].values.tolist() == [part]
    assert (run["monitors"]["step"].values[-1] == 101) == (part != "monitors")


def test_steps_increase_and_a_closed_output_takes_no_rows(path):
    writer = begin(path)
    add(writer, range(2))
    with pytest.warns(RecordingWarning, match="add rows in increasing order"):
        writer.add("monitors", 1, monitors(1))
    assert writer.close()
    check_rows(wb.open_run(path), range(2), [0])
    with pytest.raises(StoreError, check=says("is closed; add rows before close().")):
        writer.add("monitors", 9, monitors(9))
    assert writer.close()


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
        check_rows(wb.open_run(path), range(10), range(0, 10, EVERY))
        monkeypatch.undo()
        add(writer, range(30, 40))
        assert writer.flush()
    assert len(issued) == 1
    check_rows(wb.open_run(path), range(40), range(0, 40, EVERY))
    assert "events" not in wb.open_run(path).children  # nothing was lost
    writer.close()


def test_a_commit_that_failed_is_retried(path, monkeypatch):
    writer = begin(path)
    add(writer, range(10))
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "_write_root", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.warns(RecordingWarning, match="cannot be written"):
            assert not writer.flush()
    assert "monitors" not in wb.open_run(path).children
    assert writer.flush()  # without further rows
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
    shutil.rmtree(path)  # a program that does not look at the lock
    other = RunOutput(RunWriter(path, {}, overwrite=True))
    add(other, range(3))
    other.close()
    add(writer, range(10, 20))
    with pytest.warns(RecordingWarning, match="replaced while it was being written"):
        assert not writer.close(state="finished")
    run = wb.open_run(path)
    assert "state" not in run.attrs
    check_rows(run, range(3), [0])


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


@pytest.mark.filterwarnings("ignore::workbench.io.run_output.RecordingWarning")
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
    code = "import sys; from tests.io.test_run_output import *\n" + code
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.subprocess
def test_open_writers_are_closed_at_interpreter_exit(tmp_path):
    paths = [tmp_path / f"{name}.zarr" for name in "abc"]
    done = in_new_process(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "sizes = (30, 10_000, 10_000)  # of the others no block is written before, nor imported what writing needs\n"
        "writers = [begin(Path(path), rows_per_block=n) for path, n in zip(sys.argv[1:], sizes)]\n"
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
def test_an_output_closed_by_the_garbage_collector_in_a_thread_of_zarr_does_not_wait(path, monkeypatch, is_in_trouble):
    """Otherwise the thread would wait for itself."""
    import zarr.core.sync

    writer = begin(path)
    add(writer, range(10))
    if is_in_trouble:
        fail_writing(monkeypatch)

    def close():
        writer.event(Event(9, "stopped"))
        writer.close(state="stopped")

    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        zarr.core.sync.loop[0].call_soon_threadsafe(close)
        wait_for(lambda: writer._writer._lock._folder is None)
    monkeypatch.undo()
    run = wb.open_run(path)
    if is_in_trouble:
        assert any("13 rows" in str(warning.message) and "are lost" in str(warning.message) for warning in issued)
        return
    assert run.attrs["state"] == "stopped"
    check_rows(run, range(10), range(0, 10, EVERY))
    assert run["events"]["kind"].values.tolist() == ["stopped"]
