"""Notices of alarms and of the end of a run; what is secret about them is written nowhere."""

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import workbench as wb
from tests.about import says
from tests.callbacks.mirrored_runs import AT, N_STEPS, trained
from tests.callbacks.test_mirrors import alarm, monitors, put_all
from workbench.callbacks import mirrors
from workbench.callbacks.mirrors import Outlet, close_all, notices_of
from workbench.errors import OptionError
from workbench.io.run_output import RecordingWarning

SECRET = "B0-7c1d-not-for-anyone"


@contextmanager
def server(answer=200, *, waits=None):
    """Yield the URL of a webhook on this machine, which contains a secret, and the list of what it receives."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if waits is not None:
                waits.wait(60)
            got.append(body)
            self.send_response(answer if isinstance(answer, int) else answer(len(got)))
            self.end_headers()

        def log_message(self, *args):
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/services/{SECRET}?token={SECRET}", got
    finally:
        served.shutdown()
        served.server_close()


def wait_until(is_true):
    for _ in range(600):
        if is_true():
            return
        time.sleep(0.05)
    pytest.fail("nothing came")


def outlet_of(notify, path=None):
    (notice,) = notices_of(notify)
    return Outlet(notice(path))


def test_alarms_and_the_end_are_posted(tmp_path, monkeypatch):
    with server() as (url, got):
        monkeypatch.setenv("MY_HOOK", url)
        losses, watched = trained(store=tmp_path / "a.zarr", notify="$MY_HOOK")
    assert losses == trained()[0]
    (raised,) = watched.alarms.raised
    first, last = got
    assert (first["run"], first["kind"], first["step"], first["n_alarms"]) == ("a.zarr", "alarm", AT, 1)
    assert first["text"].startswith(
        f"Run a.zarr: alarm at step {AT}\nstep {AT}, {raised.signal}: {raised.message[:-1]}"
    )
    assert "Cause: " in first["text"]
    assert (last["kind"], last["step"], last["n_alarms"]) == ("finished", N_STEPS, 1)
    assert last["text"] == f"Run a.zarr finished after {N_STEPS} updates, with 1 alarm"


def test_an_error_that_ends_the_training_is_posted(tmp_path):
    def fail(i, loss):
        if i == 5:
            raise ZeroDivisionError

    got = []
    with pytest.raises(ZeroDivisionError):
        trained(store=tmp_path / "a.zarr", notify=got.append, each=fail, is_context=True)
    assert got == ["Run a.zarr was stopped by an error after 6 updates, with 0 alarms"]


def test_a_flood_of_alarms_is_one_message_with_a_count(monkeypatch):
    monkeypatch.setattr(mirrors, "_REST", 0.3)
    got = []
    outlet = outlet_of(got.append, Path("runs/a.zarr"))
    outlet.put(monitors(0), [alarm(0)])
    wait_until(lambda: got)
    for step in range(1, 40):
        outlet.put(monitors(step), [alarm(step)])
    wait_until(lambda: len(got) == 2)
    close_all([outlet], "finished", 40)
    first, flood, end = got
    assert first == "Run a.zarr: alarm at step 0\nstep 0, loss: The loss rises. Cause: unknown."
    title, *lines = flood.splitlines()
    assert title == "Run a.zarr: 39 alarms from step 1 on"
    assert (lines[0], lines[-1], len(lines)) == ("step 1, loss: The loss rises. Cause: unknown.", "and 34 more", 6)
    assert end == "Run a.zarr finished after 40 updates, with 40 alarms"


@pytest.mark.parametrize(
    ("host", "body"),
    [
        ("hooks.slack.com", {"text": "a &amp; b &lt;c&gt;"}),
        ("discord.com", {"content": "a & b <c>", "allowed_mentions": {"parse": []}}),
        ("example.org", {"kind": "alarm"}),
    ],
)
def test_the_form_of_each_service(host, body, monkeypatch):
    sent = []
    monkeypatch.setattr(mirrors, "urlopen", lambda request, timeout: sent.append(request) or nullcontext())
    mirrors._post(f"https://{host}/x", host, "a & b <c>", {"kind": "alarm"})
    (request,) = sent
    assert (request.host, request.get_method(), json.loads(request.data)) == (host, "POST", body)
    assert request.get_header("Content-type") == "application/json"


def test_a_server_that_fails_at_first_receives_the_alarm_later(monkeypatch):
    monkeypatch.setattr(mirrors, "_REST", 0.05)
    with server(lambda n: 500 if n < 3 else 200) as (url, got):
        outlet = outlet_of(url)
        outlet.put(monitors(0), [alarm(0)])
        wait_until(lambda: len(got) >= 3)
        with pytest.warns(RecordingWarning) as caught:
            close_all([outlet], "finished", 1)
    assert [each["kind"] for each in got] == ["alarm", "alarm", "alarm", "finished"]
    assert [str(each.message).partition(";")[0] for each in caught] == [
        "The webhook at 127.0.0.1 failed (it answered 500)"
    ]


def test_a_server_that_cannot_be_reached_changes_nothing(tmp_path):
    with pytest.warns(RecordingWarning) as caught:
        losses, _ = trained(store=tmp_path / "a.zarr", notify=f"http://127.0.0.1:9/{SECRET}")
    assert losses == trained()[0]
    (message,) = [str(each.message) for each in caught if each.category is RecordingWarning]
    assert message.startswith("The webhook at 127.0.0.1 failed (Connection refused); training continues")
    assert SECRET not in message


def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setattr(mirrors, "SECONDS_TO_CLOSE", 0.2)
    goes_on = threading.Event()
    with server(waits=goes_on) as (url, got):
        with pytest.warns(RecordingWarning, match=r"The webhook at 127.0.0.1 failed .it took longer than 0.2 s to end"):
            losses, _ = trained(store=tmp_path / "a.zarr", notify=url)
        assert not got
        goes_on.set()
    assert losses == trained()[0]


def test_several_receivers(tmp_path):
    got, other = [], []
    trained(store=tmp_path / "a.zarr", notify=[got.append, other.append])
    assert got == other
    assert len(got) == 2


@pytest.mark.parametrize(
    "url", [f"hooks.slack.com/{SECRET}", f"ftp://x/{SECRET}", f"https://[{SECRET}", f"https://a:{SECRET}@x", "$NO_HOOK"]
)
def test_an_invalid_url_is_refused_without_being_repeated(url, monkeypatch):
    monkeypatch.delenv("NO_HOOK", raising=False)
    with pytest.raises(OptionError, check=says("must be a URL that begins with https://")) as caught:
        wb.Recorder(notify=url)
    error = caught.value
    assert SECRET not in f"{error} {error.value} {error.expected}"


def test_a_receiver_of_another_kind_is_refused():
    with pytest.raises(OptionError, match="notify must be the URL of a webhook"):
        wb.Recorder(notify=3)


_SCRIPT = """
import os, sys, warnings
os.environ["WANDB_SILENT"] = "true"
import workbench as wb
from tests.callbacks.mirrored_runs import trained
kept = trained(store="runs/a.zarr", log=["wandb", "tensorboard"], notify=["$HOOK", os.environ["OTHER"]], is_open=True)
wb.report(wb.open_run("runs/a.zarr"), "report.html") if len(sys.argv) > 1 else None
print(repr(kept[1].recorder), vars(kept[1].recorder))
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_secrets_are_in_no_byte_and_an_unclosed_end_is_posted(tmp_path):
    """The script never closes its watch, and one of its webhooks fails."""
    with server() as (url, got):
        environment = os.environ | {
            "HOOK": url,
            "OTHER": f"http://127.0.0.1:9/{SECRET}",
            "WANDB_MODE": "offline",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr.decode()
    assert [each["kind"] for each in got] == ["alarm", "ended without being closed"]
    assert b"The webhook at 127.0.0.1 failed (Connection refused)" in done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"runs", "wandb"} <= {path.relative_to(tmp_path).parts[0] for path in files}
    assert list(tmp_path.rglob("*.wandb"))
    for content in (done.stdout, done.stderr, *(path.read_bytes() for path in files)):
        assert SECRET.encode() not in content
    report = wb.diagnose(tmp_path / "runs" / "a.zarr")
    assert SECRET not in str(report)


def test_no_warning_is_issued_where_all_is_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        trained(store=tmp_path / "a.zarr", notify=lambda text: None, log=lambda numbers: None)
    put_all(outlet_of(print), [])
