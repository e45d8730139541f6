"""Mirrors of a run receive its numbers and alarms, and never touch the training or the rows of the user."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from tests.callbacks.mirrored_runs import AT, N_STEPS, trained
from tests.callbacks.wandb_files import runs_in
from workbench.callbacks import mirrors
from workbench.callbacks.mirrors import Outlet, close_all, numbers, services_of
from workbench.callbacks.observation import Alarm, Observation
from workbench.errors import MissingPackageError, OptionError
from workbench.io.run_output import RecordingWarning

TERMS = ["D2", "D3"]


def attention(step=10):
    ranks = np.arange(12.0).reshape(2, 3, 2)
    ranks[1, 2] = np.nan  # no such head
    entropy = np.full((2, 3), np.nan)
    coords = {"layer": np.arange(2), "head": np.arange(3), "term": np.array(TERMS)}
    return Observation(step, "attention", {"effective_rank": ranks, "attention_entropy": entropy}, coords)


def monitors(step=10, loss=0.5):
    return Observation(step, "monitors", {"loss": np.array(loss), "n_tokens": np.array(64.0)})


EXPECTED = {
    "attention/effective_rank/D2/mean": 4.0,  # of 0, 2, 4, 6, 8
    "attention/effective_rank/D2/min": 0.0,
    "attention/effective_rank/D2/max": 8.0,
    "attention/effective_rank/D3/mean": 5.0,
    "attention/effective_rank/D3/min": 1.0,
    "attention/effective_rank/D3/max": 9.0,
}


def test_arrays_become_their_mean_minimum_and_maximum_for_each_term():
    assert numbers(attention()) == EXPECTED


def test_scalars_are_unchanged():
    assert numbers(monitors()) == {"monitors/loss": 0.5, "monitors/n_tokens": 64.0}


def test_values_that_are_not_real_numbers_are_left_out_but_infinity_is_kept():
    values = {
        "eigenvalue": np.ones((2, 3), complex),
        "is_reliable": np.array([[True, False]]),
        "name": np.array(["a"]),
        "kreiss_constant": np.array([1.0, np.inf]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = numbers(Observation(0, "spectra", values))
    assert found == {
        "spectra/is_reliable/mean": 0.5,
        "spectra/is_reliable/min": 0.0,
        "spectra/is_reliable/max": 1.0,
        "spectra/kreiss_constant/mean": np.inf,
        "spectra/kreiss_constant/min": 1.0,
        "spectra/kreiss_constant/max": np.inf,
    }


def alarm(step=12, signal="loss"):
    message = "The loss rises."
    return Alarm(step, signal, -1, -1, 2.0, 9.0, is_outcome=True, message=message), f"{message} Cause: unknown."


def mirrored(log, *observations, alarms=(), path=None, state="finished"):
    """Pass observations through a mirror, and end it."""
    (service,) = services_of(log)
    outlet = Outlet(service(path))
    for each in observations:
        outlet.put(each, alarms)
    close_all([outlet], state, 1)
    return outlet


def put_all(outlet, observations):
    for each in observations:
        outlet.put(each)


def test_a_function_with_a_step_argument_receives_it():
    got = []

    def log(data, step=None, commit=None):
        got.append((data, step))

    mirrored(log, attention(30), monitors(31))
    assert got == [(EXPECTED, 30), ({"monitors/loss": 0.5, "monitors/n_tokens": 64.0}, 31)]


def test_a_function_of_any_keywords_receives_the_step():
    got = []
    mirrored(lambda data, **options: got.append(options), monitors(4))
    assert got == [{"step": 4}]


def test_a_function_of_one_argument_receives_the_step_among_the_numbers():
    got = []
    mirrored(got.append, monitors(4))
    assert got == [{"step": 4, "monitors/loss": 0.5, "monitors/n_tokens": 64.0}]


class Writer:
    """Writer with the methods of TensorBoard's."""

    def __init__(self):
        self.got = []

    def add_scalar(self, tag, value, step):
        self.got.append((tag, value, step))

    def add_text(self, tag, text, step):
        self.got.append((tag, text, step))

    def flush(self):
        pass


def test_an_object_with_add_scalar_receives_each_number():
    writer = Writer()
    mirrored(writer, attention(20))
    assert writer.got == [(tag, value, 20) for tag, value in EXPECTED.items()]


