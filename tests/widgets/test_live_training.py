"""The live room without a browser: two runs in one thread, KSS turned meanwhile, restarts, errors, and a clean end."""

import asyncio
import errno
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.waiting import wait_for
from workbench.errors import OptionError, StoreError
from workbench.io.background_writer import RecordingWarning
from workbench.widgets import LiveTraining
from workbench.widgets.live_training import WITH, WITHOUT

pytestmark = pytest.mark.render

SMALL = wb.zoo.ArchitectureConfig(
    family="transformer", norm="none", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=12
)
SETTINGS = {"learning_rate": 1e-2, "seed": 1, "spectra_every": 4, "profile_options": {"n_snapshots": 96}}


@pytest.fixture
def task():
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)


@pytest.fixture
def make(task, tmp_path):
    """Widgets over a small transformer, closed after the test."""
    made = []

    def live_training(architecture=SMALL, data=None, **options):
        options = {
            **SETTINGS,
            "n_steps": 16,
            "folder": tmp_path / "live",
            "kss": wb.KSS(strength=1, interval=1),
        } | options
        made.append(LiveTraining(architecture, data or task, **options))
        return made[-1]

    yield live_training
    for live in made:
        live.close()


def hold_at(live, step):
    """Pause just after a step of the run with KSS."""
    take = live.canvas.histories[WITH].add

    def add(record):
        take(record)
        if record.step == step:
            live.pause()

    live.canvas.histories[WITH].add = add


def start_and_hold(live, step):
    live.start()
    hold_at(live, step)
    wait_for(lambda: live._pause.description == "Resume")


def monitors(live, name):
    return live.runs[name]["monitors"].to_dataset()


def test_with_kss_off_both_runs_are_to_the_bit_the_run_alone(make, task):
    live = make(kss=wb.KSS(enabled=False))
    live.start()
    live.wait(60)
    model = wb.zoo.build(wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "seed": 1}))
    alone = list(wb.train(model, task, n_steps=16, learning_rate=1e-2, seed=1, warmup=20))
    for name in (WITH, WITHOUT):
        assert monitors(live, name)["loss"].values.tolist() == [record.loss for record in alone]
        assert live.runs[name].attrs["state"] == "finished"
    assert live.runs[WITH]["spectra"]["step"].values.tolist() == [0, 4, 8, 12, 15]
    assert live.error == ""
    assert live.status == "over · step 16 of 16"


def test_kss_turned_by_a_click_and_by_code_acts_from_the_next_step_on_and_stays(make):
    live = make(kss=wb.KSS(strength=1, interval=1, enabled=False))
    start_and_hold(live, 4)
    live._panel._receive(live._panel, {"set": {"enabled": True}}, [])
    hold_at(live, 9)
    live.resume()
    wait_for(lambda: live._pause.description == "Resume")
    live.kss.strength = 3
    live.resume()
    live.wait(60)
    step = np.arange(16)
    found = monitors(live, WITH)
    assert (found["kss_enabled"].values.astype(bool) == (step > 4)).all()
    assert (found["kss_strength"].values == np.where(step > 9, 3, 1)).all()
    assert not monitors(live, WITHOUT)["kss_enabled"].values.any()
    events = live.runs[WITH]["events"].to_dataset()
    of_kss = events.isel(event=events["kind"].values == "kss")
    assert of_kss["step"].values.tolist() == [5, 10]
    assert live.canvas.histories[WITH].kss_spans() == [(5, 16)]
    one, other = monitors(live, WITH)["loss"].values, monitors(live, WITHOUT)["loss"].values
    assert (one[:6] == other[:6]).all()
    assert (one[6:] != other[6:]).all()


def test_stopping_says_so_in_the_stores_and_leaves_checkpoints(make):
    live = make(n_steps=10**6, checkpoint_every=5)
    start_and_hold(live, 6)
    assert [str(saved) for saved in live.checkpoints] == ["step 5, with KSS", "step 5, without KSS"]
    live.stop()
    live.wait(60)
    assert {run.attrs["state"] for run in live.runs.values()} == {"stopped"}
    assert {saved.step for saved in live.checkpoints} == {5, 6, 7}
    assert live._choice.value == live.checkpoints[0]
    assert not live._start.disabled
    assert not live.setup.seed.disabled
    assert "stopped" in live.canvas.state()[0]["runs"][0]["note"]


