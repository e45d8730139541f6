"""Live training without a browser: a separate process, switching KSS, restarts, errors, and cleanup."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.waiting import wait_for
from workbench.errors import OptionError, StoreError
from workbench.widgets import LiveTraining
from workbench.widgets.live import cells
from workbench.widgets.live.setup import ARCHITECTURE, NOTHING
from workbench.widgets.live.starts import WITH_KSS, WITHOUT_KSS

pytestmark = [pytest.mark.render, pytest.mark.subprocess]

ROOT = Path(__file__).parents[2]
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


def n_done(live, name=None):
    histories = live.canvas.histories
    return histories[name or next(iter(histories))].n_done


def pause_after(live, step):
    """Pause at or after a step of the first run, and return its number of steps."""
    wait_for(lambda: n_done(live) > step or not live.is_running)
    live.pause()
    wait_for(lambda: live.state == "paused")
    return n_done(live)


def start_and_pause(live, step):
    live.start()
    return pause_after(live, step)


def monitors(live, name):
    return live.runs[name]["monitors"].to_dataset()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_with_kss_off_both_runs_are_bitwise_identical_to_the_run_alone(make, task):
    live = make(kss=wb.KSS(enabled=False))
    random = torch.get_rng_state()
    live.start()
    stages = "starting Python|importing torch|building the models and the data"
    assert re.fullmatch(rf"starting: ({stages}) · \d+ s", live.status)
    live.wait(120)
    assert torch.equal(torch.get_rng_state(), random)
    model = wb.zoo.build(wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "seed": 1}))
    alone = list(wb.train(model, task, n_steps=16, learning_rate=1e-2, seed=1, warmup=20))
    for name in (WITH_KSS, WITHOUT_KSS):
        assert monitors(live, name)["loss"].values.tolist() == [record.loss for record in alone]
        assert live.runs[name].attrs["state"] == "finished"
        assert live.canvas.histories[name].trace("loss")[1] == pytest.approx([record.loss for record in alone])
    assert live.runs[WITH_KSS]["spectra"]["step"].values.tolist() == [0, 4, 8, 12, 15]
    assert live.canvas.recorded_steps.tolist() == [0, 4, 8, 12, 15]
    assert live.error == ""
    assert live.status == "ended · step 16 of 16 · with KSS: finished · without KSS: finished"


def test_kss_switched_by_a_click_and_by_code_acts_from_the_next_step_on_and_stays(make):
    live = make(kss=wb.KSS(strength=1, interval=1, enabled=False), n_steps=400)
    first = start_and_pause(live, 2)
    live._panel._receive(live._panel, {"kss": {"enabled": True}}, [])
    live.resume()
    second = pause_after(live, first + 2)
    live.kss.strength = 3
    live.resume()
    last = pause_after(live, second + 2)
    live.stop()
    live.wait(120)
    step = np.arange(last)
    found = monitors(live, WITH_KSS).isel(step=slice(last))
    assert (found["kss_enabled"].values.astype(bool) == (step >= first)).all()
    assert (found["kss_strength"].values == np.where(step >= second, 3, 1)).all()
    assert not monitors(live, WITHOUT_KSS)["kss_enabled"].values.any()
    events = live.runs[WITH_KSS]["events"].to_dataset()
    of_kss = events.isel(event=events["kind"].values == "kss")
    assert of_kss["step"].values.tolist() == [first, second]
    assert live.canvas.histories[WITH_KSS].kss_spans()[0][0] == first
    one, other = monitors(live, WITH_KSS)["loss"].values, monitors(live, WITHOUT_KSS)["loss"].values
    assert (one[: first + 1] == other[: first + 1]).all()
    both = slice(first + 1, min(last, len(one), len(other)))  # one of them may be a step ahead
    assert (one[both] != other[both]).all()


@pytest.mark.slow
def test_stopping_says_so_in_the_stores_and_leaves_checkpoints(make):
    live = make(n_steps=10**6, checkpoint_every=5)
    pid = (live.start(), live._runs.pid)[1]
    done = pause_after(live, 6)
    assert [saved.step for saved in live.checkpoints if saved.run == WITH_KSS] == list(range(5, done + 1, 5))[::-1]
    live.stop()
    live.wait(120)
    assert {run.attrs["state"] for run in live.runs.values()} == {"stopped"}
    assert live.checkpoints[0].step == done
    assert live._buttons.choice.value == live.checkpoints[0]
    assert not live._buttons.start.disabled
    assert not live.setup.seed.disabled
    assert "stopped" in live.canvas.state()[0]["runs"][0]["note"]
    assert not is_alive(pid)


@pytest.mark.slow
def test_a_restart_from_an_older_checkpoint_is_a_new_branch_and_continues_bit_for_bit(make, tmp_path):
    live = make(n_steps=12, checkpoint_every=4, kss=wb.KSS(enabled=False))
    live.start()
    live.wait(120)
    through = monitors(live, WITHOUT_KSS)
    old = {p: p.read_bytes() for p in (tmp_path / "live").rglob("*") if p.is_file()}
    chosen = next(saved for saved in live.checkpoints if (saved.step, saved.run) == (4, WITHOUT_KSS))
    live._buttons.choice.value = chosen
    live._buttons.restart.click()
    live.wait(120)
    assert live.error == ""
    assert monitors(live, WITH_KSS).identical(monitors(live, WITHOUT_KSS))
    assert monitors(live, WITHOUT_KSS)["loss"].identical(through["loss"])
    assert live.runs[WITH_KSS].attrs["branched_from"].endswith("start-001/without KSS.zarr, step 4")
    assert live.canvas.histories[WITH_KSS].trace("loss")[1] == pytest.approx(through["loss"].values, rel=1e-6)
    assert {p: p.read_bytes() for p in old} == old
    assert {saved.start for saved in live.checkpoints} == {1, 2}
    # The previous runs stay visible and can be opened.
    assert list(live.canvas.earlier) == [(WITH_KSS, 1), (WITHOUT_KSS, 1)]
    assert live.runs_of(1)[WITHOUT_KSS]["monitors"].to_dataset().identical(through)
    assert live.n_starts == 2
    live.start()
    assert live.canvas.earlier == {}


@pytest.mark.slow
def test_the_switch_stays_where_it_was_put_when_a_checkpoint_says_otherwise(make):
    live = make(n_steps=8, checkpoint_every=4, kss=wb.KSS(strength=1, interval=1, enabled=False))
    live.start()
    live.wait(120)
    live.kss.set(enabled=True, strength=2)
    live.restart(next(saved for saved in live.checkpoints if saved.step == 4))
    live.wait(120)
    assert (live.kss.enabled, live.kss.strength) == (True, 2)
    assert monitors(live, WITH_KSS)["kss_enabled"].values.astype(bool).tolist() == [False] * 4 + [True] * 4
    assert not monitors(live, WITHOUT_KSS)["kss_enabled"].values.any()


@pytest.mark.slow
def test_a_restart_with_other_settings_is_rejected_and_leaves_nothing_behind(make, tmp_path):
    live = make(n_steps=4, checkpoint_every=2)
    with pytest.raises(StoreError, check=about("checkpoint")):
        live.restart()
    live.start()
    live.wait(120)
    before = live.canvas.histories
    with pytest.raises(OptionError, check=about("checkpoint", 4, "before step 4")):
        live.restart(live.checkpoints[0])
    live.setup.n_steps.value = 6
    live.setup.learning_rate.value = 0.02
    live._buttons.restart.click()
    live.wait(120)
    assert "has training.learning_rate = 0.01, but this call has 0.02" in live.error
    assert [place.name for place in (tmp_path / "live").iterdir()] == ["start-001"]
    assert live.canvas.histories is before
    assert list(live.runs) == [WITH_KSS, WITHOUT_KSS]
    live.setup.learning_rate.value = 0.01
    live._buttons.restart.click()
    live.wait(120)
    assert live.error == ""
    assert live.status.startswith("ended · step 6 of 6")


@pytest.mark.slow
def test_a_restart_while_it_trains_stops_the_present_runs_first(make):
    live = make(n_steps=10**6, checkpoint_every=2)
    start_and_pause(live, 5)
    live.resume()
    live._buttons.restart.click()
    wait_for(lambda: len(list(live.folder.iterdir())) == 2 and live.state == "training")
    assert wb.open_run(live.folder / "start-001" / f"{WITH_KSS}.zarr").attrs["state"] == "stopped"
    live.stop()
    live.wait(120)
    assert live.error == ""


@pytest.mark.slow
def test_a_chosen_checkpoint_stays_chosen_and_the_newest_stays_the_newest(make):
    live = make(n_steps=10**6, checkpoint_every=3)
    start_and_pause(live, 6)
    choice = live._buttons.choice
    assert choice.value == live.checkpoints[0]
    older = live.checkpoints[-1]
    choice.value = older
    live.resume()
    pause_after(live, n_done(live) + 6)
    assert live.checkpoints[0].step > older.step + 3
    assert choice.value == older
    choice.value = live.checkpoints[0]
    live.resume()
    pause_after(live, n_done(live) + 6)
    assert choice.value == live.checkpoints[0]


@pytest.mark.slow
def test_a_diverged_run_is_said_until_others_begin_and_a_restart_goes_back_to_before_it(make):
    live = make(learning_rate=0.1, n_steps=40, warmup=0, kss=wb.KSS(enabled=False), checkpoint_every=1)
    live.start()
    live.wait(120)
    notes = [run["note"] for run in live.canvas.state()[0]["runs"]]
    assert all(note.startswith("diverged at step ") for note in notes)
    sentence = live.error
    assert "The run with KSS diverged at step" in sentence
    assert live.runs[WITHOUT_KSS].attrs["state"] == "diverged"
    # Actions on a run that has ended do not clear its message.
    live._panel._receive(live._panel, {"kss": {"enabled": True}}, [])
    live._panel._receive(live._panel, {"kss": {"interval": 0}}, [])
    assert live.error == "interval must be an integer of at least 1, got 0."
    live._panel._receive(live._panel, {"kss": {"interval": 2}}, [])
    assert live.error == sentence
    at = live.canvas.histories[WITH_KSS].diverged_at
    chosen = live._buttons.choice.value
    assert (chosen.run, chosen.step) == (WITH_KSS, at - 1)
    label = next(label for label, saved in live._buttons.choice.options if saved == chosen)
    assert label == f"step {at - 1}, with KSS: last before the divergence at step {at}"
    left = live.canvas.histories
    live._buttons.restart.click()
    assert list(live.canvas.earlier.values()) == list(left.values())
    assert n_done(live) == at - 1
    live.wait(120)
    live.setup.learning_rate.value = 1e-3
    live._buttons.start.click()
    live.wait(120)
    assert live.error == ""
    assert live.status.startswith("ended · step 40 of 40")


class Unsendable:
    """An object that cannot be pickled, such as a connection."""

    def __deepcopy__(self, _):
        return self

    def __reduce__(self):
        raise TypeError("cannot pickle this")


class Unreadable(nn.Module):
    """A model without a residual stream."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, ids):
        return self.table(ids)


