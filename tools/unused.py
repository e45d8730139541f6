"""List public names and options that nothing outside of the library and its tests uses.

    python tools/unused.py

A name is used if README, documentation, notebooks, course, widgets, command line, benchmarks or the scripts in data/
mention it. An option is used if one of these, or the library itself, passes it by name or writes it in a sentence such
as ``wb.train(..., store=)``. What nobody uses is removed, unless it is a measure of the field under its standard name.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = (
    "README.md", "docs/**/*.md", "docs/**/*.py", "notebooks/**/*.ipynb", "workbench/course/*.py", "widgets/**/*.py",
    "workbench/cli.py", "data/*.py", "benchmarks/*.py",
)  # fmt: skip


def public() -> dict[str, Any]:
    """Return each public object of the package and of its public modules, by its dotted name."""
    import workbench as wb
    from workbench import widgets

    found = {f"wb.{name}": getattr(wb, name) for name in dir(wb)}
    found |= {f"wb.{name}": getattr(widgets, name) for name in dir(widgets)}
    for path, module in [item for item in found.items() if isinstance(item[1], types.ModuleType)]:
        found |= {f"{path}.{name}": getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {path: value for path, value in found.items() if not isinstance(value, types.ModuleType)}


def texts(places: tuple[str, ...] = PLACES) -> Iterator[tuple[str, str]]:
    """Yield the text of each place, and the Python code in it."""
    for path in sorted({path for place in places for path in ROOT.glob(place) if "_build" not in path.parts}):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells)
            code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        else:
            code = "\n\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)) if path.suffix == ".md" else text
        yield text, code


def options_in(code: str) -> set[tuple[str, str]]:
    """Return each function that code calls, by its last name, with each argument that is passed by name."""
    try:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    except SyntaxError:  # a magic of a notebook, or a sketch with dots
        return {
            (name, k) for name, given in re.findall(r"(\w+)\(([^()]*)\)", code) for k in re.findall(r"(\w+)=", given)
        }
    found = set()
    for call in calls:
        of = call.args[0] if getattr(call.func, "id", "") == "partial" and call.args else call.func
        found |= {(getattr(of, "attr", getattr(of, "id", "")), keyword.arg or "") for keyword in call.keywords}
    return found


def unused() -> tuple[list[str], list[str]]:
    """Return the names, and the options as ``name(option=)``, that nothing uses."""
    words: set[str] = set()
    passed: set[tuple[str, str]] = set()
    for text, code in texts():
        words |= set(re.findall(r"\w+", text))
        passed |= options_in(code)
        passed |= {
            (name, k) for name, given in re.findall(r"(\w+)\(([^()]*)\)", text) for k in re.findall(r"(\w+)=", given)
        }
    for _, code in texts(("workbench/**/*.py",)):
        passed |= options_in(code)
    everything = public()
    names = [path for path in everything if path.rpartition(".")[2] not in words]
    options = []
    for path, value in everything.items():
        if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        short = path.rpartition(".")[2]
        options += [
            f"{path}({each.name}=)"
            for each in parameters
            if each.default is not each.empty and (short, each.name) not in passed and not each.name.startswith("_")
        ]
    return sorted(names), sorted(options)


if __name__ == "__main__":
    names, options = unused()
    sys.stdout.write("\n".join([f"{len(names)} names:", *names, f"{len(options)} options:", *options, ""]))
