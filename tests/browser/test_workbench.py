"""Workbench in JupyterLab: the main path, five tasks with their numbers of clicks, keyboard, widths, and `make lab`."""

import importlib.util
import json
from pathlib import Path

import pytest

import workbench as wb
from tests.browser.conftest import TOKEN
from tests.browser.driver import ask_kernel, open_and_run, wait, write_notebook
from tests.browser.looks import check_accessible, check_widths
from tests.widgets.recorded_runs import run_of

pytestmark = pytest.mark.browser
NOTEBOOK = "notebooks/workbench.ipynb"
MOST_CLICKS = 5


@pytest.fixture
def own_page(page):
    other = page.context.new_page()
    other.set_viewport_size({"width": 1600, "height": 1100})
    yield other
    other.close()


@pytest.fixture
def clicks(own_page):
    """A function that clicks on an element, and the elements that it clicked on."""

    def click(locator):
        locator.click()
        click.done.append(str(locator))

    click.done = []
    return click


def new_bench(lab, page, name, folder="."):
    path = f"notebooks/bench_{name}.ipynb"
    write_notebook(lab.root / path, [f"from workbench.widgets import Workbench\nbench = Workbench({folder!r})\nbench"])
    complaints = open_and_run(lab, page, path)
    page.locator(".workbench-sources .row").first.wait_for(timeout=30_000)
    return complaints


def tick(page, name):
    return page.locator(".workbench-sources").get_by_label(name, exact=True)


def view(page, name):
    return page.locator(".workbench-tags").first.get_by_role("button", name=name, exact=True)


def test_two_samples_are_ticked_shown_side_by_side_and_the_code_is_copied(lab, own_page, artifacts):
    complaints = open_and_run(lab, own_page, NOTEBOOK)
    tick(own_page, "pre_ln").click()
    tick(own_page, "no_norm").click()
    panels = own_page.locator(".workbench-room .bk-Figure")
    wait(lambda: panels.count() >= 2, "two panels", seconds=90)
    first, second = (panels.nth(i).bounding_box() for i in range(2))
    assert first["x"] + first["width"] <= second["x"] + 1
    assert abs(first["y"] - second["y"]) < 2
    own_page.get_by_role("button", name="Copy", exact=True).click()
    own_page.get_by_text("Copied.", exact=True).wait_for(timeout=5_000)
    own_page.evaluate(
        "() => { const field = document.createElement('textarea'); document.body.append(field); field.focus(); }"
    )
    own_page.keyboard.press("ControlOrMeta+V")
    pasted = own_page.evaluate(
        "() => { const { value } = document.activeElement; document.activeElement.remove(); return value; }"
    )
    assert "explorer = SpectrumExplorer(spectra)" in pasted
    assert repr(pasted) == ask_kernel(own_page, "bench.code")
    own_page.screenshot(path=artifacts / "workbench.png")
    assert ask_kernel(own_page, "bench.error") == "''"
    assert not complaints


@pytest.mark.slow
def test_five_tasks_take_few_clicks(lab, own_page, clicks, artifacts):
    """Compare checkpoints, train two architectures with the switch, watch a run, find a rate, assess a design."""
    runs = lab.root / "bench"
    wb.save(run_of([0, 10], n_steps=14, diverges=True, width=8), runs / "mine.zarr", overwrite=True)
    new_bench(lab, own_page, "tasks", str(runs))
    counts = {}

    def task(name, is_done, seconds=240):
        wait(is_done, name, seconds=seconds)
        assert not own_page.get_by_role("alert").count(), own_page.get_by_role("alert").first.inner_text()
        counts[name] = len(clicks.done)
        own_page.screenshot(path=artifacts / f"workbench_{name.replace(' ', '_')}.png")
        clicks.done.clear()
        ask_kernel(own_page, "[setattr(bench, 'ticked', []), setattr(bench, 'shown', ['spectra'])]")
        own_page.wait_for_timeout(1000)

    clicks(tick(own_page, "pre_ln"))
    clicks(tick(own_page, "no_norm"))
    clicks(view(own_page, "compare"))
    task("compare two checkpoints", lambda: own_page.locator(".workbench-room .bk-Figure").count() >= 4)

    clicks(tick(own_page, "No-Norm design"))
    clicks(tick(own_page, "Pre-LN design"))
    clicks(view(own_page, "live"))
    clicks(own_page.get_by_role("button", name="Start", exact=True))
    n_done = "max([0, *(one.n_done for one in bench.views['live'].canvas.histories.values())])"
    wait(lambda: int(ask_kernel(own_page, n_done)) > 2, "steps of training", seconds=240)
    clicks(own_page.get_by_role("switch", name="KSS", exact=True))
    task("train two architectures with KSS", lambda: ask_kernel(own_page, "bench.views['live'].kss.enabled") == "True")
    ask_kernel(own_page, "[made.widget.stop() for made in bench._made.values() if made.view.name == 'live']")

    clicks(tick(own_page, "mine"))
    clicks(view(own_page, "timeline"))
    task("watch a run", lambda: own_page.get_by_text("diverged at step 14").count() >= 1)

    clicks(tick(own_page, "Pre-LN design"))
    clicks(view(own_page, "rate and risk"))
    pilot = own_page.get_by_role("button", name="Run pilot", exact=True)
    pilot.wait_for(timeout=60_000)
    is_measured = "bench.views['rate and risk'].risk is not None and not bench.views['rate and risk'].is_measuring"
    wait(lambda: ask_kernel(own_page, is_measured) == "True", "a risk", seconds=240)
    clicks(pilot)
    task("find a rate", lambda: ask_kernel(own_page, "bench.views['rate and risk'].pilot is not None") == "True", 500)

    clicks(tick(own_page, "Pre-LN design"))
    clicks(view(own_page, "report"))
    is_assessed = "'report' in bench.views and bench.views['report'].tree is not None"
    task("assess a design", lambda: ask_kernel(own_page, is_assessed) == "True", 500)

    (artifacts / "workbench_clicks.json").write_text(json.dumps(counts, indent=1))
    assert max(counts.values()) <= MOST_CLICKS, counts
    assert ask_kernel(own_page, "bench.error") == "''"


