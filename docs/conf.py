"""Configuration of Sphinx: pages in Markdown, a reference that is generated from the docstrings, no network."""

import ast
import inspect
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGE = ROOT / "workbench"
sys.path.insert(0, str(ROOT))

project = "Stability Workbench"
author = "The Stability Workbench developers"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False
templates_path: list[str] = []

# Markdown: links to headings; files outside of this folder (notebooks, data, benchmarks) are named, not linked.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A name between single backticks in a docstring links to the reference.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def public_modules():
    """Return name -> module of the package, its public modules and the widgets, under the names that users write."""
    package = import_module("workbench")
    found = {"workbench": package}
    found |= {f"workbench.{name}": value for name in dir(package) if inspect.ismodule(value := getattr(package, name))}
    return {**found, "workbench.widgets": import_module("workbench.widgets")}


def directive(module, name, value):
    """Return the directive that documents one public name of a module."""
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        # The base class of the exceptions is documented with the package.
        again = "   :no-index:\n" if (module, name) == ("workbench.errors", "WorkbenchError") else ""
        return f".. {kind}:: {module}.{name}\n   :members:\n   :show-inheritance:\n{again}"
    if callable(value) and hasattr(value, "__name__"):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n"


def write_reference(app):
    """Write one page of the reference for each public module."""
    folder = DOCS / "reference" / "api"
    folder.mkdir(parents=True, exist_ok=True)
    modules = public_modules()
    for name, module in modules.items():
        title = f"``{name}``"
        page = [title, "=" * len(title), "", f".. py:module:: {name}", ""]
        page += [f".. automodule:: {module.__name__}", "   :no-index:", ""]
        for each in sorted(dir(module), key=str.lower):
            if not each.startswith("_") and not inspect.ismodule(value := getattr(module, each)):
                page.append(directive(name, each, value))
        write(folder / f"{name}.rst", "\n".join(page))
    listed = "\n".join(f"   api/{name}" for name in modules)
    write(
        DOCS / "reference" / "index.rst",
        "Reference\n=========\n\nEverything that ``import workbench as wb`` offers, and the widgets. "
        "Names that are not listed here are internal and may change.\n\n"
        f".. toctree::\n   :maxdepth: 1\n\n{listed}\n",
    )


def write_files(app):
    """Write the list of all files of the library, from their docstrings."""
    page = ["# Files", "", "The first sentence of the docstring of every file, the lowest layer first."]
    for package in layers():
        page += ["", f"## `{package}`", "", "| file | contents |", "|---|---|"]
        page += [f"| `{path.relative_to(PACKAGE)}` | {summary(path)} |" for path in files_of(package)]
    write(DOCS / "files.md", "\n".join(page) + "\n")


def layers():
    """Return the packages in the order of the layers, the lowest first; `pyproject.toml` defines it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    ordered = reversed(next(each["layers"] for each in contracts if each["type"] == "layers"))
    return [name for layer in ordered for name in layer.split(" | ") if not name.startswith("_")]


def files_of(package):
    """Return the files of a package, the file that describes it first."""
    folder = PACKAGE / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def summary(path):
    """Return the first sentence of the docstring of a file, as Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0].replace("|", r"\|").replace("``", "`")


class Layers(Directive):
    """The table of all layers, from the docstrings of the packages."""

    def run(self):
        """Return the table as a node of the page."""
        rows = [(package, summary(files_of(package)[0])) for package in reversed(layers())]
        lines = ["| package | contents |", "|---|---|", *(f"| `{package}` | {text} |" for package, text in rows)]
        node = nodes.container()
        self.state.nested_parse(StringList(lines), self.content_offset, node)
        return node.children


def write(path, text):
    """Write a file, but only if its text changed, so that Sphinx builds only what is new."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def prepare_docstring(app, what, name, obj, options, lines):
    """Turn the entries of "See Also" into a list, and escape what is text to a reader but markup to Sphinx."""
    section = ""
    is_literal = False
    for i, line in enumerate(lines):
        if re.fullmatch(r"[A-Z][A-Za-z ]+:", line):
            section = line
        is_literal = line.endswith("::") or (is_literal and (not line or line.startswith("    ")))
        if section == "See Also:":
            lines[i] = re.sub(r"^( +)(?=`[\w.]+`)", r"\1- ", line)
        elif section not in ("Example:", "Examples:") and not is_literal:
            parts = re.split(r"(``.*?``|`[^`]*`)", line)
            parts[::2] = [re.sub(r"[|*]", r"\\\g<0>", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def setup(app):
    """Connect the generators."""
    app.connect("builder-inited", write_reference)
    app.connect("builder-inited", write_files)
    app.add_directive("layers", Layers)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
    return {"parallel_read_safe": True}
