"""The screen of a run in a terminal, finished, growing, cut off or removed."""

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import workbench as wb
from tests.io.test_run_index import written
from workbench import terminal
from workbench.cli import main
from workbench.io.far_places import UnreachableError
from workbench.io.run_output import RunOutput
from workbench.training.recording import new_run


def text_of(view):
    from rich.console import Console

    console = Console(width=90, record=True, file=io.StringIO())
    console.print(view.screen(90))
    return console.export_text()


def test_the_screen_shows_state_curve_alarm_and_cause(tmp_path, capsys):
    path = written(tmp_path / "a.zarr", n_steps=40)
    assert main(["follow", "--once", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("finished", "step 39", "loss 1.1", "First alarm: step 7 (grad_norm): The gradient norm rose.",
                  "It was raised.", "loss, 1.1 to 5", "workbench diagnose"):  # fmt: skip
        assert words in shown
    assert main(["follow", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["first_alarm"]["step"], found["state"]) == (39, 7, "finished")
    assert main(["runs", "--json", str(tmp_path)]) == 0
    assert [row["cause"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["learning rate"]


def test_a_curve_falls_where_the_loss_falls():
    lines = terminal._curve(np.arange(100), np.linspace(1, 0, 100), 30, None).splitlines()[1:-1]
    assert lines[0][0] != "\u2800" and lines[0][-1] == "\u2800"  # noqa: PT018
    assert lines[-1][0] == "\u2800" and lines[-1][-1] != "\u2800"  # noqa: PT018


def test_a_growing_run_a_cut_link_and_a_removed_run(tmp_path, monkeypatch):
    path = tmp_path / "a.zarr"
    output = RunOutput(new_run(path, {"model": {"name": "Planted"}}, overwrite=True))
    output.add("monitors", 0, {"loss": 5.0, "learning_rate": 1e-3})
    output.flush()
    view = terminal.RunView(str(path))
    assert "running" in text_of(view)
    for step in range(1, 30):
        output.add("monitors", step, {"loss": 4.0, "learning_rate": 1e-3})
    output.flush()
    view.look()
    assert "step 29" in text_of(view)

    def cut(run):
        raise UnreachableError("ssh://far/a.zarr is not a place that can be reached (timed out); check the URL.")

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "last_change", cut)
        patch.setattr(terminal.time, "monotonic", lambda: view.news_at + 40)
        view.look()
        shown = text_of(view)
    assert "step 29" in shown
    assert "Not reached: timed out" in shown
    assert "No news for 40 s" in shown
    output.close(state="finished")
    view.look()
    assert "finished" in text_of(view)
    assert "reached" not in text_of(view)
    shutil.rmtree(path)
    view.look()
    assert "removed" in text_of(view)
    assert "step 29" in text_of(view)


def test_a_run_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["follow", "--once", str(tmp_path / "none.zarr")]) == 3
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize("is_gone", [False, True])
def test_q_ends_the_screen_of_a_terminal_and_so_does_its_end(is_gone, tmp_path):
    path = written(tmp_path / "a.zarr")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "workbench", "follow", path], stdin=theirs, stdout=theirs,
                               stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})  # fmt: skip
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60
    while b"It was raised" not in shown and time.monotonic() < end:
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 1 << 16)
    assert b"It was raised" in shown
    if is_gone:
        os.close(ours)
        assert process.wait(30) is not None
        return
    os.write(ours, b"q")
    while process.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                os.read(ours, 1 << 16)
            except OSError:
                break
    assert process.wait(30) == 0
    os.close(ours)


def test_a_log_is_followed_too(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n" + "".join(f"{i},{5 - i / 10}\n" for i in range(20)))
    view = terminal.RunView(str(log))
    assert view.facts["step"] == 19
    assert len(view.losses) == len(wb.read_log(log)["loss"])