@pytest.mark.slow
def test_a_restart_from_an_older_checkpoint_is_a_new_branch_and_goes_on_to_the_bit(make, tmp_path):
    live = make(n_steps=12, checkpoint_every=4, kss=wb.KSS(enabled=False))
    live.start()
    live.wait(60)
    through = monitors(live, WITHOUT)
    old = {p: p.read_bytes() for p in (tmp_path / "live").rglob("*") if p.is_file()}
    chosen = next(saved for saved in live.checkpoints if (saved.step, saved.run) == (4, WITHOUT))
    live._choice.value = chosen
    live._restart.click()
    live.wait(60)
    assert live.error == ""
    assert monitors(live, WITH).identical(monitors(live, WITHOUT))
    assert monitors(live, WITHOUT)["loss"].identical(through["loss"])
    assert live.runs[WITH].attrs["branched_from"].endswith("start-001/without KSS.zarr, step 4")
    assert live.canvas.histories[WITH].trace("loss")[1] == pytest.approx(through["loss"].values, rel=1e-6)
    assert {p: p.read_bytes() for p in old} == old
    assert {saved.start for saved in live.checkpoints} == {1, 2}


@pytest.mark.slow
def test_the_switch_stays_where_the_hand_has_put_it_when_a_checkpoint_says_otherwise(make):
    live = make(n_steps=8, checkpoint_every=4, kss=wb.KSS(strength=1, interval=1, enabled=False))
    live.start()
    live.wait(60)
    live.kss.set(enabled=True, strength=2)
    live.restart(next(saved for saved in live.checkpoints if saved.step == 4))
    live.wait(60)
    assert (live.kss.enabled, live.kss.strength) == (True, 2)
    assert monitors(live, WITH)["kss_enabled"].values.astype(bool).tolist() == [False] * 4 + [True] * 4
    assert not monitors(live, WITHOUT)["kss_enabled"].values.any()


@pytest.mark.slow
def test_a_restart_with_other_settings_is_refused_and_leaves_nothing_behind(make, tmp_path):
    live = make(n_steps=4, checkpoint_every=2)
    with pytest.raises(StoreError, match="There is no checkpoint yet"):
        live.restart()
    live.start()
    live.wait(60)
    live.setup.learning_rate.value = 0.02
    live._restart.click()
    assert "was made with training.learning_rate = 0.01, this call says 0.02" in live.error
    assert [place.name for place in (tmp_path / "live").iterdir()] == ["start-001"]
    live.setup.learning_rate.value = 0.01
    live.setup.n_steps.value = 6
    live._restart.click()
    live.wait(60)
    assert live.error == ""
    assert live.status == "over · step 6 of 6"


@pytest.mark.slow
def test_a_restart_while_it_trains_stops_the_present_runs_first(make):
    live = make(n_steps=10**6, checkpoint_every=2)
    start_and_hold(live, 5)
    live.resume()
    live._restart.click()
    wait_for(lambda: len(list(live.folder.iterdir())) == 2 and live.status.startswith("training"))
    assert wb.open_run(live.folder / "start-001" / f"{WITH}.zarr").attrs["state"] == "stopped"
    live.stop()
    live.wait(60)
    assert live.error == ""


@pytest.mark.slow
def test_a_chosen_checkpoint_stays_chosen_and_the_newest_stays_the_newest(make):
    live = make(n_steps=10**6, checkpoint_every=3)
    start_and_hold(live, 6)
    assert live._choice.value == live.checkpoints[0]
    older = live.checkpoints[-1]
    live._choice.value = older
    hold_at(live, 12)
    live.resume()
    wait_for(lambda: live._pause.description == "Resume")
    assert live.checkpoints[0].step == 12
    assert live._choice.value == older
    live._choice.value = live.checkpoints[0]
    hold_at(live, 18)
    live.resume()
    wait_for(lambda: live._pause.description == "Resume")
    assert live._choice.value.step == 18


@pytest.mark.slow
def test_a_diverged_run_is_said_in_a_sentence_and_the_other_goes_on(make):
    live = make(learning_rate=1e3, n_steps=40, warmup=0, kss=wb.KSS(enabled=False))
    live.start()
    live.wait(60)
    notes = [run["note"] for run in live.canvas.state()[0]["runs"]]
    assert all(note.startswith("diverged at step ") for note in notes)
    assert "The run with KSS diverged at step" in live.error
    assert live.runs[WITHOUT].attrs["state"] == "diverged"
    live.setup.learning_rate.value = 1e-3
    live._start.click()
    live.wait(60)
    assert live.error == ""
    assert live.status == "over · step 40 of 40"


