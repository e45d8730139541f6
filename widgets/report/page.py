"""The text of a report on the page: numbers link to their rows, and a figure is drawn once it is visible."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anywidget
import traitlets
import xarray as xr

from workbench.errors import WorkbenchError
from workbench.reports.document import Block, Document, Lead, Picture
from workbench.reports.formats import html
from workbench.reports.make_report import document_of
from workbench.reports.pictures import image
from workbench.widgets.base import known

_log = logging.getLogger(__name__)
#: Placeholder line of a figure, which page.js replaces by an empty frame.
_FRAME = "picture {number} of the report"


class ReportPage(anywidget.AnyWidget):
    """The HTML page of `workbench.reports` inside a notebook, which requests text and figures when it is displayed."""

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
        """Show the report of a tree."""
        document = document_of(tree)
        text = html(_framed(document), tree)
        with self.lock:
            self.tree, self.document, self._text = tree, document, text
            self.marked = ""
            self.send({"is_new": True})

    def lead_to(self, anchor: str) -> None:
        """Scroll to a row and mark it."""
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
        except Exception as error:  # noqa: BLE001  (a bug: the report stays usable, and the log has the traceback)
            _log.exception("The figure '%s' could not be drawn.", picture.title)
            return {"answer": question, "failure": f"{type(error).__name__}: {error}"}, []
        return {"answer": question, "mime": mime}, [content]


def _framed(document: Document) -> Document:
    """Return the document with a placeholder line for each figure, because figures take time to draw."""
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