@pytest.mark.slow
def test_a_model_that_cannot_be_read_is_said_and_the_widget_stays_usable(make):
    live = make(Unreadable())
    live._buttons.start.click()
    live.wait(120)
    assert live.error.count("The run ") == 2
    assert "Error" not in live.error  # a sentence, not the name of a class
    assert not live._buttons.start.disabled
    assert live.runs == {}
    with pytest.raises(StoreError, check=says("There is nothing to save yet; press Start and wait for the")):
        live.save("figure.png")


def test_a_process_that_is_killed_is_reported_and_the_runs_can_continue(make):
    live = make(n_steps=10**6, checkpoint_every=2, flush_every=2)
    start_and_pause(live, 6)
    os.kill(live._runs.pid, signal.SIGKILL)
    live.wait(60)
    assert live.error.startswith("The training process crashed or was killed (SIGKILL, possibly")
    assert live.status.startswith("ended · ")
    assert live.status.endswith("with KSS: ended unexpectedly · without KSS: ended unexpectedly")
    assert not live.canvas.is_active
    live.kss.strength = 2
    assert "SIGKILL" in live.error
    live.restart()
    wait_for(lambda: n_done(live) > 8)
    live.stop()
    live.wait(60)
    assert live.error == ""


class Endless(nn.Module):
    """A model whose third step never ends."""

    def __init__(self):
        super().__init__()
        self.inner = wb.zoo.build(SMALL)
        self.n_calls = 0

    def forward(self, ids):
        self.n_calls += self.training
        while self.n_calls > 3:
            time.sleep(0.01)
        return self.inner(ids)


