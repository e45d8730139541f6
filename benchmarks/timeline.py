"""How fast the timeline answers a zoom and draws it: 100,000 steps of 50 signals, in JupyterLab and headless Chromium.

Call: python -m benchmarks.timeline; writes benchmarks/timeline.md. Needs Chromium at /usr/bin/chromium, or where
WORKBENCH_CHROMIUM says.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.live import CHROMIUM, FLAGS, TOKEN, ask, lab
from benchmarks.report import write_report
from tests.browser.driver import run_all, write_notebook
from workbench.io.provenance import versions

#: What runs in the kernel.
KERNEL = """
import statistics, time
import numpy as np
import xarray as xr
from workbench.widgets import Timeline

names = [f"signal_{i:02d}" for i in range(50)]
draws = np.random.default_rng(0)
lines = {name: ("step", np.exp(0.02 * draws.normal(size=100_000).cumsum())) for name in names}
run = xr.DataTree.from_dict({"/monitors": xr.Dataset(lines, {"step": np.arange(100_000)})})

def answer_ms(seen, n=40):
    '''Milliseconds that one answer to a zoom takes: on the clock, and of the processor.'''
    timeline.canvas.wishes.seen = None if seen is None else frozenset(names[:seen])
    view, found = timeline.canvas.wishes.view, []
    for i in range(n):
        timeline.canvas.wishes.view = (300.0 * i, 100_000.0 - 700 * i)
        wall, processor = time.perf_counter(), time.thread_time()
        _, buffers = timeline.canvas.state()
        found.append((time.perf_counter() - wall, time.thread_time() - processor, sum(map(len, buffers))))
    timeline.canvas.wishes.view = view
    return [1e3 * statistics.median(one[0] for one in found), 1e3 * statistics.median(one[1] for one in found),
            max(one[2] for one in found) / 1e6]

timeline = Timeline(run, signals=names)
timeline
"""
#: Turns the wheel over a panel, again and again; how long frames take, and how long it takes until a zoom is answered.
ZOOM = """async (seconds) => {
  const el = document.querySelector(".workbench-timeline"), stack = el.querySelector(".workbench-timeline-stack");
  const canvas = el.querySelector(".workbench-timeline-panel canvas"), box = canvas.getBoundingClientRect();
  const wheel = (deltaY) => canvas.dispatchEvent(new WheelEvent("wheel", { deltaY, bubbles: true, cancelable: true,
    clientX: box.left + 400, clientY: box.top + 30 }));
  const frame = () => new Promise(requestAnimationFrame);
  stack.focus();
  const frames = [], answers = [], end = performance.now() + 1000 * seconds;
  let before = await frame(), i = 0;
  while (performance.now() < end) {
    wheel(i++ % 40 < 20 ? -60 : 60);
    const now = await frame();
    frames.push(now - before);
    before = now;
  }
  for (let k = 0; k < 30; k++) {
    await new Promise((done) => setTimeout(done, 150));
    const start = performance.now(), asked = Number(el.dataset.asked);
    wheel(k % 2 ? 80 : -80);
    while (Number(el.dataset.answered) <= asked && performance.now() < start + 3000) await frame();
    answers.push(performance.now() - start);
  }
  return { frames, answers };
}"""


def main() -> None:
    """Measure, print the table and save it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "root").mkdir()
        write_notebook(folder / "root" / "timeline.ipynb", [KERNEL])
        found = measured(folder)
    (wall, processor, size), (wall_seen, processor_seen, size_seen) = found["all"], found["seen"]
    frames, answers = sorted(found["frames"]), sorted(found["answers"])
    rows = [
        f"| kernel: one answer, panels on the screen (9 of 50) | **{wall_seen:.0f} ms** | {processor_seen:.1f} ms | "
        f"{size_seen:.2f} MB |",
        f"| kernel: one answer, all 50 panels | **{wall:.0f} ms** | {processor:.1f} ms | {size:.2f} MB |",
        f"| page: from the turn of the wheel to the finer picture (wanted: 100 ms) | "
        f"**{statistics.median(answers):.0f} ms** | slowest tenth {answers[int(0.9 * len(answers))]:.0f} ms | |",
        f"| page: from frame to frame while the wheel turns in each | **{statistics.median(frames):.0f} ms** | "
        f"slowest tenth {frames[int(0.9 * len(frames))]:.0f} ms | |",
    ]
    about = (
        "100,000 steps of 50 signals, one run, all 50 panels in the notebook; JupyterLab and headless Chromium without "
        f"a GPU, on {os.cpu_count()} cores ({platform.machine()}). The page zooms what it has at once and asks the "
        "kernel for the lines of the new range, about one lowest and one highest value a pixel. Load average at the "
        f"end: {os.getloadavg()[0]:.1f}. Made by `make bench`, {versions()}."
    )
    write_report("timeline", "Zooming the timeline", about, ("what", "median", "processor, or tail", "sent"), rows)


def measured(folder: Path) -> dict[str, Any]:
    """Everything that is measured, in one page."""
    from playwright.sync_api import sync_playwright

    with lab(folder) as url, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder / "chromium"), executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport={"width": 1400, "height": 1000},
        )  # fmt: skip
        page = context.pages[0]
        page.goto(f"{url}/lab/tree/timeline.ipynb?token={TOKEN}&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        run_all(page)
        page.locator(".workbench-timeline-panel").first.wait_for(timeout=60_000)
        page.locator(".workbench-timeline").evaluate("element => element.scrollIntoView()")
        page.wait_for_timeout(3000)
        drawn = page.evaluate(ZOOM, 5)
        kernel = {name: ask(page, f"answer_ms({seen})") for name, seen in (("all", None), ("seen", 9))}
        context.close()
    return drawn | kernel


if __name__ == "__main__":
    main()
