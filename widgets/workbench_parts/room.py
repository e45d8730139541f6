"""The controls of the workbench and their places: the list of sources, the box of code, and the places of the views."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from workbench.errors import StoreError
from workbench.widgets.base import close_tree
from workbench.widgets.tables import Tags
from workbench.widgets.workbench_parts.sources import CLOSED, FOLDER, GROUPS, Source
from workbench.widgets.workbench_parts.views import VIEWS

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
    """Lines of Python with a button that copies them, or a text in place of no lines."""

    _esm = _HERE / "code_box.js"
    _css = _HERE / "code_box.css"
    value = traitlets.Unicode().tag(sync=True)
    empty = traitlets.Unicode("# The lines that do the same appear with the first view.").tag(sync=True)


#: Minimum width of a view in pixels; on a narrower page they are one below the other.
_LEAST = 480
_CSS = Path(__file__).with_name("room.css").read_text(encoding="utf-8")


class Frame:
    """The place of a view, with a remark; ``content`` is its widget, None for none."""

    def __init__(self, title: str) -> None:
        heading = ipywidgets.HTML(f'<div class="workbench-room-heading" role="heading" aria-level="3">{title}</div>')
        self._remark = ipywidgets.HTML()
        self._body = ipywidgets.VBox(layout={"min_width": "0", "overflow": "auto hidden"})
        self.box = ipywidgets.VBox([heading, self._remark, self._body], layout={"min_width": "0", "overflow": "hidden"})
        self.box.add_class("workbench-room-frame")
        self.content: Any = None

    def show(self, widget: Any, remark: str) -> None:
        """Show a widget, or nothing if it is None, and a remark."""
        self._remark.value = f'<div class="workbench-room-remark">{html.escape(remark)}</div>' if remark else ""
        if widget is not self.content:
            self.content = widget
            self._body.children = [] if widget is None else [widget]

    @property
    def remark(self) -> str:
        """The remark as HTML."""
        return self._remark.value


class Room:
    """All controls: the list of sources on the left, and the views on the right."""

    def __init__(
        self, take_file: Callable[[str, bytes], None], guarded: Callable[..., Any], doing: ipywidgets.Box, folder: Path
    ) -> None:
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 8px"}
        self.sources = SourceList(take_file, guarded)
        self.path = ipywidgets.Text(
            placeholder="Path or name to open", continuous_update=False,
            layout={"flex": "1 1 120px", "width": "auto", "min_width": "0"},
            tooltip="A run, log, sweep, checkpoint, design or plan; press Enter to open it",
        )  # fmt: skip
        self.rescan = ipywidgets.Button(
            description="Search again", tooltip=f"Search {folder} for runs, checkpoints and sweeps",
            layout={"flex": "0 0 auto", "width": "auto"},
        )  # fmt: skip
        self.note = ipywidgets.HTML()
        self.go_on = ipywidgets.Button(
            description="Continue", tooltip="Compute what is missing", layout={"width": "100px", "display": "none"}
        )
        doing.layout = row
        opening = ipywidgets.HBox([self.path, self.rescan], layout=row)
        left = ipywidgets.VBox(
            [self.sources, opening, self.note, doing, self.go_on], layout={"flex": "1 1 230px", "min_width": "0"}
        )
        options = [{"name": name, "text": name, "tip": view.tip} for name, view in VIEWS.items()]
        self.tags = Tags(label="views", options=options, value=[options[0]["name"]])
        self.side_by_side = ipywidgets.Checkbox(
            True, description="Side by side", indent=False, layout={"width": "auto"},
            tooltip="Place the views beside each other if the page is wide enough",
        )  # fmt: skip
        self.code = CodeBox()
        self.frames = {name: Frame(name) for name in VIEWS}
        self._order: list[str] = []
        self._grid = ipywidgets.GridBox(layout={"grid_gap": "8px", "min_width": "0"})
        right = ipywidgets.VBox(
            [ipywidgets.HBox([self.tags, self.side_by_side], layout=row), self.code, self._grid],
            layout={"flex": "1000 1 600px", "min_width": "0", "grid_gap": "6px"},
        )
        look = ipywidgets.HTML(f"<style>{_CSS}</style>", layout={"display": "none"})
        self.box = ipywidgets.HBox([look, left, right], layout={"flex_flow": "row wrap", "grid_gap": "8px 12px"})
        self.box.add_class("workbench-room")

    @property
    def shown(self) -> list[str]:
        """Names of the visible views: those that were switched on last are the first, where the user sees them."""
        new = [name for name in self.tags.value if name not in self._order]
        self._order = [*new, *(name for name in self._order if name in self.tags.value)]
        return list(self._order)

    @shown.setter
    def shown(self, names: Sequence[str]) -> None:
        self._order = list(names)
        self.tags.choose(names)

    def arrange(self) -> None:
        """Place the frames of the visible views."""
        boxes = tuple(self.frames[name].box for name in self.shown)
        is_wide = self.side_by_side.value and len(boxes) > 1
        columns = f"repeat(auto-fit, minmax(min({_LEAST}px, 100%), 1fr))" if is_wide else "minmax(0, 1fr)"
        self._grid.layout.grid_template_columns = columns
        if self._grid.children != boxes:
            self._grid.children = boxes

    def close(self) -> None:
        """Close the frames that are not on the page; those on the page are closed with it."""
        for frame in self.frames.values():
            if frame.box not in self._grid.children:
                close_tree(frame.box)