@pytest.mark.slow
def test_a_step_that_never_ends_is_ended_by_stopping_twice(make):
    live = make(Endless(), n_steps=9, spectra_every=100, compare=False)
    live.start()
    wait_for(lambda: n_done(live) == 3)
    live.stop()
    assert live._buttons.stop.description == "Stop now"
    live._buttons.stop.click()
    live.wait(60)
    assert live.status == "ended · step 3 of 9 · with KSS: stopped"


@pytest.mark.slow
def test_a_given_model_is_copied_and_not_changed(make, task):
    torch.manual_seed(0)
    model = wb.zoo.transformer("pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    live = make(model, compare=False, n_steps=4)
    for _ in range(2):
        live.start()
        live.wait(120)
    assert list(live.runs) == [WITH_KSS]
    first, second = (live.runs_of(start)[WITH_KSS]["monitors"].to_dataset() for start in (1, 2))
    assert first.identical(second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_two_architectures_train_on_the_same_data_and_are_switched_together(make, task):
    other = wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "norm": "pre_ln"})
    live = make(versus=other, kss=wb.KSS(enabled=False, strength=1, interval=1), n_steps=300)
    names = ["transformer, no norm", "transformer, pre ln"]
    done = start_and_pause(live, 3)
    assert list(live.canvas.histories) == names
    assert [run["note"] for run in live.canvas.state()[0]["runs"]] == ["KSS off", "KSS off"]
    live.kss.enabled = True
    live.resume()
    pause_after(live, done + 2)
    live.stop()
    live.wait(120)
    for name, config in zip(names, (SMALL, other), strict=True):
        found = live.runs[name]["monitors"].to_dataset()
        (switched_at,) = np.flatnonzero(np.diff(found["kss_enabled"].values.astype(int))) + 1
        assert switched_at in (done, done - 1)  # the second run may be a step behind
        model = wb.zoo.build(wb.zoo.ArchitectureConfig(**{**config.as_dict(), "seed": 1}))
        alone = wb.train(model, task, n_steps=300, learning_rate=1e-2, seed=1, warmup=20)
        n = int(switched_at)
        assert found["loss"].values[:n].tolist() == [next(alone).loss for _ in range(n)]


