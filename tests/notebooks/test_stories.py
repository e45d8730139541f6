"""The shipped notebooks: short, with goals, executed, and with an image of every figure and widget."""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
#: The notebooks that are read in this order; others only show a widget.
STORIES = [path for path in NOTEBOOKS if path.stem[0].isdigit()]
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def cells_of(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def outputs_of(notebook):
    return [output for cell in cells_of(notebook, "code") for output in cell.outputs]


def test_it_is_short(notebook):
    assert sum(len(cell.source.split()) for cell in cells_of(notebook, "markdown")) <= 700
    code = cells_of(notebook, "code")
    assert len(code) <= 12
    assert max(len(line) for cell in code for line in cell.source.splitlines()) <= 90


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_it_begins_with_goals_and_ends_with_the_next_notebook(path):
    notebook = nbformat.read(path, as_version=4)
    first, last = notebook.cells[0], notebook.cells[-1]
    assert first.source.startswith("# ")
    assert "You will" in first.source
    assert last.cell_type == "markdown"
    assert last.source.startswith("**Next**:")
    place = STORIES.index(path)
    if place + 1 < len(STORIES):
        assert STORIES[place + 1].stem[:2] in last.source


def test_its_claims_are_checked_in_tests(notebook, path):
    assert not any(line.lstrip().startswith("assert") for cell in notebook.cells for line in cell.source.splitlines())
    checks = (Path(__file__).parent / "checks" / f"{path.stem}.py").read_text()
    assert "assert " in checks


def test_it_is_shipped_with_its_outputs(notebook, path):
    code = cells_of(notebook, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = outputs_of(notebook)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < 1e6


def test_every_figure_and_widget_has_an_image(notebook):
    outputs = [output for output in outputs_of(notebook) if "data" in output]
    views = [place for place, output in enumerate(outputs) if WIDGET in output["data"]]
    assert views
    for place in views:
        assert "image/png" in outputs[place + 1]["data"]
        assert outputs[place + 1]["data"]["text/plain"].endswith(".")  # a sentence for readers without images
