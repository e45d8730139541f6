"""Notebook 03 in JupyterLab: the maps are updated while the training cell is running."""

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, colored, pixels, start_all, wait, wait_until_done

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebooks/03_watch_training.ipynb"
IS_TRAINING = """() => jupyterapp.shell.currentWidget.content.widgets.some((cell) =>
  cell.model.type === 'code' && cell.model.executionState === 'running' &&
  cell.model.sharedModel.getSource().includes('zip_longest(*trainings'))"""

SHOW_WIDGET = """() => {
  const notebook = jupyterapp.shell.currentWidget.content;
  const source = (cell) => cell.model.sharedModel.getSource();
  const place = notebook.widgets.findIndex((cell) => source(cell).includes('ArchitectureComparison('));
  return notebook.scrollToItem(place, 'start');
}"""


def test_the_maps_move_while_it_trains(lab, page, artifacts):
    page.goto(lab.address(NOTEBOOK))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    start_all(page)
    panels = page.locator(".workbench-widget .bk-Figure")
    wait(lambda: page.evaluate(IS_TRAINING), "training", seconds=120)
    page.evaluate(SHOW_WIDGET)  # after Run All the page is at the end of the notebook
    wait(lambda: panels.count() >= 2, "panels while it trains", seconds=120)
    panels.last.scroll_into_view_if_needed()
    wait(lambda: colored(panels.last) > 30, "modes on the panel without normalization")
    before = pixels(panels.last)
    wait(lambda: np.abs(pixels(panels.last) - before).sum() > 10_000, "modes that move")
    assert page.evaluate(IS_TRAINING), "the picture has to move while the cell is still running"
    page.screenshot(path=artifacts / "watch_training.png")
    wait_until_done(page, seconds=300)
    assert ask_kernel(page, "watch.error") == "''"
    assert ask_kernel(page, "records['No-Norm'][-1].diverged") == "True"
    panels.last.scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "watch_training_end.png")
