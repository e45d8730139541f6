"""Saved pages of widgets, opened from disk without a network: zoom, tooltips and controls."""

import re

import pytest

from tests.browser.driver import colored, place_of_color, wait
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of
from workbench.widgets import ArchitectureComparison, SpectrumExplorer

pytestmark = pytest.mark.browser


@pytest.fixture
def offline(page):
    """Return a page without network, with its requests and errors."""
    other = page.context.new_page()
    other.context.set_offline(True)
    other.asked, other.errors = [], []
    other.on("request", lambda request: other.asked.append(request.url))
    other.on("pageerror", lambda error: other.errors.append(str(error)))
    yield other
    other.context.set_offline(False)
    other.close()


def opened(page, path):
    page.goto(path.as_uri())
    page.locator(".bk-Figure").first.wait_for(timeout=15_000)
    page.wait_for_timeout(500)
    return lambda: page.evaluate(
        """() => Bokeh.documents.flatMap((doc) => [...doc._all_models.values()])
             .filter((model) => model.type === 'ColumnDataSource' && model.data.modulus)
             .map((source) => [source.data.layer.length, [...new Set(source.data.layer)]])"""
    )


def test_an_explorer_chooses_layers_models_and_zoom(offline, tmp_path):
    spectra = {"calm": spectra_of(0.9), "wild": spectra_of(9.0, n_layers=6, seed=1)}
    explorer = SpectrumExplorer(spectra)
    path = explorer.save(tmp_path / "explorer.html")
    explorer.close()
    modes = opened(offline, path)
    assert [n for n, _ in modes()] == [48, 72]
    panels = offline.locator(".bk-Figure")
    assert min(colored(panels.nth(i)) for i in range(2)) > 50
    offline.get_by_label("last layer").select_option("1")
    wait(lambda: [n for n, _ in modes()] == [24, 24], "two layers")
    offline.get_by_role("button", name="calm").click()
    wait(lambda: panels.count() == 1 or not panels.first.is_visible(), "one panel")
    start = "() => [...Bokeh.documents[0]._all_models.values()].find((m) => m.type === 'Figure').x_range.start"
    assert offline.evaluate(start) < 0
    offline.get_by_label("zoom of eigenvalues").select_option("near 1")
    wait(lambda: offline.evaluate(start) == 0.7, "the square around 1")
    # The tooltip of a mode shows its values.
    offline.get_by_label("zoom of eigenvalues").select_option("all modes")
    offline.get_by_role("button", name="calm").click()
    offline.wait_for_timeout(400)
    box, (x, y) = panels.nth(1).bounding_box(), place_of_color(panels.nth(1))
    offline.mouse.move(box["x"] + x - 1, box["y"] + y)
    offline.mouse.move(box["x"] + x, box["y"] + y)
    offline.get_by_text(re.compile(r"residual 0\.")).first.wait_for(timeout=5_000)
    assert offline.errors == []
    assert [url for url in offline.asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.slow
def test_a_comparison_moves_through_steps_and_views(offline, tmp_path):
    runs = {"Pre-LN": run_of([0, 10, 20]), "wild": run_of([0, 10], n_steps=14, diverges=True, seed=20)}
    comparison = ArchitectureComparison(runs)
    path = comparison.save(tmp_path / "comparison.html")
    comparison.close()
    opened(offline, path)
    moduli = """() => Bokeh.documents.flatMap((doc) => [...doc._all_models.values()])
        .filter((m) => m.data?.modulus).map((m) => Math.max(...m.data.modulus))"""
    before = offline.evaluate(moduli)
    step = offline.get_by_role("slider", name="step")
    step.focus()
    step.press("End")
    wait(lambda: offline.evaluate(moduli) != before, "the modes of the last step")
    assert float(offline.evaluate(moduli)[0]) == pytest.approx(
        float(runs["Pre-LN"].spectra["spectral_radius"].sel(step=20).max()), rel=1e-5
    )
    for view in ("layers", "training", "table", "radar"):
        offline.get_by_role("button", name=view, exact=True).click()
        wait(lambda view=view: offline.locator(f"section[aria-label={view}]").is_visible(), view)
        offline.wait_for_timeout(300)
    offline.get_by_role("button", name="layers", exact=True).click()
    panels = offline.locator("section[aria-label=layers] .bk-Figure")
    n_panels = sum(panel.is_visible() for panel in panels.all())
    offline.get_by_role("group", name="signals").get_by_role("button").first.click()
    wait(lambda: sum(panel.is_visible() for panel in panels.all()) == n_panels - 1, "one panel less")
    assert offline.errors == []


@pytest.mark.slow
def test_saved_pages_are_accessible(offline, tmp_path):
    from axe_playwright_python.sync_playwright import Axe

    explorer = SpectrumExplorer({"calm": spectra_of(0.9), "wild": spectra_of(9.0, seed=1)})
    path = explorer.save(tmp_path / "explorer.html")
    explorer.close()
    opened(offline, path)
    for scheme in ("light", "dark"):
        offline.emulate_media(color_scheme=scheme)
        found = Axe().run(offline)
        assert found.violations_count == 0, found.generate_report()
