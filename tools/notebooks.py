"""Run notebooks and save their outputs, or copy them together with their checks.

Call: python tools/notebooks.py run [names]       runs notebooks in place, each in a new kernel, and saves their outputs
      python tools/notebooks.py copies FOLDER     copies all notebooks, each with its checks as the last cell, for nbval
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, CHECKS = ROOT / "notebooks", ROOT / "tests" / "notebooks" / "checks"
#: Code that prints the CPU time of a kernel and of its finished child processes.
_CLOCK = "import os as _os; _t = _os.times(); print(_t.user + _t.system + _t.children_user + _t.children_system)"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def notebooks_in(folder: Path) -> list[Path]:
    """Return the notebooks of a folder, then those of the course in it."""
    return [*sorted(folder.glob("*.ipynb")), *sorted((folder / "course").glob("*.ipynb"))]


def run(path: Path) -> tuple[float, float]:
    """Run a notebook and save it with its outputs; return its wall time and CPU time in seconds."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CLOCK))
    start = time.monotonic()
    client = NotebookClient(
        notebook, timeout=600, store_widget_state=False, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    cpu = float(notebook.cells.pop().outputs[0]["text"])
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # time of the execution, which would change the file on every run
        for output in cell.get("outputs", ()):
            for kind, text in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = _ADDRESS.sub("", text)
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)
    return time.monotonic() - start, cpu


def copies(folder: Path) -> None:
    """Copy all notebooks and the files they read, without outputs and with the checks as last cells."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "runs").mkdir()
    for path in notebooks_in(folder / "notebooks"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        checks = CHECKS / f"{path.stem}.py"
        if checks.exists():
            notebook.cells.append(nbformat.v4.new_code_cell(checks.read_text(encoding="utf-8")))
        nbformat.write(notebook, path)


def main() -> None:
    """Run the command that the command line requests; the docstring of the file lists the commands."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    match sys.argv[1:]:
        case ["run", *names]:
            chosen = [path for path in notebooks_in(NOTEBOOKS) if not names or path.stem in names]
            total = 0.0
            for path in chosen:
                seconds, cpu = run(path)
                total += cpu
                print(
                    f"{path.stem}: {seconds:.0f} s, {cpu:.0f} s of CPU, {path.stat().st_size / 1e3:.0f} kB", flush=True
                )
            print(f"total {total:.0f} s of CPU")
        case ["copies", folder]:
            copies(Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
