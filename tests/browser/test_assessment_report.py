"""AssessmentReport in JupyterLab: links between text and numbers, filters, figures, and both themes."""

import ast

import numpy as np
import pytest

from tests.browser.driver import ask_kernel, open_and_run, pixels, wait, write_notebook
from tests.browser.looks import check_accessible, check_widths
from tests.reports import made_trees
from workbench.io.store import export_netcdf

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebooks/assessment.ipynb"
CELLS = [
    "import workbench as wb\nfrom workbench.widgets import AssessmentReport",
    'report = AssessmentReport(wb.open_run("assessment.nc"))\nreport',
]
#: The smallest contrast (WCAG 2) of the words inside of an element with what is behind them.
CONTRAST = """element => {
  const parse = (color) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, ground) => top.slice(0, 3).map((part, i) => (part * top[3] + ground[i] * (255 - top[3])) / 255);
  const bright = (rgb) => rgb.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const parent = (node) => node.parentElement ?? node.getRootNode().host;
  const painted = (node) => parse(getComputedStyle(node).backgroundColor);
  const ground = (node) => (node ? over(painted(node), ground(parent(node))) : [255, 255, 255]);
  const walk = (node) => [node, ...(node.shadowRoot ?? node).querySelectorAll("*")];
  const found = [];
  for (const node of [...walk(element), ...walk(element).filter((one) => one.shadowRoot).flatMap(walk)]) {
    const words = [...node.childNodes].filter((one) => one.nodeType === 3 && one.textContent.trim());
    if (!words.length || node.matches("style, :disabled") || !node.checkVisibility()) continue;
    const behind = ground(node), paper = bright(behind);
    const ink = bright(over(parse(getComputedStyle(node).color), behind));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    found.push([contrast, node.tagName, words[0].textContent.slice(0, 60)]);
  }
  return found.sort((one, other) => one[0] - other[0])[0];
}"""


@pytest.fixture
def notebook(lab):
    export_netcdf(made_trees.assessment(), lab.root / "notebooks" / "assessment.nc")
    write_notebook(lab.root / NOTEBOOK, CELLS)
    return NOTEBOOK


