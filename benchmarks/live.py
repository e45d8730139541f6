"""Measure how fast LiveTraining draws and how much drawing slows training, in JupyterLab and headless Chromium.

Call: python -m benchmarks.live [--seconds 60]; writes benchmarks/live.md. Needs Chromium at /usr/bin/chromium or at the
path in WORKBENCH_CHROMIUM.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import write_report
from tests.browser.driver import ask_kernel, wait, write_notebook
from workbench.io.provenance import versions

CHROMIUM = os.environ.get("WORKBENCH_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
TOKEN = "workbench"
#: Seconds of each interval; intervals with and without drawing alternate.
INTERVAL = 5.0

#: Code that runs in the kernel. In all intervals the same two runs train in their own process, with the same spectra;
#: the canvas is notified of each step only in intervals with drawing.
KERNEL = """
import threading, time
import numpy as np
import psutil
import workbench as wb
from workbench.widgets import LiveTraining
from workbench.widgets.live.history import LiveModes, RunHistory

live = LiveTraining(kss=wb.KSS(enabled=False), learning_rate=1e-4, n_steps=100_000, checkpoint_every=100_000)
draws = np.random.default_rng(0)
z = 1 + 0.4 * (draws.normal(size=(60, 2000)) + 1j * draws.normal(size=(60, 2000)))
layers = np.repeat(np.arange(4, dtype=np.uint8), 500)
frames = [
    LiveModes(0, np.stack([f.real, f.imag], -1).astype(np.float32), layers, np.arange(2000, dtype=np.uint8) % 2, 0.5,
              2.0, (0.9, 1.05))
    for f in z
]

def show_2000(history):
    add = history.add
    def add_with_modes(message):
        add(message)
        history.modes = frames[message.step % 60]
    history.add = add_with_modes

def measure(seconds, interval):
    '''Steps and drawings per second and CPU time per step, in alternating intervals with and without drawing.'''
    found = []
    def work():
        for i in range(int(seconds / interval)):
            is_drawn = i % 2 == 0
            if is_drawn:
                live.canvas.__dict__.pop("refresh", None)
            else:
                live.canvas.refresh = lambda: None
            time.sleep(0.5)  # messages of the previous interval arrive
            counts = lambda: (
                sum(h.n_done for h in live.canvas.histories.values()), live.canvas.n_painted,
                sum(psutil.Process(live._runs.pid).cpu_times()[:2]),
            )
            start, before = time.perf_counter(), counts()
            time.sleep(interval)
            after, elapsed = counts(), time.perf_counter() - start
            steps, painted, cpu = (one - other for one, other in zip(after, before))
            found.append((is_drawn, steps / elapsed, painted / elapsed, cpu / max(steps, 1)))
        live.canvas.__dict__.pop("refresh", None)
        measured.append(found)
    threading.Thread(target=work).start()

def feed(seconds):
    '''Draw 2,000 modes, which change a hundred times per second, without training.'''
    def work():
        history = RunHistory(1000)
        history.n_layers = 4
        live.canvas.show({"2,000 modes": history}, {}, 1000)
        end, before, start = time.perf_counter() + seconds, live.canvas.n_painted, time.perf_counter()
        i = 0
        while time.perf_counter() < end:
            history.modes = frames[i % 60]
            live.canvas.refresh()
            i += 1
            time.sleep(0.01)
        measured.append((live.canvas.n_painted - before) / (time.perf_counter() - start))
    threading.Thread(target=work).start()