class Unreadable(nn.Module):
    """No residual stream to be found."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, ids):
        return self.table(ids)


def test_a_model_that_cannot_be_read_is_said_and_the_widget_stays_usable(make):
    live = make(Unreadable())
    live._start.click()
    live.wait(60)
    assert live.error.count("The run ") == 2
    assert "Error" not in live.error  # a sentence for people, not a class
    assert not live._start.disabled
    assert live.runs == {}


def test_a_full_disk_stops_no_run(make, monkeypatch):
    live = make(flush_every=3)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("workbench.io.run_writer._chunks", refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        live.start()
        live.wait(60)
    words = [str(warning.message) for warning in told if warning.category is RecordingWarning]
    assert sum("No space left on device" in word and "Training goes on" in word for word in words) == 2  # once a run
    assert live.error == ""
    assert live.status == "over · step 16 of 16"


def test_a_model_of_ones_own_is_copied_and_left_alone(make, task):
    torch.manual_seed(0)
    model = wb.zoo.transformer("pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    live = make(model, compare=False, n_steps=4)
    for _ in range(2):
        live.start()
        live.wait(60)
    assert list(live.runs) == [WITH]
    first, second = (
        wb.open_run(live.folder / f"start-00{i}" / f"{WITH}.zarr")["monitors"].to_dataset() for i in (1, 2)
    )
    assert first.identical(second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_controls_build_what_they_say(make):
    live = LiveTraining(kss=wb.KSS())
    setup = live.setup
    task = setup.build_task()
    config = setup.build_model(task).config
    assert (config.family, config.norm, config.d_model, config.n_layers) == ("transformer", "none", 64, 4)
    assert (config.vocab_size, config.max_length) == (task.vocab_size, task.length)
    for family in wb.zoo.FAMILIES:
        setup.family.value = family
        task = setup.build_task()
        model = setup.build_model(task)
        assert model.config.family == family
        model(task.probe(16))
    setup.family.value = "mamba"
    assert setup.norm.value == "rms_norm"
    setup.family.value = "vit"
    assert setup.task.value == "digits"
    setup.task.value = "associative recall"
    assert setup.task.value == "digits"
    live.close()


def test_impossible_settings_are_refused_at_once(make, task):
    for options, sentence in (
        ({"lr": 1}, "LiveTraining knows no setting 'lr'"),
        ({"learning_rate": 0}, "learning_rate is 0, expected a positive number."),
        ({"n_steps": 0}, "n_steps is 0, expected a whole number of at least 1."),
        ({"task": "chess"}, "There is no task 'chess'; choose from associative recall"),
        ({"architecture": "gpt"}, "The architecture is a str, expected a wb.zoo.ArchitectureConfig or a model."),
    ):
        with pytest.raises(OptionError, match=sentence):
            LiveTraining(kss=wb.KSS(), **options)
    live = make(data=iter([task.batch(0)]))
    live._start.click()
    assert live.error.startswith("The data can be read only once, but two runs need them")
    live = make()
    live.setup.d_model.value = 15
    live._start.click()
    assert live.error.startswith("n_heads (2) does not divide d_model (15)")
    assert not live.is_running


def test_a_cell_can_await_the_end_while_the_kernels_loop_goes_on(make):
    live = make(n_steps=6)
    turns = []

    async def cell():
        async def other():
            while live.is_running:
                turns.append(live.status)
                await asyncio.sleep(0.01)

        live.start()
        await asyncio.gather(live.finished(), other())

    asyncio.run(cell())
    assert live.status == "over · step 6 of 6"
    assert len(turns) > 2
    live.setup.n_steps.value = 10**6
    live.start()
    with pytest.raises(TimeoutError):
        live.wait(0.05)


def test_close_ends_the_thread_and_the_stores_and_leaves_nothing(task, tmp_path):
    def live_and_closed():
        live = LiveTraining(SMALL, task, n_steps=10**6, folder=tmp_path, kss=wb.KSS(), **SETTINGS)
        live.start()
        wait_for(lambda: live.canvas.histories[WITH].n_done > 1)
        live.close()
        assert {run.attrs["state"] for run in live.runs.values()} == {"stopped"}
        assert "LiveTraining" not in [thread.name for thread in threading.enumerate()]
        assert (live.comm, live.canvas.comm, live.kss._observers._functions) == (None, None, [])
        live.close()
        return weakref.ref(live)

    forgotten = live_and_closed()
    gc.collect()
    assert forgotten() is None


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_kernel_that_ends_while_it_trains_leaves_stopped_stores(tmp_path):
    code = f"""
import time, workbench as wb
from workbench.widgets import LiveTraining
live = LiveTraining(n_steps=10**6, folder={str(tmp_path)!r}, kss=wb.KSS(), spectra_every=1000)
live.start()
while live.canvas.histories["without KSS"].n_done < 3:
    time.sleep(.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    runs = [wb.open_run(store) for store in tmp_path.rglob("*.zarr")]
    assert [run.attrs["state"] for run in runs] == ["stopped", "stopped"]
    assert all(run["monitors"].sizes["step"] >= 3 for run in runs)