def test_a_model_and_a_configuration_have_distinct_names():
    live = LiveTraining(Unreadable(), versus=SMALL, task="associative recall")
    assert live.setup.architecture_names == ("Unreadable", "transformer, no norm")
    assert not live.kss.enabled
    assert live.setup.compare.value == ARCHITECTURE
    live.close()
    live = LiveTraining(Unreadable(), versus=Unreadable())
    assert live.setup.architecture_names == ("Unreadable, first", "Unreadable, second")
    live.close()
    live = LiveTraining(versus=wb.zoo.ArchitectureConfig(norm="none", d_model=32, n_layers=4))
    assert live.setup.architecture_names == (
        "transformer, no norm, 64 wide, 4 layers", "transformer, no norm, 32 wide, 4 layers",
    )  # fmt: skip
    live.close()


def test_the_controls_build_what_they_say():
    live = LiveTraining(kss=wb.KSS())
    setup = live.setup
    task = setup.build_task()
    config = setup.build_models(task, ["a"])["a"].config
    assert (config.family, config.norm, config.d_model, config.n_layers) == ("transformer", "none", 64, 4)
    assert (config.vocab_size, config.max_length) == (task.vocab_size, task.length)
    assert setup.second.box.layout.display == "none"
    setup.compare.value = ARCHITECTURE
    assert setup.second.box.layout.display == ""
    for family in wb.zoo.FAMILIES:
        setup.first.family.value = family
        setup.second.family.value = setup.second.family.options[-1]
        task = setup.build_task()
        models = setup.build_models(task, ["a", "b"])
        assert models["a"].config.family == family
        assert models["b"].config.family == setup.second.family.value
        for model in models.values():
            model(task.probe(16))
    setup.first.family.value = "mamba"
    assert setup.first.norm.value == "rms_norm"
    assert "vit" not in setup.second.family.options
    setup.first.family.value = "vit"
    assert setup.task.value == "digits"
    assert setup.second.family.options == ("vit",)
    setup.task.value = "associative recall"
    assert setup.task.value == "digits"
    setup.compare.value = NOTHING
    assert not setup.has_second
    live.close()