measured = []
live
"""


def main() -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each measurement during training")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, notebook_page(Path(folder), KERNEL) as page:
        fed = measured_in(page, f"feed({seconds / 3})", seconds / 3)
        ask(page, "live.start()")
        wait(lambda: ask(page, "max(h.n_done for h in live.canvas.histories.values())") > 20, "steps", seconds=120)
        default = measured_in(page, f"measure({seconds}, {INTERVAL})", seconds * 1.1)
        ask(page, "[show_2000(history) for history in live.canvas.histories.values()]")
        many = measured_in(page, f"measure({seconds}, {INTERVAL})", seconds * 1.1)
        ask(page, "live.close()")
    rows = [f"| 2,000 modes in one panel, changed 100 times per second, no training | **{fed:.1f}** | | | | |"]
    rows.append(row("two runs in training, 256 modes each", default))
    rows.append(row("the same runs, 2,000 modes drawn for each", many))
    about = (
        f"JupyterLab and headless Chromium without a GPU, on {os.cpu_count()} cores ({platform.machine()}). An update "
        "is counted when the page has painted it, which it reports in the next animation frame; at most one update is "
        "pending, and updates are at least 160 ms apart. The training is the default: two runs (d = 64, L = 4, 16 "
        "sequences of 24 tokens) that alternate on "
        f"{max(1, (os.cpu_count() or 2) - 1)} core in a separate process, with spectra of 512 states at every step. "
        f"Intervals of {INTERVAL:g} s with and without drawing alternate while the page is open; the slowdown is the "
        "median over pairs of adjacent intervals and includes the work of the kernel, the server and the browser. The "
        "CPU time per step is meaningful also on a busy machine, where all processes wait for each other. The 2,000 "
        "modes are random numbers (d = 500, L = 4). Load average at the end: "
        f"{os.getloadavg()[0]:.1f}. Generated by `make bench` with {versions()}."
    )
    columns = (
        "drawn",
        "updates/s (at most 6)",
        "steps/s with drawing",
        "steps/s without",
        "slowdown (target: under 10 %)",
        "additional CPU time per step",
    )
    write_report("live", "Drawing during training", about, columns, rows)


def row(name: str, intervals: list[tuple[bool, float, float, float]]) -> str:
    """Return a row of the table.

    Args:
        name: First cell.
        intervals: Whether the interval has drawing, steps and updates per second, and CPU time per step.
    """
    drawn, bare = ([each for each in intervals if each[0] == is_drawn] for is_drawn in (True, False))
    losses = [1 - one[1] / other[1] for one, other in zip(drawn, bare, strict=False)]
    rates = [statistics.median(each[1] for each in part) for part in (drawn, bare)]
    painted = statistics.median(each[2] for each in drawn)
    costs = [sum(each[1] * each[3] for each in part) / sum(each[1] for each in part) for part in (drawn, bare)]
    return (
        f"| {name} | **{painted:.1f}** | {rates[0]:.1f} | {rates[1]:.1f} | **{statistics.median(losses):.1%}** | "
        f"{costs[0] / costs[1] - 1:.1%} |"
    )


def measured_in(page: Any, call: str, seconds: float) -> Any:
    """Start a measurement in the kernel and wait for its result."""
    n_before = ask(page, "len(measured)")
    ask(page, call)
    end = time.monotonic() + 3 * seconds + 60
    while ask(page, "len(measured)") == n_before:
        if time.monotonic() > end:
            raise TimeoutError(f"{call} did not finish; status: {ask(page, 'live.status')}, {ask(page, 'live.error')}.")
        page.wait_for_timeout(1000)
    return ask(page, "measured[-1]")


def ask(page: Any, expression: str) -> Any:
    """Evaluate an expression in the kernel of the notebook; return its value if it is a literal, else its text."""
    answer = ask_kernel(page, expression)
    try:
        return literal_eval(answer)
    except (ValueError, SyntaxError):
        return answer


@contextmanager
def notebook_page(folder: Path, source: str) -> Iterator[Any]:
    """Context with a page of JupyterLab on a notebook of one cell, which has run."""
    from playwright.sync_api import sync_playwright

    (folder / "root").mkdir()
    write_notebook(folder / "root" / "live.ipynb", [source])
    with lab(folder) as url, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder / "chromium"), executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport={"width": 1280, "height": 1000},
        )  # fmt: skip
        page = context.pages[0]
        page.goto(f"{url}/lab/tree/live.ipynb?token={TOKEN}&reset")
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=60_000,
        )
        page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")
        page.get_by_role("button", name="Start", exact=True).wait_for(timeout=120_000)
        page.locator(".workbench-live").evaluate("element => element.scrollIntoView()")
        yield page
        context.close()


@contextmanager
def lab(folder: Path) -> Iterator[str]:
    """Context in which JupyterLab runs with separate folders for its settings; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    names += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
    environment = os.environ | {name: str(folder / name) for name in names}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += [
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={folder}/root",
    ]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/api/status?token={TOKEN}").read()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(15)


if __name__ == "__main__":
    main()
