"""Static pictures: a notebook is run in JupyterLab, saved, and reopened without a kernel, as HTML and as PNG."""

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser.driver import open_and_run, wait, write_notebook

pytestmark = pytest.mark.browser
WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOKS = [
    "00_start",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "01_checkpoint_spectra",
            "02_architectures",
            "03_watch_training",
            "04_kss",
            "05_early_warning",
            "06_moe_routing",
            "07_which_learning_rate",
            "08_assess_a_design",
            "09_why_did_it_fail",
        )
    ),
]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_figure_and_widget_leaves_a_picture(lab, page, artifacts, name):
    path = f"notebooks/{name}.ipynb"
    open_and_run(lab, page, path, seconds=300)
    page.wait_for_timeout(2500)  # until the pictures of the widgets are drawn
    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    saved = lab.root / path
    wait(lambda: not page.evaluate("() => jupyterapp.shell.currentWidget.context.model.dirty"), "the saved notebook")
    notebook = nbformat.read(saved, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs if "data" in output]
    views = [place for place, output in enumerate(outputs) if WIDGET in output["data"]]
    assert views, "a notebook without any widget or figure"
    assert all("image/png" in outputs[place + 1]["data"] for place in views)
    assert saved.stat().st_size < 1e6
    n_pictures = sum("image/png" in output["data"] for output in outputs)

    # HTML, and a viewer that supports only PNG.
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert html.count('src="data:image/png;base64,') == n_pictures
    assert "model not found" not in html

    _open_without_kernel(lab, page, path)
    pictures = page.locator(".jp-OutputArea img[src^='data:image/png']")
    shown = [picture for picture in pictures.all() if picture.is_visible()]
    assert len(shown) == n_pictures
    assert all(picture.evaluate("image => image.naturalWidth > 200 && image.offsetWidth > 200") for picture in shown)
    assert not [one for one in page.get_by_text("model not found").all() if one.is_visible()]
    page.screenshot(path=artifacts / f"without_kernel_{name}.png")


@pytest.mark.slow
def test_a_picture_follows_its_widget_and_hides_while_it_is_alive(lab, page):
    path = "notebooks/picture.ipynb"
    write_notebook(
        lab.root / path,
        [
            "import workbench as wb\nfrom workbench.widgets import SpectrumExplorer",
            "model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)\n"
            "spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256)\n"
            "explorer = SpectrumExplorer(spectra)\nexplorer",
        ],
    )
    open_and_run(lab, page, path)
    picture = page.locator(".jp-OutputArea img[src^='data:image/png']")
    page.locator(".workbench-alive").first.wait_for(state="attached")
    wait(lambda: picture.count() == 1 and not picture.is_visible(), "a picture that is hidden")
    before = picture.get_attribute("src")
    page.get_by_role("button", name="near 1", exact=True).click()
    wait(lambda: picture.get_attribute("src") != before, "another picture after another zoom")
    assert not picture.is_visible()


def _open_without_kernel(lab, page, path):
    """Reopen a saved notebook without its kernel and without starting another one."""
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.goto(lab.address(path))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady", timeout=60_000)
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.evaluate("() => jupyterapp.commands.execute('docmanager:reload')")
    page.wait_for_timeout(1500)
    # JupyterLab draws invisible cells later, so scroll to each one.
    page.evaluate(
        """async () => {
          const notebook = jupyterapp.shell.currentWidget.content;
          for (let i = 0; i < notebook.widgets.length; i++) {
            await notebook.scrollToItem(i);
            await new Promise((resolve) => setTimeout(resolve, 60));
          }
        }"""
    )
