"""Actions of browser tests on a page: run its notebook, query its kernel, wait, and count pixels."""

import io
import json
import re
import time

import numpy as np

from workbench.plots.style import DEPTH_RAMP


def write_notebook(path, sources):
    """Write a notebook of code cells without outputs."""
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )


def open_and_run(lab, page, notebook, *, seconds=120):
    """Open a notebook and run all its cells; return the list to which the page adds its errors."""
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(lab.address(notebook))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    run_all(page, seconds=seconds)
    return complaints


def run_all(page, *, seconds=120):
    start_all(page)
    wait_until_done(page, seconds=seconds)


def start_all(page):
    """Start running all cells."""
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=60_000,
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()


def wait_until_done(page, *, seconds=120):
    """Wait until every cell has run; fail at the first error."""

    def is_done():
        failed = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
        assert failed.count() == 0, failed.first.inner_text()
        return page.evaluate(
            """() => jupyterapp.shell.currentWidget.content.widgets
                 .filter((cell) => cell.model.type === 'code' && cell.model.sharedModel.getSource().trim())
                 .every((cell) => cell.model.executionCount > 0 && cell.model.executionState !== 'running')"""
        )

    wait(is_done, "the end of Run All", seconds=seconds)


def ask_kernel(page, expression):
    """Evaluate an expression in the notebook's kernel over the page's connection, and return the repr of the result."""
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


def wait(condition, what, *, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s in vain for {what}")


def pixels(locator):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB")).astype(float)


def colored(locator):
    """Count pixels close to a color of the depth ramp; gray, black and white are far from all of them."""
    return int(_is_colored(locator).sum())


def place_of_color(locator):
    """Return x and y of a drawn mode: the pixel with the most colored pixels around it, left of the color bar."""
    found = _is_colored(locator)
    found[:, int(0.8 * found.shape[1]) :] = False
    near = sum(np.roll(found, (dy, dx), (0, 1)) for dy in range(-2, 3) for dx in range(-2, 3))
    y, x = np.unravel_index(int(near.argmax()), near.shape)
    return int(x), int(y)


def _is_colored(locator):
    image = pixels(locator)
    anchors = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in DEPTH_RAMP]
    return np.min([np.abs(image - anchor).sum(-1) for anchor in anchors], axis=0) < 60


def text_contrast(page, figure):
    """Return the contrast (WCAG 2) between the strongest text pixel of the panel's title row and the background."""
    title = pixels(figure)[:26, :]
    ground = np.median(title.reshape(-1, 3), axis=0)
    ink = title.reshape(-1, 3)[np.abs(title.reshape(-1, 3) - ground).sum(-1).argmax()]
    bright, dim = sorted((_luminance(ink), _luminance(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(rgb):
    channel = np.asarray(rgb) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
