"""Three short runs side by side in JupyterLab: step, play, change the view, hide a model, write files."""

import numpy as np
import pytest

import workbench as wb
from tests.browser.driver import ask_kernel, colored, open_and_run, pixels, text_contrast, wait, write_notebook
from tests.widgets.recorded_runs import run_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebooks/comparison.ipynb"
STEPS = [0, 10, 20, 30, 40]


@pytest.fixture
def notebook(lab):
    runs = {
        "Pre-LN": run_of(STEPS, radius=0.95, drift=0.004, width=32),
        "Post-LN": run_of(STEPS[::2], radius=1.5, drift=-0.008, width=32, seed=10),
        "No-Norm": run_of(STEPS[:4], n_steps=33, diverges=True, radius=0.8, drift=0.06, width=32, seed=30),
    }
    for name, run in runs.items():
        wb.save(run, lab.root / "notebooks" / "runs" / f"{name}.zarr")
    cells = [
        "from pathlib import Path\nfrom workbench.widgets import ArchitectureComparison",
        f"runs = {{name: Path('runs') / f'{{name}}.zarr' for name in {list(runs)}}}\n"
        "comparison = ArchitectureComparison(runs)\ncomparison",
    ]
    write_notebook(lab.root / NOTEBOOK, cells)
    return NOTEBOOK


def test_comparison_steps_plays_switches_and_exports(lab, page, artifacts, notebook):
    complaints = open_and_run(lab, page, notebook)
    widget = page.locator(".jp-OutputArea .workbench-widget")
    panels = widget.locator(".bk-Figure:visible")

    def tag(name):
        return widget.locator(".workbench-tag", has_text=name)

    def view(name):
        page.get_by_role("button", name=name, exact=True).click()
        wait(lambda: ask_kernel(page, "comparison.view") == f"'{name}'", f"the view {name}")

    def no_error():
        return ask_kernel(page, "comparison.error") == "''"

    wait(lambda: panels.count() == 3, "three panels")
    widget.evaluate("element => element.scrollIntoView()")
    wait(lambda: min(colored(panels.nth(i)) for i in range(3)) > 100, "modes on all panels")
    page.screenshot(path=artifacts / "comparison_eigenvalues.png")

    # The slider moves the modes of every model in the existing panels.
    before = [pixels(panels.nth(i)) for i in range(3)]
    handle = widget.locator(".widget-slider", has_text="step").locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    handle.press("ArrowRight")
    wait(lambda: ask_kernel(page, "comparison.step") == "20", "step 20")
    wait(lambda: all(_differ(panels.nth(i), before[i]) for i in range(3)), "other pictures")

    # Play advances the slider to the end.
    widget.get_by_role("combobox").first.select_option("5 per second")
    widget.locator(".jupyter-widget-play button, .widget-play button").first.click()
    wait(lambda: ask_kernel(page, "comparison.step") == "40", "the last step")
    wait(lambda: handle.get_attribute("aria-valuenow") == "4.0", "a slider that follows")
    assert widget.locator(".widget-label", has_text="40").is_visible()
    assert "diverged at step 33" in _texts(page)

    # Hide a model without redrawing the notebook, and show all of them again.
    tag("Post-LN").click()
    wait(lambda: panels.count() == 2, "two panels")
    assert ask_kernel(page, "comparison.models") == "['Pre-LN', 'No-Norm']"
    wait(lambda: min(colored(panels.nth(i)) for i in range(2)) > 100, "modes on two panels")
    widget.get_by_role("button", name="All", exact=True).first.click()
    wait(lambda: panels.count() == 3, "three panels again")

    view("layers")
    wait(lambda: panels.count() == 4 and _model_colors(panels.nth(1)) > 100, "profiles")
    page.screenshot(path=artifacts / "comparison_layers.png")
    tag("nonlinearity ratio").click()
    wait(lambda: panels.count() == 3 and _model_colors(panels.nth(1)) > 100, "three profiles")
    view("training")
    wait(lambda: panels.count() == 2 and _model_colors(panels.first) > 100, "traces")
    before = pixels(panels.first)
    ask_kernel(page, "setattr(comparison, 'step', 10)")
    wait(lambda: _differ(panels.first, before), "a line that moves with the step")
    page.screenshot(path=artifacts / "comparison_training.png")
    view("table")
    page.get_by_role("columnheader", name="spectral radius").wait_for(timeout=10_000)
    page.screenshot(path=artifacts / "comparison_table.png")
    assert no_error()

    # A file of the figure, which is not overwritten, and the runs in one file.
    view("eigenvalues")
    page.get_by_role("button", name="PNG", exact=True).click()
    exports = lab.root / "notebooks" / "exports"
    wait(lambda: (exports / "eigenvalues_step10.png").exists(), "a picture")
    widget.get_by_role("status").wait_for(timeout=10_000)
    page.get_by_role("button", name="PNG", exact=True).click()
    widget.get_by_role("alert").wait_for(timeout=10_000)
    assert "eigenvalues_step10.png exists already" in widget.get_by_role("alert").inner_text()
    page.screenshot(path=artifacts / "comparison_refusal.png")
    page.get_by_role("button", name="netCDF", exact=True).click()
    wait(lambda: (exports / "eigenvalues_step10.nc").exists() and no_error(), "a netCDF file")
    assert list(wb.open_run(exports / "eigenvalues_step10.nc").children) == ["Pre-LN", "Post-LN", "No-Norm"]

    _change_theme(page, "JupyterLab Dark", is_light=False)
    wait(lambda: min(colored(panels.nth(i)) for i in range(3)) > 100, "modes in the dark theme")
    wait(lambda: text_contrast(page, panels.first) > 4.5, "light text on the dark theme")
    page.screenshot(path=artifacts / "comparison_dark.png")
    _change_theme(page, "JupyterLab Light", is_light=True)
    assert not complaints


def _differ(locator, before):
    now = pixels(locator)
    return now.shape == before.shape and int((np.abs(now - before).sum(-1) > 60).sum()) > 50


def _model_colors(locator):
    """Count colored pixels; text, axes and grid are gray."""
    image = pixels(locator)
    return int(((image.max(-1) - image.min(-1)) > 80).sum())


def _texts(page):
    """Return the titles of the figures on the page."""
    return page.evaluate("() => Bokeh.documents.map((one) => JSON.stringify(one.to_json())).join()")


def _change_theme(page, name, *, is_light):
    page.evaluate("(theme) => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
    flag = str(is_light).lower()
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{flag}'", timeout=10_000)
