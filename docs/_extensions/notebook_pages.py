"""One page for each notebook, with the outputs that are saved in it; nothing is executed.

The live view of a widget needs a kernel, so that its page shows the picture that the widget left below.
"""

import base64
import os
import re
from pathlib import Path

import nbformat
from generated_files import remove_others, write
from repository_links import rewrite_links

DOCS = Path(__file__).resolve().parents[1]
NOTEBOOKS = DOCS.parent / "notebooks"
TUTORIALS = DOCS / "tutorials"
#: Texts that do not describe their picture.
_NO_WORDS = ("<Figure size", "A figure of the workbench", "<IPython.core.display.Image")
_INTRODUCTION = """# Tutorials

Each tutorial is a notebook with its outputs. `make lab` opens them in JupyterLab, where their figures are interactive;
here each figure is a picture. The order is that of a first reading. The [course](../course.md) teaches the same
subjects with exercises.
"""


def write_tutorials(app):
    """Write the pages of all notebooks and their index."""
    written = set()
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            written |= NotebookPage(path).write()
    written |= {write(TUTORIALS / "index.md", index_page())}
    remove_others(TUTORIALS, "*", written)


def lessons():
    """Return the notebooks of the course: the lessons in their order, then the others."""
    found = sorted((NOTEBOOKS / "course").glob("*.ipynb"))
    return sorted(found, key=lambda path: not path.stem.startswith("lesson"))


def list_lessons(app, docname, source):
    """Add the lessons of the course to the navigation, below the page of the course."""
    if docname == "course":
        listed = "\n".join(f"tutorials/course/{path.stem}" for path in lessons())
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


class NotebookPage:
    """The page of one notebook.

    Args:
        path: The notebook.
    """

    def __init__(self, path):
        self.notebook = nbformat.read(path, as_version=4)
        self.name = path.relative_to(NOTEBOOKS).with_suffix("").as_posix()
        self.page = TUTORIALS / f"{self.name}.md"
        self.section = ""
        self.pictures = {}

    @property
    def title(self):
        """Its title."""
        first = next(cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")
        return first.partition("\n")[0].lstrip("# ").strip()

    @property
    def introduction(self):
        """The first paragraph below its title."""
        first = next(cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")
        return self.links(first.split("\n\n")[1])

    def links(self, text):
        """Return Markdown of the notebook with the links of its page."""
        return rewrite_links(text, f"notebooks/{self.name}.ipynb", f"tutorials/{self.name}.md")

    def write(self):
        """Write the page and its pictures; return their paths."""
        where = f"notebooks/{self.name}.ipynb"
        source = os.path.relpath(DOCS.parent / where, self.page.parent)
        parts = [part for cell in self.notebook.cells for part in self.cell(cell)]
        note = f"This page is the notebook `{where}` with its saved outputs: {{download}}`download it <{source}>`."
        parts.insert(1, f":::{{container}} source-note\n{note}\n:::")
        written = {write(self.page, "\n\n".join(parts) + "\n")}
        return written | {write(path, content) for path, content in self.pictures.items()}

    def cell(self, cell):
        """Return the Markdown of a cell and its outputs."""
        if cell.cell_type == "markdown":
            if headings := re.findall(r"^#+ (.*)$", cell.source, re.MULTILINE):
                self.section = headings[-1].strip()
            return [self.links(cell.source)]
        if cell.cell_type != "code":
            return []
        code = [fenced(cell.source, "python")] if cell.source.strip() else []
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            code = ["<details><summary>Show the code</summary>", *code, "</details>"]
        outputs = [
            f"::::::{{container}} cell-output\n{shown}\n::::::"
            for output in cell.outputs
            if (shown := self.output(output))
        ]
        if outputs and cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            outputs = ["<details><summary>Show the output</summary>", *outputs, "</details>"]
        return [*code, *outputs]

    def output(self, output):
        """Return the Markdown of an output; empty if the page shows nothing of it."""
        if output.output_type == "stream":
            return fenced(output.text.rstrip("\n"), "text")
        if output.output_type == "error":
            return fenced(f"{output.ename}: {output.evalue}", "text")
        data = output.data
        text = data.get("text/plain", "")
        if "image/png" in data:
            return self.picture(base64.b64decode(data["image/png"]), text)
        if "text/markdown" in data:
            return self.links(data["text/markdown"])
        page = data.get("text/html", "")
        if "<table" in page and "xr-wrap" not in page:
            return f"```{{raw}} html\n{table(page)}\n```"
        if 'class="workbench-static"' in page or 'role="status"' in page:
            return fenced(text, "text") if text else ""
        if page and "xr-wrap" not in page:
            return f"```{{raw}} html\n{page}\n```"
        return fenced(text, "text") if text else ""

    def picture(self, content, words):
        """Return the Markdown of a picture, with the words that describe it."""
        if words.startswith(_NO_WORDS) or not words:
            words = f"Figure of the section “{self.section}”"
        words = re.sub(r"([\[\]\\])", r"\\\1", " ".join(words.split()))
        path = TUTORIALS / "pictures" / f"{self.name.replace('/', '_')}_{len(self.pictures) + 1}.png"
        self.pictures[path] = content
        return f"![{words}]({os.path.relpath(path, self.page.parent)})"


def fenced(text, language):
    """Return a block of code."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(page):
    """Return an HTML table of pandas in a box that scrolls; empty headers, which no one can read, become cells."""
    page = re.sub(r"<th( class=\"[^\"]*\")?\s*>(?:&nbsp;|\s)*</th>", r"<td\1></td>", page)
    return f'<div class="table-wrapper">\n{page}\n</div>'


def card(picture, title, page, text):
    """Return the entry of a page in a grid: its picture in Markdown, its title, and a text."""
    return f":::::{{container}} card\n{picture}**[{title}]({page})**\n\n{text}\n:::::"


def index_page():
    """Return the list of the notebooks that are not lessons of the course, each with its first picture."""
    pages = [NotebookPage(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    cards = []
    for page in pages:
        picture = f"pictures/{page.name}_1.png"
        shown = f"![First figure of: {page.title}]({picture})\n\n" if (TUTORIALS / picture).exists() else ""
        cards.append(card(shown, page.title, f"{page.name}.md", page.introduction))
    listed = "\n".join(page.name for page in pages)
    grid = "\n\n".join(cards)
    return f"{_INTRODUCTION}\n::::::{{container}} cards\n{grid}\n::::::\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


def setup(app):
    """Connect to Sphinx."""
    app.connect("builder-inited", write_tutorials)
    app.connect("source-read", list_lessons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
