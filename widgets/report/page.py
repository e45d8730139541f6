"""The text of a report on the page: its numbers lead to their rows, and a picture is drawn when it comes into view."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.reports.document import Block, Document, Lead, Picture
from workbench.reports.html import html
from workbench.reports.make_report import document_of
from workbench.reports.pictures import image
from workbench.widgets.base import known

if TYPE_CHECKING:
    import xarray as xr

_log = logging.getLogger(__name__)
#: A line that stands for a picture; page.js puts an empty frame there.
_FRAME = "picture {number} of the report"


class ReportPage(anywidget.AnyWidget):
    """The page that `workbench.reports` writes as a file, inside a notebook and in JupyterLab's theme.

    Nothing of it is kept in the notebook's file: a page asks the kernel for text and pictures when it is shown.

    Args:
        lock: Held while pictures are drawn; give the one that the widget's callbacks take.

    Attributes:
        marked: The anchor of the row that was led to last; set it to lead there. Empty: none.
    """

    _esm = Path(__file__).with_name("page.js")
    _css = Path(__file__).with_name("page.css")
    marked = traitlets.Unicode().tag(sync=True)

    def __init__(self, *, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self.tree: xr.DataTree | None = None
        self.document: Document | None = None
        self._text = ""
        super().__init__()
        self.on_msg(self._receive)

    def tell(self, tree: xr.DataTree) -> None:
        """Show the report of a tree.

        Raises:
            SchemaError: If it is no such tree, or lacks a number of its report; the page then stays as it is.
        """
        document = document_of(tree)
        text = html(_framed(document), tree)
        with self.lock:
            self.tree, self.document, self._text = tree, document, text
            self.marked = ""
            self.send({"is_new": True})

    def lead_to(self, anchor: str) -> None:
        """Bring a row into view and mark it."""
        self.marked = ""
        self.marked = anchor

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        with self.lock:
            if self.document is None:
                return
            pictures = self.document.pictures
            if content.get("question") == "text":
                frames = [
                    {"title": p.title, "caption": p.caption, "alternative": p.alternative, "line": _line(number)}
                    for number, p in enumerate(pictures)
                ]
                self.send({"answer": content["id"], "text": self._text, "frames": frames})
            elif content.get("question") == "picture" and content["number"] < len(pictures):
                self.send(*self._drawn(pictures[content["number"]], content["id"]))

    def _drawn(self, picture: Picture, question: str) -> tuple[dict[str, Any], list[bytes]]:
        try:
            mime, content = image(picture, known(self.tree))
        except WorkbenchError as error:
            return {"answer": question, "failure": str(error)}, []
        except Exception as error:  # noqa: BLE001  (a bug of ours: the rest of the report stays, the log has the traceback)
            _log.exception("The picture '%s' was not drawn.", picture.title)
            return {"answer": question, "failure": f"{type(error).__name__}: {error}"}, []
        return {"answer": question, "mime": mime}, [content]


def _framed(document: Document) -> Document:
    """The document with a line in the place of each picture, which takes time to draw."""
    number, sections = 0, []
    for section in document.sections:
        blocks: list[Block] = []
        for block in section.blocks:
            if isinstance(block, Picture):
                blocks.append(Lead(_line(number)))
                number += 1
            else:
                blocks.append(block)
        sections.append(replace(section, blocks=tuple(blocks)))
    return replace(document, sections=tuple(sections))


def _line(number: int) -> str:
    return _FRAME.format(number=number)