def test_an_assessment_is_read_looked_into_and_seen_in_both_themes(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    report = widget.locator(".workbench-report")
    box, marked = report.locator(".box"), report.locator(".marked")

    def kernel(expression):
        return ast.literal_eval(ask_kernel(page, expression))

    def within(element):
        """Return whether an element is in the visible part of the report."""
        inner, outer = element.bounding_box(), box.bounding_box()
        return outer["y"] <= inner["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"]

    # The verdict is visible before any figure is drawn.
    answer = widget.locator(".workbench-answer")
    wait(lambda: report.locator(".verdict").count() == 1, "the report")
    assert "No-Norm, 3 blocks is at risk as planned" in answer.inner_text()
    assert not report.locator(".verdict .word").is_visible()  # it is shown above every view
    assert report.locator("h2 .key").all_inner_texts() == ["1", "2", "3", "4"]
    widget.evaluate("element => element.scrollIntoView()")
    page.screenshot(path=artifacts / "assessment_report.png")

    # From a number in the text to its row and back, without scrolling the notebook.
    link = report.locator("#v2 a.n").first
    anchor = link.get_attribute("href")[1:]
    link.scroll_into_view_if_needed()
    place, top = box.evaluate("box => box.scrollTop"), widget.bounding_box()["y"]
    link.click()
    wait(lambda: kernel("report.text.marked") == anchor, "the kernel to know the row")
    wait(lambda: marked.count() == 1 and within(marked), "the row in view")
    assert marked.get_attribute("id") == anchor
    assert link.inner_text() in marked.inner_text()
    assert abs(widget.bounding_box()["y"] - top) < 2
    picture = report.locator("figure img").first
    wait(lambda: report.locator("figure img").count() >= 1, "a picture", seconds=60)
    wait(lambda: picture.evaluate("image => image.naturalWidth > 100"), "what is in it")
    wait(lambda: within(marked), "the row still in view")
    page.screenshot(path=artifacts / "assessment_report_row.png")
    report.get_by_role("button", name="back to the sentence").click()
    wait(lambda: abs(box.evaluate("box => box.scrollTop") - place) < 40 and within(link), "the sentence again")

    # Criteria of one state, another row with another figure, and the link to the report.
    widget.get_by_role("button", name="criteria", exact=True).click()
    table, figure = widget.locator(".workbench-choice:visible"), widget.locator(".bk-Figure")
    wait(lambda: table.locator("tbody tr").count() == 6, "the criteria")
    assert table.locator("tbody tr .state").first.inner_text() == "failing"
    table.get_by_role("button", name="largest spectral radius").click()
    wait(lambda: figure.count() == 1 and (np.ptp(pixels(figure), axis=(0, 1)) > 60).any(), "a picture", seconds=60)
    wait(lambda: figure.count() == 1 and "spectral radius" in widget.inner_text(), "another picture in its place")
    assert "block 1" in widget.locator("[aria-live=polite]:visible").inner_text()
    page.screenshot(path=artifacts / "assessment_report_criteria.png")
    widget.get_by_role("button", name="healthy 2").click()
    wait(lambda: table.locator("tbody tr").count() == 4, "two criteria less")
    worst, *about = widget.evaluate(CONTRAST)
    assert worst > 4.5, about
    widget.get_by_role("button", name="Show in report").click()
    wait(lambda: marked.count() == 1 and within(marked), "the row of the criterion")

    # All text is readable in the dark theme, and nothing is cut off on a narrow page.
    worst, *about = widget.evaluate(CONTRAST)
    assert worst > 4.5, about
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    try:
        page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
        page.wait_for_timeout(500)
        worst, *about = widget.evaluate(CONTRAST)
        assert worst > 4.5, about
        box.evaluate("box => { box.scrollTop = 0; }")
        page.screenshot(path=artifacts / "assessment_report_dark.png")
        widget.get_by_role("button", name="criteria", exact=True).click()
        wait(lambda: figure.count() == 1, "the figure in the dark", seconds=60)
        worst, *about = widget.evaluate(CONTRAST)
        assert worst > 4.5, about
        page.screenshot(path=artifacts / "assessment_report_criteria_dark.png")
        page.set_viewport_size({"width": 780, "height": 1000})
        is_fitting = "element => element.scrollWidth <= element.clientWidth + 1"
        wait(lambda: widget.evaluate(is_fitting), "narrow criteria")
        page.screenshot(path=artifacts / "assessment_report_criteria_narrow.png")
        widget.get_by_role("button", name="report", exact=True).click()
        wait(lambda: box.count() == 1 and widget.evaluate(is_fitting) and box.evaluate(is_fitting), "a narrow report")
        assert answer.is_visible()
        page.screenshot(path=artifacts / "assessment_report_narrow.png")
    finally:
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    assert kernel("report.error") == ""

    ask_kernel(page, "report.close()")
    wait(lambda: box.count() == 0, "a page without the widget")
    assert not complaints


@pytest.mark.parametrize("theme", ["page", "projector"])
@pytest.mark.parametrize(
    ("kind", "view"), [("assessment", "criteria"), ("diagnosis", "experiments"), ("comparison", "side by side")]
)
def test_everybody_can_use_it_and_nothing_is_cut_off(lab, page, artifacts, kind, view, theme):
    export_netcdf(getattr(made_trees, kind)(), lab.root / "notebooks" / f"{kind}.nc", overwrite=True)
    name = f"notebooks/{kind}_{theme}.ipynb"
    cell = f'report = AssessmentReport(wb.open_run("{kind}.nc"), theme="{theme}")\nreport'
    write_notebook(lab.root / name, [CELLS[0], cell])
    complaints = open_and_run(lab, page, name)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    wait(lambda: widget.locator(".workbench-report .verdict").count() == 1, "the report")
    try:
        for one in ("report", view):
            widget.get_by_role("button", name=one, exact=True).click()
            page.wait_for_timeout(1500)
            check_widths(page, widget)
            widget.screenshot(path=artifacts / f"assessment_report_{kind}_{one.replace(' ', '_')}_{theme}.png")
            check_accessible(page, ".jp-OutputArea .workbench-widget")
    finally:
        page.set_viewport_size({"width": 1280, "height": 1000})
    ask_kernel(page, "report.close()")
    assert not complaints
