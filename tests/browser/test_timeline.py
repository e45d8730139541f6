"""The timeline in JupyterLab: drawing, zoom by wheel, maps of alarms, and a run that grows in another process."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, colored, pixels, run_all, wait, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = "notebooks/timeline.ipynb"
#: Of the second run, in figures and on the page.
ORANGE = [213, 94, 0]
SETUP = """import sys
sys.path.insert(0, {root!r})
from tests.monitored_runs import watched_run
from workbench.widgets import Timeline
runs = {{"twin": watched_run(400, seed=1, spectra=False), "training": {store!r}}}"""
WIDGET = """timeline = Timeline(runs, poll_every=0.2)
timeline"""
#: Another process: writes steps up to 300, waits for a line on its input, and writes the rest.
TRAINING = """
import sys
from tests.monitored_runs import GrowingRun, watched_run
run = GrowingRun(watched_run(400, fault_at=100, diverges=True, seed=2, n_layers=3), sys.argv[1]).grow(300)
print("ready", flush=True)
sys.stdin.readline()
run.grow(400, state="diverged")
"""


@pytest.fixture
def training(tmp_path):
    store = tmp_path / "training.zarr"
    command = [sys.executable, "-c", TRAINING, str(store)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.store = store
    yield process
    process.kill()
    process.wait()


def inked(locator, color=ORANGE):
    """Count pixels of a color."""
    return int((np.abs(pixels(locator) - color).sum(-1) < 60).sum())


def accessible(page):
    """Return whether axe finds no violation in the widget."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context=".workbench-timeline")
    assert found.violations_count == 0, found.generate_report()
    return len(found.response["passes"]) > 5


def test_it_zooms_shows_where_and_follows_a_run_elsewhere(lab, page, artifacts, training):
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    write_notebook(lab.root / NOTEBOOK, [SETUP.format(root=str(ROOT), store=str(training.store)), WIDGET])
    page.goto(lab.address(NOTEBOOK))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    run_all(page)

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def panel(title):
        return page.get_by_role("img", name=f"{title} over steps")

    lane = page.get_by_role("img", name="Events")
    loss, norm, rank = (
        panel("loss (nat)"),
        panel("gradient norm"),
        panel("effective rank D2, min over layers and heads"),
    )
    rank.wait_for(timeout=20_000)
    page.locator(".workbench-timeline").evaluate("element => element.scrollIntoView()")

    # Lines of both runs in every panel, and the events above.
    wait(lambda: min(inked(one) for one in (lane, loss, norm, rank)) > 60, "lines of the second run")
    assert min(inked(one, [31, 119, 212]) for one in (lane, loss, norm, rank)) > 60
    assert "arithmetic, 141 steps before grad_norm" in lane.get_attribute("aria-label")
    page.get_by_role("button", name="training running, up to step 299").wait_for()

    # Another process writes more steps, which appear automatically.
    training.stdin.write("\n")
    training.stdin.flush()
    page.get_by_role("button", name="training diverged at step 399").wait_for(timeout=20_000)
    assert "last in view" in norm.get_attribute("aria-label")
    assert kernel("timeline.canvas.extent") == (0.0, 400.0)

    # The first alarm, its likely cause, its evidence, and the findings of probes.
    accounts = page.get_by_role("note", name="First alarms")
    first = "First alarm: step 109, 9 steps after the fault: arithmetic of attention, layer 1, head 0 (probe)."
    assert f"{first} Likely cause: low precision attention." in accounts.inner_text()
    assert "twin  No alarm up to step 400." in accounts.inner_text()
    evidence = panel("evidence of a change: training")
    wait(lambda: inked(evidence, [164, 62, 85]) > 40, "the evidence of D2, in the third color")
    wait(lambda: inked(lane, [224, 11, 75]) > 100, "probes that found a fault")
    # It stays visible when the page is scrolled.
    shift = "shift => document.querySelector('.jp-WindowedPanel-outer').scrollBy(0, shift)"
    before = [one.bounding_box()["y"] for one in (accounts, norm)]
    page.evaluate(shift, 250)
    wait(lambda: norm.bounding_box()["y"] < before[1] - 100, "a page that is scrolled")
    assert abs(accounts.bounding_box()["y"] - before[0]) < 5
    page.evaluate(shift, -250)

    # The wheel, after a click, zooms every panel to the same steps, in the page and in the kernel.
    before = [pixels(one) for one in (lane, loss, norm, rank)]
    box = norm.bounding_box()
    page.mouse.click(box["x"] + 300, box["y"] + 20)
    wait(lambda: kernel("timeline.selection is not None"), "a step that was chosen")
    page.keyboard.press("Escape")
    wait(lambda: kernel("timeline.selection is None"), "nothing chosen")
    for _ in range(4):
        page.mouse.wheel(0, -120)
        page.wait_for_timeout(60)
    wait(lambda: kernel("timeline.view is not None and timeline.view[1] - timeline.view[0] < 250"), "a zoom")

    def have_changed():
        pairs = zip((lane, loss, norm, rank), before, strict=True)
        return all((pixels(now) != then).any(-1).mean() > 0.005 for now, then in pairs)

    wait(have_changed, "panels that have all changed")
    start, stop = kernel("timeline.view")
    assert 0 < start < stop < 400
    page.screenshot(path=artifacts / "timeline_zoomed.png")
    page.get_by_role("button", name="all steps").click()
    wait(lambda: kernel("timeline.view is None"), "all steps again")

    # A click on an alarm opens the map of its signal, with the worst head named, and the eigenvalues.
    page.get_by_role("button", name="effective_rank D2 layer 1, head 2").click()
    heat = page.get_by_role("img", name="effective_rank D2 of training by layer and head: lowest")
    heat.wait_for(timeout=10_000)
    assert heat.get_attribute("aria-label").endswith("at layer 1, head 2")
    wait(lambda: len(np.unique(pixels(heat).reshape(-1, 3), axis=0)) > 12, "a colored map")
    modes = page.get_by_role("img", name="Eigenvalues of training")
    wait(lambda: colored(modes) > 8, "modes of the layer that is highlighted")
    assert kernel("(timeline.selection.step, timeline.selection.run)") == (140, "training")
    page.screenshot(path=artifacts / "timeline.png")

    # Select the same mark on its line by mouse, from another selection.
    ask_kernel(page, "timeline.select(None)")
    wait(lambda: heat.count() == 0, "an empty side")
    page.locator(".workbench-timeline").evaluate("element => element.scrollIntoView()")
    page.wait_for_timeout(500)  # the page has become shorter
    picture = pixels(rank)  # which scrolls it into view
    box = rank.bounding_box()
    (first, last), inset = (-6.0, 406.0), (58, 14)
    x = box["x"] + inset[0] + (140 - first) / (last - first) * (box["width"] - sum(inset))
    column = picture[:, int(x - box["x"])]
    y = box["y"] + np.flatnonzero(np.abs(column - ORANGE).sum(-1) < 60).mean()
    page.mouse.click(x, y)
    heat.wait_for(timeout=10_000)

    assert accessible(page)
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=10_000)
    wait(lambda: np.median(pixels(loss)) < 70 and pixels(loss).max() > 200, "light strokes in the dark")
    page.screenshot(path=artifacts / "timeline_dark.png")
    assert accessible(page)
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    assert kernel("timeline.error") == ""
    ask_kernel(page, "timeline.close()")
    wait(lambda: lane.count() == 0, "an empty output")
    assert complaints == []