def test_invalid_settings_are_rejected_immediately(make, task):
    vit = wb.zoo.ArchitectureConfig(family="vit")
    for options, error in (
        ({"lr": 1}, about("lr", 1)),
        ({"learning_rate": 0}, about("learning_rate", 0)),
        ({"n_steps": 0}, about("n_steps", 0)),
        ({"task": "chess"}, about("task", "chess")),
        ({"architecture": "gpt"}, about("architecture", "gpt")),
        ({"versus": "gpt"}, about("versus", "gpt")),
        ({"versus": SMALL, "compare": False}, says("versus= adds a second run, but compare=False requests one")),
        ({"versus": vit}, says("Both architectures train on one task, but only one")),
    ):
        with pytest.raises(OptionError, check=error):
            LiveTraining(kss=wb.KSS(), **options)
    live = make(data=iter([task.batch(0)]))
    live._buttons.start.click()
    assert live.error.startswith("The data can be read only once; pass")
    live = make()
    live.setup.first.d_model.value = 15
    live._buttons.start.click()
    assert live.error.startswith("n_heads must be a divisor of d_model (15), got 2")
    model = wb.zoo.build(SMALL)
    model.log = Unsendable()
    live = make(model)
    live._buttons.start.click()
    assert live.error.startswith("Training runs in a separate process, and the models cannot be sent to it")
    assert not live.is_running


@pytest.mark.slow
def test_the_shown_step_is_that_of_the_figure_and_of_the_files(make, tmp_path):
    live = make(n_steps=9)
    with pytest.raises(OptionError, check=says("There are no modes to draw yet; press Start")):
        live.figure()
    live.start()
    live.wait(120)
    live.step = 6
    assert live.step == 4
    for backend in ("matplotlib", "bokeh"):
        text = repr(live.figure(backend))
        assert text.count("Unit_circle") == 2
        assert text.count("Without_KSS") == 4
    for ending in ("png", "svg", "html", "nc"):
        assert live.save(tmp_path / f"figure.{ending}").stat().st_size > 1000
    assert "step 4" in (tmp_path / "figure.html").read_text()
    recorded = wb.open_run(tmp_path / "figure.nc")
    assert recorded[WITH_KSS]["monitors"].to_dataset()["loss"].size == 9
    live.step = None
    assert live.step is None
    assert live.picture().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_diverged_run_can_be_drawn(make):
    live = make(learning_rate=1e3, n_steps=40, warmup=0, compare=False, kss=wb.KSS(enabled=False))
    live.start()
    live.wait(120)
    at = live.canvas.histories[WITH_KSS].diverged_at
    assert f"× step {at}" in str(live.figure("matplotlib").traverse(lambda item: item.label))


@pytest.mark.slow
def test_a_new_widget_of_the_same_cell_or_folder_ends_the_training_of_the_old_one(make, monkeypatch, tmp_path):
    cell = {"metadata": {"cellId": "one"}, "header": {"msg_id": "first"}}
    monkeypatch.setattr(cells, "_present_request", lambda: cell)
    old, beside = (make(n_steps=10**6, folder=tmp_path / name) for name in ("old", "beside"))
    old.start()
    beside.start()
    pids = old._runs.pid, beside._runs.pid
    cell["header"] = {"msg_id": "second"}
    cell["metadata"] = {"cellId": "another"}
    make(folder=tmp_path / "elsewhere")
    assert old.state != "stopping"
    cell["metadata"] = {"cellId": "one"}
    make(folder=tmp_path / "new")
    for live in (old, beside):
        live.wait(120)
        assert live.error == "This training was ended: its cell was run again."
    assert not any(is_alive(pid) for pid in pids)
    monkeypatch.undo()
    old.start()
    assert old.error == ""
    make(folder=tmp_path / "old")
    old.wait(120)
    assert old.error == "This training was ended: another widget records into the same folder."


@pytest.mark.slow
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
    assert live.status.startswith("ended · step 6 of 6")
    assert len(turns) > 2
    live.setup.n_steps.value = 10**6
    live.start()
    with pytest.raises(TimeoutError):
        live.wait(0.05)


