"""A new user's first minutes: open JupyterLab, run 00_start, move a slider, look, change the theme, save."""

import io
import json
import re
import time

import numpy as np
import pytest

from workbench.plots.style import DEPTH_RAMP

pytestmark = pytest.mark.browser
NOTEBOOK = "notebooks/00_start.ipynb"


def test_start_notebook_draws_answers_and_saves(lab, page, artifacts):
    outside = []
    page.on("request", lambda request: None if lab.url in request.url else outside.append(request.url))
    page.goto(lab.address(NOTEBOOK))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    _run_all(page)

    panels = page.locator(".workbench-widget .bk-Figure")
    _wait(lambda: panels.count() >= 2, "two panels")
    panels.first.scroll_into_view_if_needed()
    assert int(_ask_kernel(page, "len(explorer.sources)")) == panels.count()
    _wait(lambda: min(_colored(panels.nth(i)) for i in range(2)) > 300, "modes on both panels")
    page.screenshot(path=artifacts / "explorer_light.png")
    assert _text_contrast(page, panels.first) > 4.5

    # A threshold: more modes become reliable, so more markers are filled, in the kernel and on the page.
    fill = "{name: float(source.data['fill'].sum()) for name, source in explorer.sources.items()}"
    before, pixels = _ask_kernel(page, fill), _colored(panels.first)
    handle = page.locator(".workbench-widget .widget-slider", has_text="residual at most").locator(".noUi-handle")
    handle.focus()
    for _ in range(3):
        handle.press("PageUp")
    _wait(lambda: _ask_kernel(page, fill) != before, "new data after the slider has moved")
    _wait(lambda: _colored(panels.first) > 1.02 * pixels, "more colour after the slider has moved")
    assert _ask_kernel(page, "explorer.error") == "''"

    # A selection in the picture reaches the kernel and comes back as a table.
    box = panels.first.bounding_box()
    page.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 0.25 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.55 * box["height"], steps=6)
    page.mouse.up()
    _wait(lambda: int(_ask_kernel(page, "len(explorer.selected())")) > 0, "selected modes")
    page.get_by_role("columnheader", name="|λ|", exact=True).wait_for(timeout=5_000)
    page.screenshot(path=artifacts / "explorer_selection.png")

    # Modes crowd around 1: the view zooms there, in the kernel and on the page.
    pixels = _colored(panels.nth(1))
    page.get_by_role("button", name="near 1", exact=True).click()
    _wait(lambda: float(_ask_kernel(page, "explorer._axes.x_range.start")) > 0, "another range")
    _wait(lambda: _colored(panels.nth(1)) != pixels, "modes drawn apart")
    page.screenshot(path=artifacts / "explorer_near_one.png")
    page.get_by_role("button", name="unit circle", exact=True).click()

    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=10_000)
    _wait(lambda: _text_contrast(page, panels.first) > 4.5, "light text on the dark theme")
    _wait(lambda: min(_colored(panels.nth(i)) for i in range(2)) > 300, "modes in the dark theme")
    page.screenshot(path=artifacts / "explorer_dark.png")

    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    saved = lab.root / NOTEBOOK
    _wait(lambda: _is_saved(saved), "the saved notebook with its outputs and widgets")
    (artifacts / "notebook_bytes.txt").write_text(f"{saved.stat().st_size}\n")
    assert saved.stat().st_size < 200_000, "strip large outputs, or show less in the notebook"
    assert not outside, f"the page asked for addresses outside the machine: {outside[:3]}"


def test_reloaded_page_shows_the_kernels_state(lab, page):
    _ask_kernel(page, "setattr(explorer.reliable_residual, 'value', 0.0)")
    page.reload()
    panels = page.locator(".workbench-widget .bk-Figure")
    _wait(lambda: panels.count() >= 2, "panels after a reload", seconds=60)
    _wait(lambda: _colored(panels.first) > 300, "modes after a reload")
    assert "residual ≤ 0 " in page.evaluate(
        "() => [...Bokeh.documents].map((d) => JSON.stringify(d.to_json())).join().replaceAll('\\\\n', ' ')"
    )


def _run_all(page):
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=60_000,
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()

    def is_done():
        failed = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
        assert failed.count() == 0, failed.first.inner_text()
        return page.evaluate(
            """() => jupyterapp.shell.currentWidget.content.widgets
                 .filter((cell) => cell.model.type === 'code' && cell.model.sharedModel.getSource().trim())
                 .every((cell) => cell.model.executionCount > 0 && cell.model.executionState !== 'running')"""
        )

    _wait(is_done, "the end of Run All", seconds=120)


def _ask_kernel(page, expression):
    """Evaluate an expression in the notebook's kernel, over the page's own connection; the result's repr."""
    return page.evaluate(
        """async (code) => {
          const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
          const user_expressions = {answer: code};
          const options = {code: '', silent: true, store_history: false, user_expressions};
          const reply = await kernel.requestExecute(options).done;
          const answer = reply.content.user_expressions.answer;
          if (answer.status !== 'ok') throw new Error(answer.evalue);
          return answer.data['text/plain'];
        }""",
        expression,
    )


def _wait(condition, what, *, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s in vain for {what}")


def _pixels(locator):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB")).astype(float)


def _colored(locator):
    """Pixels close to a colour of the depth ramp; grey, black and white are far from all of them."""
    pixels = _pixels(locator)
    anchors = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in DEPTH_RAMP]
    distance = [np.abs(pixels - anchor).sum(-1) for anchor in anchors]
    return int((np.min(distance, axis=0) < 60).sum())


def _text_contrast(page, figure):
    """Contrast (WCAG 2) between the strongest text pixel of the panel's title row and the ground beside it."""
    pixels = _pixels(figure)
    title = pixels[:26, :]
    ground = np.median(title.reshape(-1, 3), axis=0)
    ink = title.reshape(-1, 3)[np.abs(title.reshape(-1, 3) - ground).sum(-1).argmax()]
    bright, dim = sorted((_luminance(ink), _luminance(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(rgb):
    channel = np.asarray(rgb) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _is_saved(path):
    notebook = json.loads(path.read_text())
    has_outputs = any(cell.get("outputs") for cell in notebook["cells"])
    return has_outputs and "widgets" in notebook["metadata"]
