"""The live room in JupyterLab: start, see the modes move, switch KSS while it trains, pause, reload, stop, close."""

import ast
import json

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, colored, open_and_run, pixels, wait, write_notebook

pytestmark = pytest.mark.browser
NOTEBOOK = "notebooks/live_training.ipynb"
SETUP = """import workbench as wb
from workbench.widgets import LiveTraining
small = wb.zoo.ArchitectureConfig(family='transformer', norm='none', d_model=32, n_layers=3)
kss = wb.KSS(strength=2, interval=1, enabled=False)"""
WIDGET = """live = LiveTraining(
    small, kss=kss, n_steps=100_000, learning_rate=1e-3, profile_options={'n_snapshots': 192}
)
live"""
#: Of the shading that marks the steps with KSS, on white.
SHADE = [220, 233, 248]


@pytest.fixture
def notebook(lab):
    write_notebook(lab.root / NOTEBOOK, [SETUP, WIDGET])
    return NOTEBOOK


def test_kss_is_switched_while_the_modes_move(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    maps = page.get_by_role("img", name="Eigenvalues of the run")
    loss = page.get_by_role("img", name="loss (nat)")
    switch = page.get_by_role("switch", name="KSS")

    def press(name):
        page.get_by_role("button", name=name, exact=True).click()

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def n_done():
        return kernel("live.canvas.histories['with KSS'].n_done")

    def has_moved(locator, before):
        now = pixels(locator)
        return now.shape == before.shape and int((np.abs(now - before).sum(-1) > 90).sum()) > 20

    # It starts, and the modes of both runs are there and move.
    press("Start")
    wait(lambda: maps.count() == 2, "two maps")
    page.locator(".jp-OutputArea .workbench-widget").evaluate("element => element.scrollIntoView()")
    wait(lambda: min(colored(maps.nth(i)) for i in range(2)) > 30, "modes on both maps")
    before = [pixels(maps.nth(i)) for i in range(2)]
    wait(lambda: all(has_moved(maps.nth(i), before[i]) for i in range(2)), "modes that move")
    assert shaded(loss) < 20

    # One click: KSS is on from one step on, and stays; the traces say since when.
    assert switch.get_attribute("aria-checked") == "false"
    switch.click()
    wait(lambda: switch.get_attribute("aria-checked") == "true", "a switch that is on")
    clicked_at = n_done()
    wait(lambda: n_done() > clicked_at + 10, "ten steps with KSS")
    wait(lambda: shaded(loss) > 200, "shading where KSS is on")
    ask_kernel(page, "setattr(live.kss, 'strength', 7.0)")
    strength = page.get_by_role("spinbutton", name="strength")
    wait(lambda: strength.input_value() == "7", "what code has set, on the page")
    seven_since = n_done()
    wait(lambda: n_done() > seven_since + 1, "a step with what code has set")
    strength.fill("4")
    strength.press("Enter")
    wait(lambda: kernel("live.kss.strength") == 4.0, "what the page has set, in the kernel")
    page.screenshot(path=artifacts / "live_training.png")

    # Paused it holds still, in the kernel and on the page; then it goes on.
    press("Pause")
    page.get_by_role("button", name="Resume", exact=True).wait_for(timeout=10_000)

    def is_still():  # the step that was being made has ended
        n_before = n_done()
        page.wait_for_timeout(500)
        return n_done() == n_before and kernel("live.canvas.n_painted == live.canvas.n_sent")

    wait(is_still, "the last step and its picture")
    held, still = n_done(), [pixels(maps.nth(i)) for i in range(2)]
    page.wait_for_timeout(500)
    assert n_done() == held
    assert all((pixels(maps.nth(i)) == still[i]).all() for i in range(2))

    # The square around 1, and back, without the kernel.
    zoom = page.get_by_role("button", name="zoom to 1")
    zoom.click()
    wait(lambda: has_moved(maps.first, still[0]), "another view")
    zoom.click()
    wait(lambda: not has_moved(maps.first, still[0]), "the whole plane again")

    # A page that is loaded again shows what the kernel holds.
    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    wait(lambda: any(c["outputs"] for c in json.loads((lab.root / NOTEBOOK).read_text())["cells"]), "a saved notebook")
    page.reload()
    wait(lambda: maps.count() == 2, "maps after a reload", seconds=60)
    wait(lambda: min(colored(maps.nth(i)) for i in range(2)) > 30, "modes after a reload")
    wait(lambda: shaded(loss) > 200, "the shading after a reload")
    assert switch.get_attribute("aria-checked") == "true"
    page.locator(".jp-OutputArea .workbench-widget").evaluate("element => element.scrollIntoView()")
    before = pixels(maps.first)
    press("Resume")
    wait(lambda: n_done() > held + 3, "more steps")
    wait(lambda: has_moved(maps.first, before), "modes that move again")

    # Light strokes on the dark theme.
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=10_000)
    wait(lambda: pixels(maps.first).max() > 240 and np.median(pixels(maps.first)) < 40, "a circle in the dark")
    page.screenshot(path=artifacts / "live_training_dark.png")
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")

    # The record says what was done, and when.
    press("Stop")
    wait(lambda: not kernel("live.is_running"), "the end")
    enabled = kernel("live.runs['with KSS']['monitors']['kss_enabled'].values.astype(int).tolist()")
    strengths = kernel("live.runs['with KSS']['monitors']['kss_strength'].values.tolist()")
    (switched_at,) = np.flatnonzero(np.diff(enabled)) + 1
    assert switched_at <= clicked_at + 1
    assert enabled == [0] * switched_at + [1] * (len(enabled) - switched_at)
    assert [value for i, value in enumerate(strengths) if i == 0 or value != strengths[i - 1]] == [2.0, 7.0, 4.0]
    kinds = kernel("live.runs['with KSS']['events']['kind'].values.tolist()")
    steps = kernel("live.runs['with KSS']['events']['step'].values.tolist()")
    assert kinds == ["kss", "kss", "kss", "stopped"]
    assert steps[0] == switched_at
    assert kernel("bool(live.runs['without KSS']['monitors']['kss_enabled'].any())") is False
    assert kernel("live.error") == ""

    ask_kernel(page, "live.close()")
    wait(lambda: maps.count() == 0, "a page without the widget")
    assert not complaints


def shaded(locator):
    """Pixels of the shading that marks the steps with KSS."""
    return int((np.abs(pixels(locator) - SHADE).sum(-1) < 12).sum())
