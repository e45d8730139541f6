"""Write the lessons of the course as assignments for nbgrader.

Call: python tools/course.py nbgrader FOLDER      writes nbgrader_config.py and source/lesson_N/lesson_N.ipynb in FOLDER

Then, in FOLDER: nbgrader generate_assignment lesson_4. An exercise is a code cell of a lesson that calls
`wb.course.check("4.1", answer)`; the lines before the call, or else the code cell before it, are the answer of the
learner. Solutions are those of the library.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from workbench.course import exercises

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks" / "course"
_CHECK = re.compile(r'^wb\.course\.check\("([\d.]+)", (\w+)\)\s*$', re.MULTILINE)
_SOLUTION = re.compile(r"<details>\s*<summary>\s*Solution")
#: A link to a file of the repository, which an assignment does not contain.
_LOCAL_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)")
#: nbgrader puts the comment in place of a solution, instead of an exception that ends each run of the notebook. By
#: default it stops a cell after 30 seconds, which a busy server may need for one that takes five.
_CONFIG = """c = get_config()
c.ClearSolutions.code_stub = {"python": "# Replace the three dots."}
c.Execute.timeout = 300
"""


def graded(notebook: NotebookNode) -> NotebookNode:
    """Return a lesson as the instructor's version of an assignment, without outputs."""
    cells: list[NotebookNode] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            if not _SOLUTION.search(cell.source):
                cell.source = _LOCAL_LINK.sub(r"\1", cell.source)
                cells.append(cell)
            continue
        check = _CHECK.search(cell.source)
        if check is None:
            cells.append(_code(cell.source, f"given-{cell.id}", locked=True))
            continue
        number, name = check.groups()
        template = cell.source[: check.start()].strip()
        if not template:  # the answer is in the code cell before, perhaps with text in between
            place = max(i for i, each in enumerate(cells) if each.cell_type == "code")
            template = cells.pop(place).source
        cells += _exercise(number, name, template)
    version = nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)
    version.metadata.pop("widgets", None)
    return version


def _exercise(number: str, name: str, template: str) -> list[NotebookNode]:
    """Return the cell of the answer and the cell that grades it."""
    code = exercises.find(number).solution.strip()
    code += f"\n{name} = answer" if name != "answer" else ""
    answer = f"{template}\n### BEGIN SOLUTION\n{code}\n### END SOLUTION"
    check = f'feedback = wb.course.check("{number}", {name})\nassert feedback.is_right, feedback.message'
    return [
        _code(answer, f"answer-{number}", solution=True),
        _code(check, f"check-{number}", grade=True, locked=True, points=1),
    ]


def _code(source: str, grade_id: str, **marks: Any) -> NotebookNode:
    """Return a code cell with the metadata of nbgrader, whose names consist of letters, digits and hyphens."""
    found = {"schema_version": 3, "grade_id": grade_id.replace(".", "-")}
    found |= {"grade": False, "solution": False, "locked": False, "task": False} | marks
    return new_code_cell(source, id=found["grade_id"], metadata={"nbgrader": found})


def write(folder: Path) -> list[Path]:
    """Write the assignments of all lessons and the configuration of nbgrader; return the notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nbgrader_config.py").write_text(_CONFIG, encoding="utf-8")
    written = []
    for path in sorted(NOTEBOOKS.glob("lesson_*.ipynb")):
        place = folder / "source" / path.stem / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(graded(nbformat.read(path, as_version=4)), place)
        written.append(place)
    return written


def main() -> None:
    """Run the command that the command line requests; the docstring of the file lists the commands."""
    match sys.argv[1:]:
        case ["nbgrader", folder]:
            for path in write(Path(folder)):
                print(path)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
