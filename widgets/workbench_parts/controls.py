"""The list of sources and the box of code on the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.errors import StoreError
from workbench.widgets.workbench_parts.sources import CLOSED, FOLDER, GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from workbench.widgets.workbench_parts.sources import Source

_HERE = Path(__file__).parent


class SourceList(anywidget.AnyWidget):
    """Tick boxes in groups, with a filter and a place to drop files."""

    _esm = _HERE / "source_list.js"
    _css = _HERE / "source_list.css"
    groups = traitlets.List(traitlets.Dict()).tag(sync=True)
    value = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, take_file: Callable[[str, bytes], None], guarded: Callable[..., Any]) -> None:
        super().__init__()
        self._take_file = take_file
        self._slices: dict[str, bytearray] = {}
        run = guarded(self._receive)
        self.on_msg(lambda _, content, buffers: run(content, buffers))

    def fill(self, sources: Iterable[Source], folder: str) -> None:
        """Show these sources."""
        sources = list(sources)
        groups = []
        for title in GROUPS:
            items = [
                {"name": one.name, "text": one.name, "tip": one.tip, "mark": one.mark}
                for one in sources
                if one.group == title
            ]
            if items or title == FOLDER:
                shown = folder if title == FOLDER else title
                groups.append({"title": shown, "isOpen": title not in CLOSED, "items": items})
        if groups != self.groups:
            self.groups = groups

    def _receive(self, content: dict[str, Any], buffers: list[Any]) -> None:
        if "failed" in content:
            raise StoreError(content["failed"])
        if "file" not in content:
            return
        name = Path(content["file"]).name
        if content["start"] == 0:
            self._slices[name] = bytearray()
        self._slices[name] += bytes(buffers[0])
        if content["isLast"]:
            self._take_file(name, bytes(self._slices.pop(name)))


class CodeBox(anywidget.AnyWidget):
    """Lines of Python with a button that copies them.

    Attributes:
        value: The lines; empty for none.
        empty: Text in place of no lines.
    """

    _esm = _HERE / "code_box.js"
    _css = _HERE / "code_box.css"
    value = traitlets.Unicode().tag(sync=True)
    empty = traitlets.Unicode("# The lines that do the same appear with the first view.").tag(sync=True)
