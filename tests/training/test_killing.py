import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.small_training import same_weights
from tests.training import killed_run
from tests.waiting import on_one_thread
from workbench.models.checkpoint import latest_checkpoint

pytestmark = pytest.mark.subprocess

N_KILLS = 20
#: Steps of the runs that are not killed, more than any killed run reaches.
N_STEPS = 45
#: Those that are run before every change; the others are run before a release.
KILLS = [pytest.param(index, marks=() if index in (0, 13) else pytest.mark.slow) for index in range(N_KILLS)]
FLUSH, CHECKPOINT, SPECTRA = (killed_run.SETTINGS[f"{name}_every"] for name in ("flush", "checkpoint", "spectra"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that is not killed."""
    store = tmp_path_factory.mktemp("reference") / "run.zarr"
    with on_one_thread():
        settings = {**killed_run.SETTINGS, "n_steps": N_STEPS}
        list(wb.train(killed_run.model(), killed_run.task(), store=store, **settings))
    return wb.open_run(store).load()


@pytest.fixture(scope="module")
def trainer():
    command = [sys.executable, "-m", "tests.training.killed_run"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "ready"
        yield process
        process.stdin.close()


def train_and_kill(trainer, store, *, at_step, delay):
    """Let a child train, and kill it ``delay`` seconds after it printed ``at_step`` (-1: after it began).

    Returns:
        The last step that it printed.
    """
    trainer.stdin.write(f"{store}\n")
    trainer.stdin.flush()
    child, last = int(trainer.stdout.readline()), -1
    if at_step < 0:
        threading.Timer(delay, os.kill, (child, signal.SIGKILL)).start()
    for line in trainer.stdout:
        if line.strip() == "over":
            return last
        last = int(line)
        if last == at_step:
            threading.Timer(delay, os.kill, (child, signal.SIGKILL)).start()
    raise AssertionError("The trainer ended.")


def n_flushed(last_step):
    """Return the number of rows on disk after the record of ``last_step``: blocks of FLUSH, and all at a checkpoint."""
    flushed = 0
    for n_steps in range(1, last_step + 2):
        if n_steps - flushed == FLUSH or n_steps % CHECKPOINT == 0:
            flushed = n_steps
    return flushed


@pytest.mark.parametrize("index", KILLS)
def test_a_killed_run_opens_with_all_flushed_rows(trainer, reference, tmp_path, index):
    draw = random.Random(index)
    at_step, delay = draw.randrange(-1, 24), draw.random() * 0.05
    store = tmp_path / "run.zarr"
    last = train_and_kill(trainer, store, at_step=at_step, delay=delay)
    if not store.exists():
        assert n_flushed(last) == 0
        return
    run = wb.open_run(store).load()
    n_found = run["monitors"].sizes["step"] if "monitors" in run.children else 0
    assert n_found >= n_flushed(last)
    if n_found:
        expected = reference["monitors"].isel(step=slice(n_found)).to_dataset()
        assert run["monitors"].to_dataset().identical(expected)
    steps = run["spectra"]["step"].values.tolist() if "spectra" in run.children else []
    assert steps == list(range(0, n_found, SPECTRA))
    if steps:
        expected = reference["spectra"].sel(step=steps)
        np.testing.assert_array_equal(run["spectra"]["eigenvalue"].values, expected["eigenvalue"].values)
        wb.schema.runs.validate_spectra(run["spectra"].to_dataset())


def test_a_killed_run_resumes_exactly(trainer, reference, tmp_path, one_thread):
    store = tmp_path / "run.zarr"
    train_and_kill(trainer, store, at_step=26, delay=0.01)
    assert latest_checkpoint(tmp_path / "run.checkpoints") is not None
    model, settings = killed_run.model(), {**killed_run.SETTINGS, "n_steps": N_STEPS}
    list(wb.train(model, killed_run.task(), store=store, resume=True, **settings))
    run = wb.open_run(store)
    assert run["monitors"].to_dataset().identical(reference["monitors"].to_dataset())
    np.testing.assert_array_equal(run["spectra"]["eigenvalue"].values, reference["spectra"]["eigenvalue"].values)
    through = killed_run.model()
    list(wb.train(through, killed_run.task(), **{**settings, "checkpoint_every": None}))
    assert same_weights(model, through)