def test_loggers_of_lightning_and_accelerate_are_opened():
    class Logger:
        experiment = Writer()

    class Tracker:
        tracker = Writer()

    class Other:
        def __init__(self):
            self.got = []

        def log_metrics(self, metrics, step):
            self.got.append((metrics, step))

    other = Other()
    for log in (Logger(), Tracker()):
        mirrored(log, attention(20))
    mirrored(other, monitors(3))
    assert Logger.experiment.got == Tracker.tracker.got == [(tag, value, 20) for tag, value in EXPECTED.items()]
    assert other.got == [({"monitors/loss": 0.5, "monitors/n_tokens": 64.0}, 3)]


def test_a_failing_logger_is_reported_once_without_its_text_and_called_again():
    calls = []

    def log(data, step):
        calls.append(step)
        if step < 3:
            raise ConnectionError("https://user:secret@example.org refused")

    with pytest.warns(RecordingWarning) as caught:
        mirrored(log, *map(monitors, range(4)))
    assert [str(each.message) for each in caught] == [
        "The logger failed (ConnectionError); training continues, and the run's record contains what it missed."
    ]
    assert calls == [0, 1, 2, 3]


def test_a_service_that_hangs_neither_blocks_nor_takes_more_memory(monkeypatch):
    monkeypatch.setattr(mirrors, "SECONDS_TO_CLOSE", 0.1)
    goes_on, got = threading.Event(), []

    def log(data, step):
        goes_on.wait(60)
        got.append(step)

    (service,) = services_of(log)
    outlet = Outlet(service(None))
    outlet.put(monitors(0))
    with pytest.warns(RecordingWarning, match=r"failed \(it is too slow\)"):
        put_all(outlet, map(monitors, range(1, 3 * mirrors._MOST_ROWS)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        close_all([outlet], "finished", 1)
    assert not got
    goes_on.set()
    outlet._thread.join(60)
    assert got == sorted(got)
    assert mirrors._MOST_ROWS <= len(got) <= 2 * mirrors._MOST_ROWS


def test_large_rows_are_bounded_by_their_values(monkeypatch):
    monkeypatch.setattr(mirrors, "_MOST_VALUES", 100)
    goes_on, got = threading.Event(), []
    (service,) = services_of(lambda data, step: (goes_on.wait(60), got.append(step)))
    outlet = Outlet(service(None))
    with pytest.warns(RecordingWarning, match="too slow"):
        put_all(outlet, map(attention, range(20)))  # of 18 values each
    goes_on.set()
    close_all([outlet], "finished", 1)
    assert got == [*range(len(got))]
    assert 5 <= len(got) <= 10  # some may be taken in between


@pytest.mark.parametrize("log", ["wandbb", 3, ["tensorboard", 3]])
def test_an_invalid_logger_is_rejected(log):
    value = log[1] if isinstance(log, list) else log
    with pytest.raises(OptionError, check=about("log", value)):
        wb.Recorder(log=log)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(mirrors, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="log='aim' needs the package aim; install it with 'pip install aim'"):
        wb.Recorder(log="aim")


def test_a_mirror_that_cannot_start_does_not_stop_the_training(tmp_path, monkeypatch):
    def start(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mirrors._TensorBoard, "start", start)
    with pytest.warns(RecordingWarning, match=r"TensorBoard failed \(No space left on device\)"):
        losses, _ = trained(store=tmp_path / "a.zarr", log="tensorboard")
    assert losses == trained()[0]


# Real services


def test_tensorboard_beside_the_store(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses, watched = trained(store=tmp_path / "a.zarr", log="tensorboard")
    assert losses == trained()[0]
    read = EventAccumulator(str(tmp_path / "a.tensorboard")).Reload()
    found = read.Scalars("monitors/loss")
    assert [event.step for event in found] == [*range(N_STEPS)]
    assert [event.value for event in found] == pytest.approx(losses)
    (raised,) = watched.alarms.raised
    (text,) = read.Tensors("alarm/text_summary")
    assert text.step == raised.step == AT
    assert raised.message.rstrip(".") in text.tensor_proto.string_val[0].decode()


def test_a_writer_of_the_user_stays_open(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        mirrored(writer, *(monitors(step, loss=1.0 / (1 + step)) for step in range(3)), attention(2))
        writer.add_scalar("own", 1.0, 7)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in read.Scalars("monitors/loss")] == pytest.approx([1, 1 / 2, 1 / 3])
    assert set(read.Tags()["scalars"]) == {"monitors/loss", "monitors/n_tokens", "own", *EXPECTED}


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """W&B's client, offline, in a folder of its own."""
    module = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "API_KEY": ""}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    module.teardown()
    yield module
    module.teardown()


def test_wandb_starts_a_run_of_its_own(tmp_path, wandb):
    losses, watched = trained(store=tmp_path / "a.zarr", log="wandb")
    assert losses == trained()[0]
    assert wandb.run is None
    rows, alerts, metrics = runs_in(tmp_path)["a"]
    assert [(row["_step"], row["watch/step"]) for row in rows] == [(step, step) for step in range(N_STEPS)]
    assert [row["monitors/loss"] for row in rows] == losses
    assert [step for step, row in enumerate(rows) if "optimizer/adam_staleness/max" in row] == [*range(4, N_STEPS, 5)]
    (raised,) = watched.alarms.raised
    ((title, text),) = alerts
    assert title == f"a: {raised.signal}"
    assert text.startswith(raised.message.rstrip("."))
    assert metrics["monitors/loss"] == "watch/step"


#: How a loop logs to its own run: arguments of ``wandb.log`` at each step.
LOOPS = {
    "counted": lambda i: {},
    "explicit": lambda i: {"step": i},
    "epochs": lambda i: {"step": i // 10} if i % 10 == 9 else None,
    "partial": lambda i: {"commit": i % 3 == 2},
}


@pytest.mark.parametrize(
    "kind", ["explicit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LOOPS if kind != "explicit")]
)
def test_the_rows_of_a_loop_that_logs_to_wandb_are_as_without_the_mirror(kind, tmp_path, wandb, capfd):
    def each(i, loss):
        if (options := LOOPS[kind](i)) is not None:
            wandb.log({"loss": loss, "i": i}, **options)

    for name, options in {"alone": {}, "mirrored": {"store": tmp_path / "a.zarr", "log": "wandb"}}.items():
        with wandb.init(name=name, project="x"):
            losses, _ = trained(each=each, **options)
    assert losses == trained()[0]
    found = runs_in(tmp_path)
    own = ("_step", "loss", "i")
    alone, rows = ([{key: row[key] for key in own} for row in found[n][0] if "i" in row] for n in ("alone", "mirrored"))
    assert rows == alone
    assert len(alone) == {"epochs": 3, "partial": 10}.get(kind, N_STEPS)
    mirror = [row for row in found["mirrored"][0] if "watch/step" in row]
    assert mirror[-1]["watch/step"] == N_STEPS - 1
    assert all(row["monitors/loss"] == losses[row["watch/step"]] for row in mirror if "monitors/loss" in row)
    assert len(found["mirrored"][1]) == 1
    assert "warn" not in capfd.readouterr().err.lower()


@pytest.mark.slow
def test_a_run_of_wandb_that_nobody_else_logs_to_receives_all_rows(tmp_path, wandb):
    with wandb.init(name="held", project="x") as run:
        losses, _ = trained(store=tmp_path / "a.zarr", log=run)
    rows, _, _ = runs_in(tmp_path)["held"]
    assert [row["watch/step"] for row in rows] == [*range(N_STEPS)]
    assert [row["monitors/loss"] for row in rows] == losses
    assert [step for step, row in enumerate(rows) if "optimizer/adam_staleness/max" in row] == [*range(4, N_STEPS, 5)]


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """The client of trackio, with a folder of its own, which it reads when it is imported."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    import trackio

    return trackio


def test_trackio_starts_a_run_of_its_own_and_leaves_the_steps_of_a_loop(tmp_path, trackio, capsys):
    from trackio.sqlite_storage import SQLiteStorage

    losses, watched = trained(store=tmp_path / "a.zarr", log="trackio")
    assert losses == trained()[0]
    rows = [row for row in SQLiteStorage.get_logs(tmp_path.name, "a") if "monitors/loss" in row]
    assert [(row["step"], row["monitors/loss"]) for row in rows] == [*enumerate(losses)]
    (raised,) = watched.alarms.raised
    (alert,) = SQLiteStorage.get_alerts(tmp_path.name)
    assert (alert["title"], alert["step"]) == (raised.signal, raised.step)

    trackio.init(project="own", name="own", embed=False)
    trained(store=tmp_path / "b.zarr", log="trackio", each=lambda i, loss: trackio.log({"loss": loss, "i": i}))
    trackio.finish()
    rows = SQLiteStorage.get_logs("own", "own")
    assert [row["step"] for row in rows if "i" in row] == [*range(N_STEPS)]
    mirror = [row for row in rows if "monitors/loss" in row]
    assert [(row["watch/step"], row["monitors/loss"]) for row in mirror] == [*enumerate(losses)]


def test_the_calls_that_aim_receives(tmp_path, monkeypatch):
    """With a stand-in: where it was tried, Aim did not read its own runs back."""
    runs = []

    class Run:
        name = ""

        def __init__(self):
            self.got, self.is_closed = [], False
            runs.append(self)

        def track(self, value, name, step):
            self.got.append((name, value, step))

        def close(self):
            self.is_closed = True

    Run.__module__ = "aim.sdk.run"
    module = ModuleType("aim")
    module.Run, module.Text, module.__spec__ = Run, str, ModuleSpec("aim", None)
    monkeypatch.setitem(sys.modules, "aim", module)
    held = Run()
    for log in ("aim", module, held):
        mirrored(log, attention(20), alarms=[alarm()], path=tmp_path / "a.zarr")
    expected = [(tag, value, 20) for tag, value in EXPECTED.items()]
    assert all(run.got == [*expected, ("alarm", "The loss rises. Cause: unknown.", 12)] for run in runs)
    assert [(run.name, run.is_closed) for run in runs] == [("", False), ("a", True), ("a", True)]


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with a server on this machine."""
    module = pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", where, "--port", str(port)]
    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--workers", "1"], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert server.poll() is None
                time.sleep(0.2)
        yield module
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
@pytest.mark.subprocess
def test_mlflow_with_a_server(tmp_path, mlflow, monkeypatch):
    monkeypatch.setattr(mirrors, "SECONDS_TO_CLOSE", 300.0)
    client = mlflow.MlflowClient()
    losses, watched = trained(store=tmp_path / "a.zarr", log="mlflow")
    assert losses == trained()[0]
    with mlflow.start_run(run_name="own") as run:
        for name, log in {"b": "mlflow", "c": run, "d": client}.items():
            trained(store=tmp_path / f"{name}.zarr", log=log, each=lambda i, loss: mlflow.log_metric("loss", loss, i))
        assert mlflow.active_run().info.run_id == run.info.run_id
    found = {each.info.run_name: each for each in mlflow.search_runs(output_format="list")}
    assert {name: each.info.status for name, each in found.items()} == {"a": "FINISHED", "own": "FINISHED"}
    (raised,) = watched.alarms.raised
    for n_times, each in zip((1, 3), (found["a"], found["own"]), strict=True):
        history = client.get_metric_history(each.info.run_id, "monitors/loss")
        assert sorted((m.step, m.value) for m in history) == sorted([*enumerate(losses)] * n_times)
        tags = each.data.tags
        assert tags["watch.first_alarm"].startswith(f"step {AT}: {raised.message.rstrip('.')}")
        assert tags["watch.n_alarms"] == "1"
    options = {"store": tmp_path / "e.zarr", "shows": False, "log": "mlflow"}
    with pytest.raises(RuntimeError), wb.watch(*model_and_optimizer(), **options):
        raise RuntimeError
    assert {each.info.status for each in mlflow.search_runs(output_format="list")} == {"FINISHED", "FAILED"}


def model_and_optimizer():
    import torch

    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.slow
def test_a_server_of_mlflow_that_is_dead_changes_nothing(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(mirrors, "SECONDS_TO_CLOSE", 1.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "secret" in mlflow.get_tracking_uri()
    with pytest.warns(RecordingWarning, match="MLflow failed") as caught:
        losses, _ = trained(store=tmp_path / "a.zarr", log="mlflow")
    assert losses == trained()[0]
    assert [("secret" in str(each.message)) for each in caught if each.category is RecordingWarning] == [False]


def test_wb_train_has_mirrors_by_its_recorder(tmp_path):
    got = []
    model, _ = model_and_optimizer()
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2)
    records = list(wb.train(model, task, n_steps=4, recorder=wb.Recorder(log=got.append), store=tmp_path / "a.zarr"))
    assert [row["step"] for row in got if "monitors/loss" in row] == [record.step for record in records]