@pytest.mark.slow
def test_it_is_used_by_keyboard_and_files_are_dropped(lab, own_page):
    new_bench(lab, own_page, "keys")
    own_page.get_by_role("searchbox", name="Filter the list").click()
    own_page.keyboard.type("pre_ln")
    own_page.keyboard.press("Enter")  # ticks the only match
    wait(lambda: ask_kernel(own_page, "bench.ticked") == "['pre_ln']", "a tick by keyboard")
    own_page.keyboard.press("ControlOrMeta+A")
    own_page.keyboard.press("Delete")
    own_page.keyboard.press("Tab")  # the list
    own_page.keyboard.press("Tab")  # the first group
    own_page.keyboard.press("Tab")
    own_page.keyboard.press("Space")
    wait(lambda: ask_kernel(own_page, "bench.ticked") == "['pre_ln', 'no_norm']", "a second tick by keyboard")
    own_page.get_by_label("Choose files to open").set_input_files(
        {"name": "mine.csv", "mimeType": "text/csv", "buffer": b"step,loss\n0,3\n1,2\n"}
    )
    wait(lambda: "dropped/mine.csv" in ask_kernel(own_page, "bench.ticked"), "a file")
    field = own_page.get_by_placeholder("Path or name to open")
    field.fill("nowhere.zarr")
    field.press("Enter")
    own_page.get_by_role("alert").get_by_text("There is no file or folder nowhere.zarr").wait_for(timeout=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["page", "projector"])
def test_it_fits_every_page_and_is_accessible(lab, own_page, artifacts, theme):
    path = f"notebooks/bench_looks_{theme}.ipynb"
    source = (
        f"from workbench.widgets import Workbench\nbench = Workbench(theme={theme!r})\nbench.ticked = ['pre_ln']\nbench"
    )
    write_notebook(lab.root / path, [source])
    open_and_run(lab, own_page, path)
    wait(lambda: own_page.locator(".workbench-room .bk-Figure:visible").count() >= 1, "a panel", seconds=90)
    view(own_page, "timeline").click()
    own_page.wait_for_timeout(1500)
    widget = own_page.locator(".jp-OutputArea .workbench-widget").first
    check_widths(own_page, widget, widths=(1100, 1600))
    for width in (1100, 1600):
        own_page.set_viewport_size({"width": width, "height": 1100})
        own_page.wait_for_timeout(800)
        own_page.screenshot(path=artifacts / f"workbench_{theme}_{width}.png")
    if theme == "page":
        check_accessible(own_page, ".workbench-widget")


@pytest.mark.slow
def test_make_lab_opens_two_notebooks_side_by_side(lab, own_page, artifacts):
    file = Path(__file__).parents[2] / "tools" / "lab.py"
    spec = importlib.util.spec_from_file_location("lab", file)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = lab.root.parent / "workspaces"
    tool.save_workspace(["notebooks/00_start.ipynb", NOTEBOOK], folder)
    assert list(folder.glob("stability-workbench*"))
    own_page.goto(f"{lab.url}/lab/workspaces/{tool.WORKSPACE}?token={TOKEN}")
    notebooks = own_page.locator(".jp-NotebookPanel:visible")
    wait(lambda: notebooks.count() == 2, "two notebooks", seconds=60)
    own_page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=30_000)
    left, right = sorted((notebooks.nth(i).bounding_box() for i in range(2)), key=lambda box: box["x"])
    assert left["x"] + left["width"] <= right["x"] + 20
    assert left["x"] < 100  # the sidebar is closed
    assert own_page.evaluate("() => jupyterapp.shell.currentWidget.context.path") == NOTEBOOK
    own_page.screenshot(path=artifacts / "make_lab.png")
