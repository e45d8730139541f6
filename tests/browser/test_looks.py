"""Widgets and figures of bokeh at three widths of the page, light, dark, and for a projector."""

import pytest

import workbench as wb
from tests.browser.driver import open_and_run, wait, write_notebook
from tests.browser.looks import check_accessible, check_widths
from tests.browser.text_boxes import complaints_of, drawn_texts, record_text
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WIDTHS = (1100, 1600, 2560)
MAKE = {
    "explorer": "SpectrumExplorer({name: wb.open_run(path) for name, path in spectra.items()}",
    "comparison": "ArchitectureComparison(runs",
}
FIGURES = {
    "profile": "wb.plots.layer_profile({name: wb.open_run(path) for name, path in spectra.items()})",
    "grid": "wb.plots.step_grid({name: wb.open_run(path) for name, path in runs.items()}, steps=[0, 10, 20])",
    "traces": "wb.plots.traces({name: wb.open_run(path) for name, path in runs.items()})",
}


@pytest.fixture
def data(lab):
    """Cells that define the paths of some runs and spectra."""
    runs = {
        "Pre-LN": run_of([0, 10, 20], width=32),
        "No-Norm": run_of([0, 10, 20], n_steps=25, diverges=True, radius=0.8, drift=0.2, width=32, seed=30),
        "a run with quite a long name, seed 3": run_of([0, 20], width=32, seed=10),
    }
    spectra = {"calm": spectra_of(0.9, width=24), "wild": spectra_of(9e3, n_layers=6, width=24, seed=1)}
    places = {"runs": {}, "spectra": {}}
    for kind, trees in (("runs", runs), ("spectra", spectra)):
        for name, tree in trees.items():
            path = lab.root / "looks" / f"{kind} {name}.zarr"
            if not path.exists():
                wb.save(tree, path)
            places[kind][name] = str(path)
    head = "import workbench as wb\nfrom workbench.widgets import ArchitectureComparison, SpectrumExplorer, show"
    return [head, f"runs, spectra = {places['runs']}, {places['spectra']}"]


@pytest.fixture
def own_page(page):
    other = page.context.new_page()
    record_text(other)
    yield other
    other.close()


def check_text(page, what):
    """Assert that no text on a canvas overlaps another one or is cut."""
    found = [sentence for canvas in drawn_texts(page) for sentence in complaints_of(canvas)]
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize("theme", ["page", "projector"])
@pytest.mark.parametrize("name", list(MAKE))
def test_a_widget_fits_every_page(lab, own_page, artifacts, data, name, theme):
    path = f"notebooks/looks_{name}_{theme}.ipynb"
    write_notebook(lab.root / path, [*data, f"{name} = {MAKE[name]}, theme={theme!r})\n{name}"])
    open_and_run(lab, own_page, path)
    widget = own_page.locator(".jp-OutputArea .workbench-widget")
    wait(lambda: widget.locator(".bk-Figure:visible").count() >= 2, "panels")
    views = ["eigenvalues", "layers", "training", "table", "radar"] if name == "comparison" else [""]
    for view in views:
        if view:
            own_page.get_by_role("button", name=view, exact=True).click()
            own_page.wait_for_timeout(2500)
        for width in WIDTHS:
            own_page.set_viewport_size({"width": width, "height": 1300})
            widget.evaluate("element => element.scrollIntoView()")
            own_page.wait_for_timeout(900)
            own_page.screenshot(path=artifacts / f"{name}_{view}_{theme}_{width}.png")
            check_text(own_page, (view, width))
        if theme == "page":
            check_accessible(own_page, ".workbench-widget")
            own_page.screenshot(path=artifacts / f"{name}_{view}_light_again.png")
    check_widths(own_page, widget)


def test_figures_fit_every_page(lab, own_page, artifacts, data):
    path = "notebooks/looks_figures.ipynb"
    write_notebook(lab.root / path, [*data, *(f"show({figure})" for figure in FIGURES.values())])
    open_and_run(lab, own_page, path)
    own_page.locator(".bk-Figure").first.wait_for(timeout=20_000)
    for width in WIDTHS:
        own_page.set_viewport_size({"width": width, "height": 1300})
        own_page.wait_for_timeout(1500)
        for place in range(len(FIGURES)):
            figure = own_page.locator(".workbench-figure").nth(place)
            figure.evaluate("element => element.scrollIntoView()")
            own_page.wait_for_timeout(300)
            own_page.screenshot(path=artifacts / f"figure{place}_{width}.png")
            room = figure.evaluate("element => [element.scrollWidth, element.clientWidth]")
            assert room[0] <= room[1] + 1
            frames = figure.locator(".bk-Figure").evaluate_all(
                "all => all.map((one) => one.getBoundingClientRect().right)"
            )
            assert max(frames) > 0.75 * room[1]
        check_text(own_page, width)
