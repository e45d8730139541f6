"""The gallery: one page for each figure and widget, with the lines that make it and its picture.

The modules in `gallery` have one function for each of them. Its docstring describes the picture; its lines are shown
and executed. A picture is drawn again if its function or the library has changed.
"""

import hashlib
import importlib.util
import inspect
import os
import re
import textwrap
from functools import cache
from pathlib import Path

from contract_pages import write_contracts
from generated_files import remove_others, write
from notebook_pages import card, fenced, table

DOCS = Path(__file__).resolve().parents[1]
GALLERY = DOCS / "gallery"
PICTURES = DOCS / "_build" / ".gallery"
#: The modules of examples; each is a section of the gallery.
SECTIONS = ("widgets", "spectra", "runs", "failures", "rates", "studies")
_INTRODUCTION = """# Gallery

Every widget and every figure, with the lines that make it. The data ship with the package, so that the lines run as
they stand. `wb.plots.save(figure, "figure.svg")` writes a figure to a file, and `widget.save("page.html")` writes a
page that stays interactive without a kernel.
"""


class Example:
    """The example of one figure or widget.

    Args:
        section: Name of its module.
        function: Function that returns the figure or widget.
    """

    def __init__(self, section, function):
        self.section, self.function, self.name = section, function, function.__name__
        words = inspect.getdoc(function)
        self.title, _, description = words.partition("\n\n")
        self.description = " ".join(description.split())
        self.page = GALLERY / section / f"{self.name}.md"
        self.picture = PICTURES / section / f"{self.name}.png"

    @property
    def target(self):
        """Full name of what it shows."""
        return f"workbench.{'widgets' if self.section == 'widgets' else 'plots'}.{self.name}"

    @property
    def code(self):
        """The lines that a user would write."""
        source = inspect.getsource(self.function)
        body = textwrap.dedent(source.split('"""', 2)[2]).strip("\n")
        imports = ["import numpy as np"] * ("np." in body) + ["import workbench as wb"]
        imports += ["from workbench import widgets"] * ("widgets." in body)
        return "\n".join(imports) + "\n\n" + re.sub(r"^return ", "", body, flags=re.MULTILINE)

    def draw(self):
        """Draw the picture, and the table if there is one, unless neither the example nor the library has changed."""
        key = self.picture.with_suffix(".key")
        state = hashlib.sha256((library_state() + inspect.getsource(self.function)).encode()).hexdigest()
        if not (key.exists() and key.read_text() == state):
            picture, table = shown(self.function(), self.name)
            self.picture.parent.mkdir(parents=True, exist_ok=True)
            self.picture.write_bytes(picture)
            self.picture.with_suffix(".html").write_text(table, encoding="utf-8")
            key.write_text(state)

    def write(self, *, with_picture):
        """Write the page."""
        parts = [f"# {self.name}", self.title, fenced(self.code, "python")]
        if with_picture:
            table = self.picture.with_suffix(".html").read_text(encoding="utf-8")
            parts.append(f"```{{raw}} html\n{table}\n```" if table else self.image(self.page.parent, self.title))
        parts += [self.description, f"Reference: {{py:obj}}`{self.target}`."]
        write(self.page, "\n\n".join(parts) + "\n")

    def image(self, folder, words):
        """Return the Markdown of the picture in a page of a folder."""
        return f"![{words}]({os.path.relpath(self.picture, folder)})"

    def card(self, *, with_picture):
        """Return its entry in the gallery."""
        picture = self.image(GALLERY, f"Picture of {self.name}") + "\n\n" if with_picture else ""
        return card(picture, self.name, f"{self.section}/{self.name}.md", self.title)


def examples(section):
    """Return the examples of a section in the order of its module, and the title of the section."""
    spec = importlib.util.spec_from_file_location(f"gallery_{section}", GALLERY / f"{section}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [Example(section, function) for function in own], inspect.getdoc(module).rstrip(".")


def shown(result, name):
    """Return the picture of a result, and its table in HTML if it is one."""
    import pandas as pd

    from workbench.plots.figure_files import picture_of
    from workbench.widgets.text_picture import text_picture

    if isinstance(result, pd.DataFrame):
        frame = result.map(lambda value: f"{value:.3g}" if isinstance(value, float) else str(value))
        frame.columns = [" ".join(head) if isinstance(head, tuple) else str(head) for head in frame.columns]
        rows = [["", *frame.columns], *([str(index), *row] for index, row in frame.T.items())]
        return text_picture(name, table=rows), table(result.to_html(border=0, float_format="{:.3g}".format))
    if not hasattr(result, "close"):
        return picture_of(result), ""
    try:
        return (result.picture if hasattr(result, "picture") else result._picture._draw)(), ""
    finally:
        result.close()


@cache
def library_state():
    """Return a fingerprint of the code of the library and its widgets, and of the recorded data."""
    state = hashlib.sha256()
    for folder in ("workbench", "widgets", "data"):
        for path in sorted((DOCS.parent / folder).rglob("*")):
            if path.suffix in (".py", ".js", ".json"):
                state.update(path.read_bytes())
            elif path.suffix in (".nc", ".csv", ".safetensors"):
                state.update(f"{path.name} {path.stat().st_size}".encode())
    return state.hexdigest()


def write_gallery(app):
    """Draw all pictures, and write all pages and their index."""
    with_picture = not app.tags.has("quick")
    written = {GALLERY / "index.md"}
    index, listed = [_INTRODUCTION], []
    for section in SECTIONS:
        own, title = examples(section)
        for example in own:
            if with_picture:
                example.draw()
            example.write(with_picture=with_picture)
            written.add(example.page)
            listed.append(f"{section}/{example.name}")
        cards = "\n\n".join(example.card(with_picture=with_picture) for example in own)
        index.append(f"## {title}\n\n::::::{{container}} cards\n{cards}\n::::::")
    state = library_state() if with_picture else ""
    written.add(write_contracts(GALLERY / "contracts.md", state, PICTURES, with_results=with_picture))
    listed.append("contracts")
    index.append("## Contracts\n\n[Broken contracts](contracts.md): each contract of `wb.check`, broken by one line.")
    index.append("```{toctree}\n:hidden:\n\n" + "\n".join(listed) + "\n```\n")
    write(GALLERY / "index.md", "\n\n".join(index))
    remove_others(GALLERY, "*.md", written)


def setup(app):
    """Connect to Sphinx."""
    app.connect("builder-inited", write_gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
