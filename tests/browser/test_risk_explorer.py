"""RiskExplorer in JupyterLab: move the rate, leave the measured range, run a pilot, and remove the norm."""

import ast

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, open_and_run, pixels, wait, write_notebook
from tests.browser.looks import check_accessible, check_widths
from workbench.plots import style

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebooks/risk.ipynb"
CELLS = ["from workbench.widgets import RiskExplorer", "explorer = RiskExplorer(task='synthetic language')\nexplorer"]
#: Of the line of risk.
LINE = [int(style.MODEL_COLORS[0][i : i + 2], 16) for i in (1, 3, 5)]


@pytest.fixture
def notebook(lab):
    write_notebook(lab.root / NOTEBOOK, CELLS)
    return NOTEBOOK


def test_the_risk_follows_the_hand(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    curve = widget.locator(".bk-Figure")
    figures = widget.locator(".workbench-risk")
    answer = widget.locator(".workbench-answer")

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def risk():
        return kernel("explorer.risk.failure.value")

    def settled():
        return kernel("explorer.risk is not None and not explorer.is_measuring")

    def shows(words):
        wait(lambda: words in figures.inner_text(), f"'{words}' in the figures")

    def handle(name):
        return widget.locator(".widget-slider", has_text=name).locator(".noUi-handle")

    # It measures automatically, and draws the result.
    wait(settled, "the first measurement", seconds=60)
    widget.evaluate("element => element.scrollIntoView()")
    wait(lambda: curve.count() == 1 and line_pixels(curve) > 100, "the curve")
    assert "well at a learning rate of 0.003 (risk: " in answer.inner_text()
    assert answer.bounding_box()["y"] < widget.get_by_label("family", exact=True).bounding_box()["y"]
    calm = risk()
    shows(in_words(calm))
    page.screenshot(path=artifacts / "risk_explorer.png")

    # Every control has an accessible name.
    unnamed = widget.evaluate(
        """element => [...element.querySelectorAll('select, input:not([type=hidden])')]
             .filter((control) => !control.labels?.length && !control.ariaLabel)
             .map((control) => control.outerHTML)"""
    )
    assert unnamed == []

    # Raising the rate by keyboard raises the risk immediately, in the same figure.
    before = pixels(curve)
    knob = handle("learning rate")
    knob.focus()
    for _ in range(40):
        knob.press("ArrowRight")
    wait(lambda: kernel("explorer.case['learning_rate'].item() > 0.018"), "a larger rate")
    wait(lambda: (np.abs(pixels(curve) - before).sum(-1) > 90).sum() > 20, "a mark that moves")
    raised = risk()
    assert raised > calm
    shows(in_words(raised))

    # More updates than in the recorded runs: a reason replaces the number, and nothing moves.
    place = curve.bounding_box()["y"] - widget.bounding_box()["y"]
    knob = handle("steps")
    knob.focus()
    knob.press("End")
    wait(lambda: kernel("explorer.case['n_steps'].item() == 4000"), "a long training")
    wait(lambda: "The risk is unknown." in answer.inner_text(), "the reason")
    assert "Run a pilot" in answer.inner_text()
    wait(lambda: line_pixels(curve) == 0, "no line")
    assert abs(curve.bounding_box()["y"] - widget.bounding_box()["y"] - place) < 2
    page.screenshot(path=artifacts / "risk_explorer_far.png")
    kernel("setattr(explorer.plan.n_steps, 'value', 240) or 0")
    wait(lambda: "unknown" not in answer.inner_text(), "an answer")
    wait(lambda: line_pixels(curve) > 100, "the line again")

    # A pilot makes the estimate more certain.
    kernel("setattr(explorer.budget, 'value', 300) or 0")
    widget.get_by_role("button", name="Run pilot").click()
    stop = widget.get_by_role("button", name="Stop")
    wait(lambda: "of 300 trial updates" in widget.inner_text() and stop.is_visible(), "its progress")
    assert abs(curve.bounding_box()["y"] - widget.bounding_box()["y"] - place) < 2
    wait(lambda: kernel("explorer.pilot is not None"), "the pilot", seconds=120)
    assert not stop.is_visible()
    assert widget.locator("progress").count() == 0
    shows("from the pilot")
    wait(lambda: curve.count() == 2, "the losses of the pilot")
    wait(lambda: widget.get_by_text("the best learning rate is about").count() == 1, "what it found")
    page.screenshot(path=artifacts / "risk_explorer_pilot.png")

    # Another model needs another pilot.
    widget.get_by_label("norm", exact=True).select_option("No-Norm")
    wait(lambda: kernel("explorer.setup.norm.value == 'none'") and settled(), "No-Norm", seconds=60)
    wait(lambda: curve.count() == 1, "no losses of a pilot")
    shows("before any training")
    assert kernel("explorer.error") == ""

    # On a narrow page nothing is cut off: wide parts scroll in their boxes.
    page.set_viewport_size({"width": 800, "height": 1000})
    wait(lambda: widget.evaluate("element => element.scrollWidth <= element.clientWidth + 1"), "a narrow layout")
    wait(lambda: line_pixels(curve) > 100, "the curve on a narrow page")
    page.screenshot(path=artifacts / "risk_explorer_narrow.png")
    page.set_viewport_size({"width": 1280, "height": 1000})

    ask_kernel(page, "explorer.close()")
    wait(lambda: curve.count() == 0, "a page without the widget")
    assert not complaints


@pytest.mark.parametrize("theme", ["page", "projector"])
def test_everybody_can_use_it_and_nothing_is_cut_off(lab, page, artifacts, theme):
    name = f"notebooks/risk_{theme}.ipynb"
    write_notebook(lab.root / name, [CELLS[0], f"explorer = RiskExplorer(theme={theme!r})\nexplorer"])
    complaints = open_and_run(lab, page, name)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    wait(lambda: widget.locator(".workbench-risk").count() == 1, "the first measurement", seconds=60)
    try:
        check_widths(page, widget)
        widget.screenshot(path=artifacts / f"risk_explorer_{theme}.png")
        check_accessible(page, ".jp-OutputArea .workbench-widget")
    finally:
        page.set_viewport_size({"width": 1280, "height": 1000})
    # Every control is reachable by keyboard, in order, with a visible focus.
    controls = "button, input:not([type=hidden]), select, .noUi-handle"
    names = widget.locator(controls).evaluate_all(
        """all => all.filter((one) => one.checkVisibility() && !one.disabled)
             .map((one) => [one.tabIndex, one.ariaLabel || one.labels?.[0]?.textContent || one.textContent])"""
    )
    assert all(place >= 0 and name.strip() for place, name in names), names
    ask_kernel(page, "explorer.close()")
    assert not complaints


def in_words(probability):
    """Format a number as the widget does."""
    if 0 < probability < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < probability < 1 else f"{100 * probability:.0f} %"


def line_pixels(locator):
    return int((np.abs(pixels(locator) - LINE).sum(-1) < 30).sum())
