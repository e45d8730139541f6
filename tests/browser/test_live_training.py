"""Live training in JupyterLab: updates while a cell runs, switches, earlier steps, and the end of the kernel."""

import ast
import json
import os

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.driver import ask_kernel, colored, open_and_run, pixels, run_all, wait, write_notebook

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

    # After the start, the modes of both runs appear and move.
    press("Start")
    wait(lambda: maps.count() == 2, "two maps")
    page.locator(".jp-OutputArea .workbench-widget").evaluate("element => element.scrollIntoView()")
    wait(lambda: min(colored(maps.nth(i)) for i in range(2)) > 30, "modes on both maps")
    before = [pixels(maps.nth(i)) for i in range(2)]
    wait(lambda: all(has_moved(maps.nth(i), before[i]) for i in range(2)), "modes that move")
    assert shaded(loss) < 20

    # One click switches KSS on from one step on; the traces show since when.
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

    # A pause stops it in the kernel and on the page; then it continues.
    press("Pause")
    wait(lambda: kernel("live.state") == "paused", "a pause")

    def is_still():  # the last state has been painted
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

    # A reloaded page shows the state of the kernel.
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

    # The record contains the changes and their steps.
    press("Stop")
    wait(lambda: not kernel("live.is_running"), "the end")
    enabled = kernel("live.runs['with KSS']['monitors']['kss_enabled'].values.astype(int).tolist()")
    strengths = kernel("live.runs['with KSS']['monitors']['kss_strength'].values.tolist()")
    (switched_at,) = np.flatnonzero(np.diff(enabled)) + 1
    assert switched_at <= clicked_at + 2  # a step may have been in transit to the kernel
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


@pytest.mark.slow
def test_it_continues_while_a_cell_runs_and_reports_its_end(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    status = page.locator(".workbench-live-status")

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def n_done():
        return kernel("max(h.n_done for h in live.canvas.histories.values())")

    def step_on_the_page():
        return int(status.inner_text().split("step ")[1].split()[0])

    page.get_by_role("button", name="Start", exact=True).click()
    wait(lambda: kernel("live.state") == "training" and n_done() > 8, "steps", seconds=60)
    wait(lambda: kernel("live._panel.comm._reply_subshell_id is not None"), "controls that are heard", seconds=20)

    # The figure is updated and a switch acts while a cell blocks the kernel.
    page.evaluate(
        """() => {
          const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
          window.isBlocked = true;
          kernel.requestExecute({code: 'import time; time.sleep(12); switched_in_time = kss.enabled'}).done
            .then(() => (window.isBlocked = false));
        }"""
    )
    page.wait_for_timeout(500)
    before = step_on_the_page()
    switch = page.get_by_role("switch", name="KSS")
    switch.click()
    wait(lambda: switch.get_attribute("aria-checked") == "true", "a switch that is on", seconds=8)
    wait(lambda: step_on_the_page() > before + 3, "steps on the page", seconds=8)
    assert page.evaluate("() => window.isBlocked")
    wait(lambda: not page.evaluate("() => window.isBlocked"), "the end of the cell")
    assert kernel("switched_in_time") is True

    # Earlier steps by keyboard and by a click into the traces; the pointer shows values.
    slider = page.get_by_role("slider", name="modes at step")
    page.get_by_role("button", name="Pause", exact=True).click()
    wait(lambda: kernel("live.state") == "paused", "a pause")
    wait(lambda: kernel("live.canvas.n_painted == live.canvas.n_sent"), "the last picture")
    newest = kernel("int(live.canvas.recorded_steps[-1])")
    slider.focus()
    for back in (1, 2, 3):
        page.keyboard.press("ArrowLeft")
        wait(lambda back=back: kernel("live.step") == newest - back, "an earlier step")
    wait(lambda: f"step {newest - 3}" in page.locator(".workbench-live-numbers").first.inner_text(), "its modes")
    assert f"step {newest - 3} of {newest}" in slider.get_attribute("aria-valuetext")
    assert "loss" in slider.get_attribute("aria-valuetext")
    assert page.locator(".workbench-live-shown").first.is_visible()
    loss = page.get_by_role("img", name="loss (nat)")
    loss.click(position={"x": 80, "y": 40})
    wait(lambda: kernel("live.step") < newest - 3, "the step under the pointer")
    tip = page.locator(".workbench-live-tip")
    assert "step " in tip.inner_text()
    assert "with KSS: " in tip.inner_text()
    page.get_by_role("button", name="Latest", exact=True).click()
    wait(lambda: kernel("live.step") is None, "the latest step")
    plane = page.get_by_role("img", name="Eigenvalues of the run").first
    box = plane.bounding_box()

    def is_told():  # somewhere near 1
        for share in np.linspace(0.6, 0.9, 16):
            plane.hover(position={"x": box["width"] * share, "y": box["height"] / 2})
            if tip.is_visible() and "|λ| = " in tip.inner_text() and "layer" in tip.inner_text():
                return True
        return False

    wait(is_told, "a mode under the pointer")

    # It is accessible in both themes and fits any page width.
    for theme in ("Light", "Dark"):
        page.evaluate(f"() => jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})")
        is_light = str(theme == "Light").lower()
        page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{is_light}'", timeout=10_000)
        page.wait_for_timeout(2500)
        found = Axe().run(page, context=".jp-OutputArea .workbench-widget")
        assert found.violations_count == 0, found.generate_report()
        for width in (1100, 1600, 2560):
            page.set_viewport_size({"width": width, "height": 1300})
            page.wait_for_timeout(700)
            page.locator(".jp-OutputArea .workbench-widget").evaluate("element => element.scrollIntoView()")
            page.screenshot(path=artifacts / f"live_training_{theme.lower()}_{width}.png")
            assert clipped(page) == []
            live, outer = page.locator(".workbench-live"), page.locator(".jp-OutputArea .workbench-widget")
            assert live.bounding_box()["width"] > 0.97 * outer.bounding_box()["width"]
        page.set_viewport_size({"width": 1280, "height": 1000})
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")

    # Running the cell again ends the training that it started before.
    pid = kernel("live._runs.pid")
    run_all(page)
    wait(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the old process", seconds=30)
    page.get_by_role("button", name="Start", exact=True).click()
    wait(lambda: kernel("live.state") == "training", "training", seconds=60)
    new = kernel("live._runs.pid")

    # The page reports that the kernel has ended, and the process has ended too.
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    wait(lambda: "The kernel has ended" in status.inner_text(), "what has happened, on the page")
    assert "training" not in status.inner_text()
    wait(lambda: not os.path.exists(f"/proc/{new}"), "the end of the process", seconds=30)
    assert not complaints
    page.goto("about:blank")  # so that nothing waits for the new kernel


def clipped(page):
    """Return texts of the widget that are wider than their box or outside of it."""
    return page.evaluate(
        """() => {
          const root = document.querySelector('.jp-OutputArea .workbench-widget'), edge = root.getBoundingClientRect();
          const texts = '.workbench-live :is(div, span, b, output, label, button), .workbench-kss *';
          const isCut = (part) => part.scrollWidth > part.clientWidth + 1 &&
            getComputedStyle(part).overflowX !== 'visible';
          return [...root.querySelectorAll(texts)]
            .filter((part) => part.offsetParent && (part.getBoundingClientRect().right > edge.right + 1 || isCut(part)))
            .map((part) => part.outerHTML.slice(0, 120));
        }"""
    )


def shaded(locator):
    """Count the pixels of the shading that marks steps with KSS."""
    return int((np.abs(pixels(locator) - SHADE).sum(-1) < 12).sum())
