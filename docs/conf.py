"""Configuration of Sphinx: pages in Markdown, a reference that is generated from the docstrings, no network."""

import ast
import importlib.util
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
sys.path.insert(0, str(DOCS / "_extensions"))

from generated_files import write  # noqa: E402  (in the folder _extensions)

project = "Stability Workbench"
author = "The Stability Workbench developers"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["mathml", "repository_links", "notebook_pages", "gallery_pages"]  # in the folder _extensions
# The option `-t quick` of Sphinx omits the pages of source code and the pictures of the gallery.
if not tags.has("quick"):  # noqa: F821  (Sphinx defines the name)
    extensions.append("sphinx.ext.viewcode")
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
templates_path = ["_templates"]

# Markdown: links to headings.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# The button copies the lines of an example without its prompts and results.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# A name between single backticks in a docstring links to the reference.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
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


class RecordedTable(Directive):
    """A table of recorded data: the result of a function of the module beside the page, as Markdown.

    `results/kss.md` may contain a directive `recorded-table` with the argument ``controls``; it shows the table that
    the function ``controls()`` in `results/kss.py` computes from `data/`, a pandas table without its index.
    """

    required_arguments = 1

    def run(self):
        """Return the table as a node of the page."""
        page = Path(self.state.document.current_source)
        table = getattr(module_beside(page), self.arguments[0])()
        self.state.document.settings.env.note_dependency(str(page.with_suffix(".py")))
        node = nodes.container()
        self.state.nested_parse(StringList(markdown(table)), self.content_offset, node)
        return node.children


def module_beside(page):
    """Return the module with the name of a page in the same folder."""
    name = f"docs_{page.parent.name}_{page.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DOCS / page.resolve().relative_to(DOCS).with_suffix(".py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def markdown(table):
    """Return the lines of a pandas table in Markdown, without its index; numbers align to the right."""
    sides = ["---:" if kind.kind in "iuf" else "---" for kind in table.dtypes]
    rows = [list(table.columns), sides, *table.astype(str).values.tolist()]
    # A number and its percent sign stay on one line.
    return ["| " + " | ".join(row).replace(" %", "\N{NO-BREAK SPACE}%") + " |" for row in rows]


def prepare_page(app, pagename, templatename, context, doctree):
    """Correct the HTML of a page before it is written.

    A header of a table without text confuses a screen reader. In the pages of source code, some links to the reference
    are wrong if names of a file are documented under several modules, and the list of all pages takes most of the time.
    """
    body = re.sub(r"<th class=\"head[^\"]*\"><p></p></th>", "<td></td>", context.get("body") or "")
    if pagename.startswith("_modules/"):
        known = {f"{entry.docname}.html#{entry.node_id}" for entry in app.env.domains.python_domain.objects.values()}
        link = re.compile(r'<a class="viewcode-back" href="(?:\.\./)*([^"]*)">\[docs\]</a>')
        body = link.sub(lambda match: match[0] if match[1] in known else "", body)
        if pagename == "_modules/index":  # its lists are nested without an item between them
            body = re.sub(r"</?ul>", "", body).replace("<li>", "<ul><li>", 1) + "</ul>"
        context["toctree"] = lambda **options: ""
    context["body"] = body


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
    app.connect("html-page-context", prepare_page, priority=100)
    app.add_directive("layers", Layers)
    app.add_directive("recorded-table", RecordedTable)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
    return {"parallel_read_safe": True}
