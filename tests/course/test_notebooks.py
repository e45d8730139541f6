"""The lessons as notebooks: goals, exercises with hidden solutions, outputs; the solutions pass their own checks."""

import re
from pathlib import Path

import nbformat
import pytest

import workbench as wb
from tests.notebooks.test_stories import WIDGET, cells_of, outputs_of
from workbench.course.exercises import exercises_of, lessons

COURSE = Path(wb.__file__).parents[1] / "notebooks" / "course"
CHECK = re.compile(r'^wb\.course\.check\("([\d.]+)", answer\)$', re.MULTILINE)
SOLUTION = re.compile(
    r"\A<details><summary>Solution of ([\d.]+)</summary>\n\n```python\n(.*)\n```\n\n(.*)\n\n</details>\Z", re.DOTALL
)


@pytest.fixture(params=lessons())
def lesson(request):
    return request.param


@pytest.fixture
def path(lesson):
    return COURSE / f"lesson_{lesson}.ipynb"


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def test_it_has_goals_and_names_the_next_lesson(notebook, lesson):
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith(f"# Lesson {lesson}: ")
    assert "You will" in first
    assert f'wb.course.hint("{lesson}.1")' in first
    assert last.startswith("**Next**:")
    if lesson < max(lessons()):
        assert f"(lesson_{lesson + 1}.ipynb)" in last
    assert sum(len(cell.source.split()) for cell in cells_of(notebook, "markdown")) <= 1500
    assert max(len(line) for cell in cells_of(notebook, "code") for line in cell.source.splitlines()) <= 90


def test_each_exercise_has_question_answer_and_hidden_solution(notebook, lesson):
    cells = notebook.cells
    places = {CHECK.search(cell.source)[1]: i for i, cell in enumerate(cells) if CHECK.search(cell.source)}
    assert list(places) == [exercise.number for exercise in exercises_of(lesson)]
    for exercise in exercises_of(lesson):
        place = places[exercise.number]
        assert exercise.question in cells[place - 1].source
        assert cells[place].source.splitlines()[-1] == f'wb.course.check("{exercise.number}", answer)'
        number, code, explanation = SOLUTION.match(cells[place + 1].source).groups()
        assert (number, code, explanation) == (exercise.number, exercise.solution.strip(), exercise.explanation)


def test_it_is_shipped_unanswered_with_its_outputs(notebook, path):
    code = cells_of(notebook, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    said = [cell.outputs[-1]["data"]["text/plain"] for cell in code if CHECK.search(cell.source)]
    assert all(": No answer yet. " in text for text in said)
    assert not [output for output in outputs_of(notebook) if output.output_type == "error"]
    assert not [output.text for output in outputs_of(notebook) if output.get("name") == "stderr"]
    assert path.stat().st_size < 1e6


def test_every_figure_and_widget_has_an_image(notebook):
    outputs = [output for output in outputs_of(notebook) if "data" in output]
    views = [place for place, output in enumerate(outputs) if WIDGET in output["data"]]
    assert views
    assert all("image/png" in outputs[place + 1]["data"] for place in views)


@pytest.mark.slow
def test_the_solutions_pass_in_the_notebook(notebook, lesson, tmp_path):
    """Each solution, in the place of the answer of the learner, is right with what the cells before it computed."""
    from nbclient import NotebookClient

    for cell in notebook.cells:
        if found := CHECK.search(cell.source):
            cell.source = f"{wb.course.solution(found[1]).split('```')[1].removeprefix('python')}\n{found[0]}"
    folder = tmp_path / "notebooks" / "course"
    folder.mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "data").symlink_to(COURSE.parents[1] / "data")
    NotebookClient(notebook, timeout=600, startup_timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    said = [cell.outputs[-1]["data"]["text/plain"] for cell in cells_of(notebook, "code") if CHECK.search(cell.source)]
    assert len(said) == len(exercises_of(lesson))
    assert all(": Right. " in text for text in said), said
