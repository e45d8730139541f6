"""Links between files of the repository as links between pages of the site.

Pages and notebooks link to each other as files, so that their links also work on a forge and in JupyterLab. Notebooks,
and a few files outside of the folder of the documentation, have a page in the site under another name. Other files have
no page: a link to one becomes plain text.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from generated_files import write

DOCS = Path(__file__).resolve().parents[1]
#: Pages of files and folders outside of the folder of the documentation.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "data": "data.md",
    "data/README.md": "data.md",
    "notebooks": "tutorials/index.md",
    "notebooks/course": "course.md",
}
# Blocks of code, links, and code within a line, which is left unchanged outside of a link.
_PARTS = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^(?P=fence)"
    r"|(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<path>[^()\s]+)\)"
    r"|(?P<ticks>`+)[^`].*?(?P=ticks)",
    re.DOTALL | re.MULTILINE,
)


def page_of(path):
    """Return the page of a file, relative to the documentation; None if it has none."""
    path = path.rstrip("/")
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return "tutorials/" + path.removeprefix("notebooks/").removesuffix(".ipynb") + ".md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path)


def rewrite_links(text, file, page):
    """Return Markdown with its links to files of the repository as links of a page.

    Args:
        text: Markdown.
        file: File that the text was written for, relative to the repository.
        page: Page that shows it, relative to the documentation.
    """

    def rewrite(match):
        link = match["path"]
        if link is None or link.startswith("#") or re.match(r"[a-z][a-z+.-]*:", link):
            return match[0]
        path, _, anchor = unquote(link).partition("#")
        target = page_of(os.path.normpath(os.path.join(os.path.dirname(file), path)))
        if target is None:
            return match[0] if match["mark"] else match["text"]
        target = os.path.relpath(target, os.path.dirname(page) or ".")
        return f"{match['mark']}[{match['text']}]({target}{'#' + anchor if anchor else ''})"

    return _PARTS.sub(rewrite, text)


def rewrite_source(app, docname, source):
    """Rewrite the links of a page before it is parsed."""
    if Path(app.env.doc2path(docname)).suffix == ".md":
        source[0] = rewrite_links(source[0], f"docs/{docname}.md", f"{docname}.md")


def write_copied_pages(app):
    """Write the pages of files that are outside of the folder of the documentation."""
    for name in ("CONTRIBUTING.md", "data/README.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        write(DOCS / PAGES[name], rewrite_links(text, name, PAGES[name]))


def setup(app):
    """Connect to Sphinx."""
    app.connect("builder-inited", write_copied_pages)
    app.connect("source-read", rewrite_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
