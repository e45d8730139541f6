"""First steps of a user: open JupyterLab, run 00_start, move a slider, change the theme, save."""

import json

import pytest

from tests.browser.driver import ask_kernel, colored, run_all, text_contrast, wait

pytestmark = pytest.mark.browser
NOTEBOOK = "notebooks/00_start.ipynb"


def test_start_notebook_draws_answers_and_saves(lab, page, artifacts):
    outside = []
    page.on("request", lambda request: None if lab.url in request.url else outside.append(request.url))
    page.goto(lab.address(NOTEBOOK))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    run_all(page)

    panels = page.locator(".workbench-widget .bk-Figure")
    wait(lambda: panels.count() >= 2, "two panels")
    panels.first.scroll_into_view_if_needed()
    assert int(ask_kernel(page, "len(explorer.sources)")) == panels.count()
    wait(lambda: min(colored(panels.nth(i)) for i in range(2)) > 300, "modes on both panels")
    page.screenshot(path=artifacts / "explorer_light.png")
    assert text_contrast(page, panels.first) > 4.5

    # With a larger threshold more modes are reliable, so more markers are filled, in the kernel and on the page.
    fill = "{name: float(source.data['fill'].sum()) for name, source in explorer.sources.items()}"
    before, n_colored = ask_kernel(page, fill), colored(panels.first)
    handle = page.locator(".workbench-widget .widget-slider", has_text="residual at most").locator(".noUi-handle")
    handle.focus()
    for _ in range(3):
        handle.press("PageUp")
    wait(lambda: ask_kernel(page, fill) != before, "new data after the slider has moved")
    wait(lambda: colored(panels.first) > 1.02 * n_colored, "more color after the slider has moved")
    assert ask_kernel(page, "explorer.error") == "''"

    # A selection in the figure reaches the kernel and is listed in a table.
    box = panels.first.bounding_box()
    page.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 0.25 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.55 * box["height"], steps=6)
    page.mouse.up()
    wait(lambda: int(ask_kernel(page, "len(explorer.selected())")) > 0, "selected modes")
    page.get_by_role("columnheader", name="|λ|", exact=True).wait_for(timeout=5_000)
    page.screenshot(path=artifacts / "explorer_selection.png")

    # The view zooms to the modes around 1, in the kernel and on the page.
    n_colored = colored(panels.nth(1))
    page.get_by_role("button", name="near 1", exact=True).click()
    wait(lambda: float(ask_kernel(page, "explorer._axes.x_range.start")) > 0, "another range")
    wait(lambda: colored(panels.nth(1)) != n_colored, "modes drawn apart")
    page.screenshot(path=artifacts / "explorer_near_one.png")
    page.get_by_role("button", name="all modes", exact=True).click()

    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=10_000)
    wait(lambda: text_contrast(page, panels.first) > 4.5, "light text on the dark theme")
    wait(lambda: min(colored(panels.nth(i)) for i in range(2)) > 300, "modes in the dark theme")
    page.screenshot(path=artifacts / "explorer_dark.png")

    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    saved = lab.root / NOTEBOOK
    wait(lambda: _is_saved(saved), "the saved notebook with its outputs")
    (artifacts / "notebook_bytes.txt").write_text(f"{saved.stat().st_size}\n")
    assert saved.stat().st_size < 200_000, "strip large outputs, or show less in the notebook"
    assert not outside, f"the page asked for addresses outside the machine: {outside[:3]}"


def test_reloaded_page_shows_the_kernels_state(lab, page):
    ask_kernel(page, "setattr(explorer.reliable_residual, 'value', 0.0)")
    page.reload()
    panels = page.locator(".workbench-widget .bk-Figure")
    wait(lambda: panels.count() >= 2, "panels after a reload", seconds=60)
    wait(lambda: colored(panels.first) > 300, "modes after a reload")
    assert page.get_by_text("residual ≤ 0", exact=False).locator("visible=true").count() == 1


def _is_saved(path):
    notebook = json.loads(path.read_text())
    return any(cell.get("outputs") for cell in notebook["cells"])
