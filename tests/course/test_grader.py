"""The version of the lessons for nbgrader, checked without nbgrader: metadata, solutions, and the students' version."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import workbench as wb
from workbench.course.exercises import exercises_of, find, lessons
from workbench.errors import OptionError

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "course.py"
LESSONS = [f"lesson_{number}" for number in lessons()]
#: Fields of nbgrader's schema 3 that every cell with metadata must have.
FIELDS = {"schema_version", "grade_id", "grade", "solution", "locked", "task"}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("course_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tool, tmp_path_factory):
    place = tmp_path_factory.mktemp("class")
    tool.write(place)
    return place


@pytest.fixture(params=LESSONS)
def lesson(request):
    return request.param


@pytest.fixture
def source(lesson):
    return nbformat.read(ROOT / "notebooks" / "course" / f"{lesson}.ipynb", as_version=4)


@pytest.fixture
def graded(folder, lesson):
    return nbformat.read(folder / "source" / lesson / f"{lesson}.ipynb", as_version=4)


def marked(notebook, mark):
    return [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get(mark)]


def students_version(notebook):
    """The text of all cells after nbgrader has replaced the solutions."""
    begin, end = "### BEGIN SOLUTION", "### END SOLUTION"
    return "\n".join(re.sub(f"{begin}.*?{end}", "", cell.source, flags=re.DOTALL) for cell in notebook.cells)


class TestMetadata:
    def test_every_code_cell_has_all_fields_and_a_unique_name(self, graded):
        nbformat.validate(graded)
        code = [cell for cell in graded.cells if cell.cell_type == "code"]
        marks = [cell.metadata["nbgrader"] for cell in code]
        assert all(set(mark) >= FIELDS and mark["schema_version"] == 3 for mark in marks)
        names = [mark["grade_id"] for mark in marks]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names)

    def test_a_cell_is_the_answer_of_a_learner_or_locked(self, graded):
        for cell in graded.cells:
            if cell.cell_type == "code":
                mark = cell.metadata["nbgrader"]
                assert mark["solution"] != mark["locked"]
                assert mark["locked"] or not mark["grade"]
                assert ("points" in mark) == mark["grade"]

    def test_each_exercise_has_an_answer_and_then_a_check(self, graded, lesson):
        numbers = [exercise.number for exercise in exercises_of(int(lesson.removeprefix("lesson_")))]
        names = [cell.metadata["nbgrader"]["grade_id"] for cell in graded.cells if cell.cell_type == "code"]
        for number in numbers:
            place = names.index(f"answer-{number.replace('.', '-')}")
            assert names[place + 1] == f"check-{number.replace('.', '-')}"
        assert len(marked(graded, "grade")) == len(marked(graded, "solution")) == len(numbers)

    def test_there_are_no_outputs(self, graded):
        assert not any(cell.get("outputs") for cell in graded.cells)


class TestStudentsVersion:
    def test_it_contains_no_solution(self, graded, lesson):
        text = students_version(graded)
        assert "<details>" not in text
        assert "SOLUTION" not in text
        for exercise in exercises_of(int(lesson.removeprefix("lesson_"))):
            last = exercise.solution.strip().splitlines()[-1]
            assert last == f"answer = {last.split()[-1]}" or last not in text
            assert exercise.solution.strip() not in text

    def test_it_keeps_text_and_code_of_the_lesson(self, graded, source):
        kept = students_version(graded)
        for cell in source.cells:
            if cell.cell_type == "code":
                assert cell.source.split("wb.course.check(")[0].strip() in kept
            elif "Solution of" not in cell.source:
                assert cell.source.splitlines()[0] in kept or "](" in cell.source

    def test_it_has_no_links_to_files_that_it_does_not_contain(self, graded):
        texts = [cell.source for cell in graded.cells if cell.cell_type == "markdown"]
        assert not re.search(r"\]\((?!https?:)", "\n".join(texts))


def run_up_to_the_checks(notebook):
    """Run the code of an assignment with its solutions in one namespace, and return the checks that passed."""
    namespace, passed = {"__name__": "__main__"}, []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), namespace)
            if cell.metadata["nbgrader"]["grade"]:
                passed.append(namespace["feedback"].number)
    return passed


@pytest.mark.slow
@pytest.mark.parametrize("lesson", ["lesson_4", "lesson_5"], indirect=True)
def test_the_solutions_pass(graded, lesson):
    numbers = [exercise.number for exercise in exercises_of(int(lesson.removeprefix("lesson_")))]
    assert run_up_to_the_checks(graded) == numbers


def test_a_wrong_answer_fails_with_its_sentence(folder):
    graded = nbformat.read(folder / "source" / "lesson_4" / "lesson_4.ipynb", as_version=4)
    check = next(cell for cell in marked(graded, "grade") if cell.metadata["nbgrader"]["grade_id"] == "check-4-6")
    with pytest.raises(AssertionError, match="This is the sensitivity"):
        exec(check.source, {"wb": wb, "answer": lambda sensitivity, n_faults, n_false: sensitivity})


class TestConversion:
    def test_the_answer_may_be_in_the_cell_before_the_check(self, tool):
        cells = [
            nbformat.v4.new_code_cell("import workbench as wb", id="first"),
            nbformat.v4.new_markdown_cell("Which? See [the glossary](../glossary.md) and [RKSP](https://arxiv.org)."),
            nbformat.v4.new_code_cell("mine = ...", id="second"),
            nbformat.v4.new_markdown_cell("Run the check."),
            nbformat.v4.new_code_cell('wb.course.check("1.2", mine)', id="third"),
        ]
        found = tool.graded(nbformat.v4.new_notebook(cells=cells))
        answer, check = marked(found, "solution")[0], marked(found, "grade")[0]
        assert answer.source.startswith("mine = ...\n### BEGIN SOLUTION\n")
        assert answer.source.endswith(f"{find('1.2').solution.strip()}\nmine = answer\n### END SOLUTION")
        assert 'wb.course.check("1.2", mine)' in check.source
        assert len(marked(found, "locked")) == 2
        assert "the glossary and [RKSP](https://arxiv.org)" in found.cells[1].source

    def test_an_unknown_exercise_is_named(self, tool):
        cells = [nbformat.v4.new_code_cell('answer = ...\nwb.course.check("9.9", answer)')]
        with pytest.raises(OptionError, match=r"9\.9"):
            tool.graded(nbformat.v4.new_notebook(cells=cells))

    def test_the_configuration_keeps_a_notebook_running(self, folder):
        config = SimpleNamespace(ClearSolutions=SimpleNamespace(), Execute=SimpleNamespace())
        exec((folder / "nbgrader_config.py").read_text(), {"get_config": lambda: config})
        exec(config.ClearSolutions.code_stub["python"], {})  # no exception, unlike the default

    @pytest.mark.slow
    @pytest.mark.subprocess
    def test_the_command_line(self, tmp_path):
        done = subprocess.run([sys.executable, TOOL, "nbgrader", tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) == len(LESSONS)
        other = subprocess.run([sys.executable, TOOL, "otter"], capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert "nbgrader FOLDER" in other.stderr