@pytest.mark.slow
def test_close_ends_the_process_and_the_stores_and_leaves_nothing(task, tmp_path):
    def live_and_closed():
        live = LiveTraining(SMALL, task, n_steps=10**6, folder=tmp_path, kss=wb.KSS(), **SETTINGS)
        live.start()
        pid = live._runs.pid
        wait_for(lambda: n_done(live) > 1)
        live.close()
        assert not is_alive(pid)
        assert {run.attrs["state"] for run in live.runs.values()} == {"stopped"}
        assert "LiveTraining" not in [thread.name for thread in threading.enumerate()]
        assert (live.comm, live.canvas.comm, live.kss._observers._functions) == (None, None, [])
        live.close()
        return weakref.ref(live)

    forgotten = live_and_closed()
    gc.collect()
    assert forgotten() is None


def python(code, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


#: As a notebook has it: the model, the task and the loss are of __main__.
OWN = """
import time, torch, workbench as wb
from workbench.widgets import LiveTraining

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=12, seed=0)

    def forward(self, ids):
        return self.inner(ids)

class Batches:
    def __iter__(self):
        return (TASK.batch(i) for i in range(4))

    def __len__(self):
        return 4

TASK = wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)

def twice(logits, targets):
    return 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.slow
def test_models_data_and_losses_that_a_notebook_defines_train_in_the_process(tmp_path):
    code = OWN + textwrap.dedent(f"""
        options = {{"learning_rate": 1e-2, "n_steps": 5, "spectra_every": 100, "folder": {str(tmp_path)!r}}}
        losses = []
        for data, loss in ((TASK, None), (TASK, twice), (Batches(), None)):
            own = {{"loss": loss}} if loss else {{}}
            live = LiveTraining(Net(), data, kss=wb.KSS(enabled=False), **options, **own)
            live.start()
            live.wait(120)
            assert live.error == "", live.error
            losses.append(live.runs["with KSS"]["monitors"]["loss"].values[:2].tolist())
            live.close()
        print(losses[1][0] / losses[0][0], losses[2][0] == losses[0][0])
    """)
    out, errors = python(code).communicate(timeout=300)
    assert errors == ""
    ratio, is_same = out.split()
    assert float(ratio) == pytest.approx(2)
    assert is_same == "True"


@pytest.mark.slow
def test_an_interpreter_that_ends_while_it_trains_leaves_stopped_stores(tmp_path):
    code = f"""
        import time, workbench as wb
        from workbench.widgets import LiveTraining
        live = LiveTraining(n_steps=10**6, folder={str(tmp_path)!r}, kss=wb.KSS(), spectra_every=1000)
        live.start()
        while live.canvas.histories["without KSS"].n_done < 3:
            time.sleep(.01)
        print(live._runs.pid)
    """
    process = python(code)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    runs = [wb.open_run(store) for store in tmp_path.rglob("*.zarr")]
    assert [run.attrs["state"] for run in runs] == ["stopped", "stopped"]
    assert all(run["monitors"].sizes["step"] >= 3 for run in runs)
    assert not is_alive(int(out))


@pytest.mark.slow
def test_a_kernel_that_is_killed_takes_the_process_with_it_and_the_stores_are_closed(tmp_path):
    code = f"""
        import time, workbench as wb
        from workbench.widgets import LiveTraining
        live = LiveTraining(n_steps=10**6, folder={str(tmp_path)!r}, kss=wb.KSS(), spectra_every=1000)
        live.start()
        while live.canvas.histories["without KSS"].n_done < 3:
            time.sleep(.01)
        print(live._runs.pid, flush=True)
        time.sleep(600)
    """
    process = python(code)
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(pid), seconds=60)
    assert [wb.open_run(store).attrs["state"] for store in tmp_path.rglob("*.zarr")] == ["stopped", "stopped"]


@pytest.mark.slow
def test_two_architectures_continue_from_separate_checkpoints(make):
    other = wb.zoo.ArchitectureConfig(**{**SMALL.as_dict(), "norm": "pre_ln"})
    live = make(versus=other, n_steps=12, checkpoint_every=4)
    live.start()
    live.wait(120)
    through = {name: run["monitors"].to_dataset()["loss"].values for name, run in live.runs.items()}
    live.restart(next(saved for saved in live.checkpoints if saved.step == 8))
    live.wait(120)
    assert live.error == ""
    for name, run in live.runs.items():
        assert run.attrs["branched_from"].endswith(f"start-001/{name}.zarr, step 8")
        assert run["monitors"].to_dataset()["loss"].values.tolist() == through[name].tolist()
