"""RiskExplorer in JupyterLab: remove the norm, raise the rate, leave the recorded range, and return."""

import ast

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, open_and_run, pixels, wait, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebooks/risk.ipynb"
CELLS = ["from workbench.widgets import RiskExplorer", "explorer = RiskExplorer()\nexplorer"]
#: Of the line of risk.
LINE = [118, 86, 245]


@pytest.fixture
def notebook(lab):
    write_notebook(lab.root / NOTEBOOK, CELLS)
    return NOTEBOOK


def test_the_risk_follows_the_hand(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    curve = widget.locator(".bk-Figure")
    verdict = widget.locator(".workbench-risk")
    banner = widget.get_by_role("alert")

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def probability():
        return kernel("float(explorer.prediction['probability'].fillna(-1)[0])")

    def settled():
        return kernel("explorer.prediction is not None and not explorer.is_measuring")

    def shows(words):
        wait(lambda: words in verdict.inner_text(), f"'{words}' in the figures")

    def handle(name):
        return widget.locator(".widget-slider", has_text=name).locator(".noUi-handle")

    # It measures unasked, and draws.
    wait(settled, "the first measurement", seconds=60)
    widget.evaluate("element => element.scrollIntoView()")
    wait(lambda: curve.count() == 1 and line_pixels(curve) > 100, "the curve")
    assert not banner.is_visible()
    calm = probability()
    shows(in_words(calm))
    assert widget.get_by_role("cell", name="associative recall", exact=False).count() >= 1
    page.screenshot(path=artifacts / "risk_explorer.png")

    # Every control has a name that a screen reader says.
    unnamed = widget.evaluate(
        """element => [...element.querySelectorAll('select, input:not([type=hidden])')]
             .filter((control) => !control.labels?.length && !control.ariaLabel)
             .map((control) => control.outerHTML)"""
    )
    assert unnamed == []

    # Without normalization the same rate is more dangerous.
    widget.get_by_label("norm", exact=True).select_option("No-Norm")
    wait(lambda: kernel("explorer.setup.norm.value == 'none'") and settled(), "No-Norm", seconds=60)
    bare = probability()
    assert bare > calm
    shows(in_words(bare))

    # By keyboard: the rate up, and the probability with it, at once and in the same figure.
    before = pixels(curve)
    knob = handle("learning rate")
    knob.focus()
    for _ in range(15):
        knob.press("ArrowRight")
    wait(lambda: kernel("explorer.case['learning_rate'].item() > 0.019"), "a larger rate")
    wait(lambda: (np.abs(pixels(curve) - before).sum(-1) > 90).sum() > 20, "a mark that moves")
    raised = probability()
    assert raised > bare
    shows(in_words(raised))

    # Something far away: the number goes, and a banner comes.
    knob = handle("warm-up")
    knob.focus()
    knob.press("End")
    wait(lambda: kernel("explorer.case['warmup'].item() == 200"), "a long warm-up")
    banner.wait_for(timeout=10_000)
    assert "unlike the runs that the risk model has seen" in banner.inner_text()
    assert "warm-up" in banner.inner_text()
    assert probability() == -1
    shows("cannot say")
    wait(lambda: line_pixels(curve) == 0, "no line")
    page.screenshot(path=artifacts / "risk_explorer_far.png")
    assert widget.get_by_role("checkbox", name="extrapolate").count() == 0
    knob.press("Home")
    wait(lambda: kernel("explorer.case['warmup'].item() == 0"), "no warm-up")
    banner.wait_for(state="hidden", timeout=10_000)
    wait(lambda: line_pixels(curve) > 100, "the line again")

    # A shallower look judges by another model, with nothing measured again.
    n_features = kernel("len(explorer.risk.features)")
    widget.get_by_label("look at", exact=True).select_option("forward passes")
    wait(lambda: kernel("len(explorer.risk.features)") != n_features, "another risk model")
    assert kernel("explorer.is_measuring") is False
    shows(in_words(probability()))
    assert kernel("explorer.error") == ""

    # On a narrow page nothing is cut off: what is too wide scrolls in a box of its own.
    page.set_viewport_size({"width": 800, "height": 1000})
    wait(lambda: widget.evaluate("element => element.scrollWidth <= element.clientWidth + 1"), "a narrow layout")
    wait(lambda: line_pixels(curve) > 100, "the curve on a narrow page")
    page.screenshot(path=artifacts / "risk_explorer_narrow.png")
    page.set_viewport_size({"width": 1280, "height": 1000})

    ask_kernel(page, "explorer.close()")
    wait(lambda: curve.count() == 0, "a page without the widget")
    assert not complaints


def in_words(probability):
    """As the widget writes it."""
    if 0 < probability < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < probability < 1 else f"{100 * probability:.0f} %"


def line_pixels(locator):
    return int((np.abs(pixels(locator) - LINE).sum(-1) < 30).sum())
