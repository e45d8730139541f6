"""Ward in JupyterLab: a case is played to the end by keyboard alone, and the widget fits every page and theme."""

import ast

import pytest

from tests.browser.driver import ask_kernel, open_and_run, wait, write_notebook
from tests.browser.looks import check_accessible, check_widths

pytestmark = pytest.mark.browser
CELLS = ["from workbench.widgets import Ward", "ward = Ward(0, level=1)\nward"]
#: The accessible name of the focused control of the widget, and whether its focus is visible; None outside of it.
FOCUSED = """() => {
  const control = document.activeElement;
  if (!control.closest(".workbench-ward")) return null;
  const name = control.getAttribute("aria-label") || control.labels?.[0]?.textContent || control.textContent;
  return { name: name.trim(), isVisible: getComputedStyle(control).outlineStyle === "solid" };
}"""


def tab_to(page, name, *, backwards=False):
    """Press Tab until a control of the widget is focused whose name begins with a text; each focus must be visible."""
    seen = []
    for _ in range(150):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        focused = page.evaluate(FOCUSED)
        if focused is None:
            continue
        assert focused["isVisible"], focused
        if focused["name"].startswith(name):
            return
        seen.append(focused["name"][:40])
    raise AssertionError(f"no control '{name}' among {seen}")


def kernel(page, expression):
    return ast.literal_eval(ask_kernel(page, expression))


def test_a_case_is_played_to_the_end_by_keyboard_alone(lab, page, artifacts):
    write_notebook(lab.root / "notebooks" / "ward.ipynb", CELLS)
    complaints = open_and_run(lab, page, "notebooks/ward.ipynb")
    ward = page.locator(".jp-OutputArea .workbench-ward")
    ward.get_by_role("button", name="Finish", exact=True).wait_for()

    tab_to(page, "grad_norm")
    page.keyboard.press("Enter")
    wait(lambda: kernel(page, "ward.measurements.value") == "grad_norm", "the chosen measurement")
    tab_to(page, "Measure grad_norm")
    page.keyboard.press("Enter")
    ward.locator(".workbench-timeline-panel canvas").first.wait_for()
    assert kernel(page, "list(ward.patient.record['monitors'].data_vars)") == ["grad_norm"]

    tab_to(page, "cause: learning rate")
    page.keyboard.press("Space")
    tab_to(page, "change:")
    page.keyboard.press("ArrowDown")  # from "no change", which is the last one, to the first
    answer = (["learning_rate"], "learning_rate")
    wait(lambda: kernel(page, "(ward.answer.causes, ward.answer.cure)") == answer, "the answer")
    tab_to(page, "Try the change")
    page.keyboard.press("Enter")
    wait(lambda: kernel(page, "list(ward._case.replays)") == ["learning_rate"], "the replay", seconds=60)
    page.screenshot(path=artifacts / "ward_tried.png")

    before = ward.inner_html()
    tab_to(page, "Finish")
    page.keyboard.press("Enter")
    ward.locator(".workbench-answer").wait_for(timeout=60_000)
    points = kernel(page, "ward.patient.score.points")
    assert f"{points:.0f} of 100 points" in ward.locator(".workbench-answer").inner_text()
    told = kernel(page, "[*ward.patient.score.parts['reason'], *ward.patient.score.evidence['sentence']]")
    assert [sentence for sentence in told if sentence not in ward.inner_text()] == []
    assert [sentence for sentence in told if sentence in before] == []
    page.screenshot(path=artifacts / "ward_finished.png")

    tab_to(page, "Next case")
    page.keyboard.press("Enter")
    wait(lambda: kernel(page, "ward.patient.seed") == 1, "the next case")
    assert kernel(page, "ward.error") == ""
    ask_kernel(page, "ward.close()")
    assert not complaints


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["page", "projector"])
def test_everybody_can_use_it_and_nothing_is_cut_off(lab, page, artifacts, theme):
    name = f"notebooks/ward_{theme}.ipynb"
    write_notebook(lab.root / name, [CELLS[0], f"ward = Ward(1, level=2, theme={theme!r})\nward"])
    complaints = open_and_run(lab, page, name)
    ward = page.locator(".jp-OutputArea .workbench-ward")
    try:
        for state in ("new", "measured", "settings", "finished"):
            if state == "measured":
                ask_kernel(page, "ward.measure('loss')")
                ward.locator(".workbench-timeline-panel canvas").first.wait_for()
            if state == "settings":
                ask_kernel(page, "ward.measure('settings')")
                ward.get_by_role("rowheader", name="learning_rate").first.wait_for()
            if state == "finished":
                ask_kernel(page, "[ward.finish(['data']), ward.wait()]")
                ward.locator(".workbench-answer").wait_for()
            check_widths(page, ward, widths=(700, 1100, 1600))
            for width in (1100, 1600):
                page.set_viewport_size({"width": width, "height": 1300})
                page.wait_for_timeout(500)
                own, around = ward.bounding_box(), page.locator(".jp-Notebook:visible").bounding_box()
                assert own["x"] + own["width"] <= around["x"] + around["width"]
            ward.screenshot(path=artifacts / f"ward_{theme}_{state}.png")
            check_accessible(page, ".jp-OutputArea .workbench-ward")
    finally:
        page.set_viewport_size({"width": 1280, "height": 1000})
    ask_kernel(page, "ward.close()")
    assert not complaints
