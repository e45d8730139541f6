"""A bokeh figure as a Jupyter widget: offline, in the notebook's theme, and as wide as the page.

If the page has not loaded BokehJS, the kernel sends it. No extension call, no network and no copy of the library in the
notebook is needed. The figure is fetched from the kernel too, so a reloaded page shows its current state, not its state
when the cell ran.
"""

from __future__ import annotations

import gzip
import threading
from contextlib import contextmanager
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import bokeh
import ipywidgets
import traitlets
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.protocol import Protocol
from IPython.display import Image

from workbench.plots.figure_files import bokeh_plot, drawn_backends, fit_script, picture_of
from workbench.widgets.base import THEMES, check_theme, close_tree, enlarge_text
from workbench.widgets.static_picture import StaticPicture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bokeh.document.events import DocumentPatchedEvent
    from bokeh.models import LayoutDOM
    from ipywidgets import DOMWidget


class Figure(anywidget.AnyWidget):
    """A bokeh layout on the page; changes to its models in Python are drawn immediately.

    If the layout belongs to a document, it must be the only root. The lock is held while its models change; pass the
    one that their callbacks hold. ``draw`` returns the static picture for the notebook as PNG.
    """

    _esm = fit_script() + Path(__file__).with_name("figure.js").read_text(encoding="utf-8")
    _css = Path(__file__).with_name("figure.css")
    _is_open = False
    bokeh_version = traitlets.Unicode(bokeh.__version__).tag(sync=True)

    def __init__(
        self, root: LayoutDOM, *, lock: Any = None, draw: Callable[[], bytes] | None = None, **kwargs: Any
    ) -> None:
        self.root = root
        self.document = root.document or Document()
        if root.document is None:
            self.document.add_root(root)
        # JupyterLab may run callbacks in a separate thread, in parallel to the cells.
        self.lock = lock or threading.RLock()
        self._batch: list[DocumentPatchedEvent] | None = None
        self._picture = None if draw is None else StaticPicture(draw, lambda: "A figure of the workbench.")
        super().__init__(**kwargs)
        self.document.on_change_dispatch_to(self)
        self._is_open = True
        self.is_drawn = False
        self._when_drawn: list[Callable[[], None]] = []
        self.on_msg(self._receive)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Send all changes made inside the block as one message, so that the page paints once."""
        with self.lock:
            if self._batch is not None:
                yield
                return
            self._batch = []
            try:
                yield
            finally:
                events, self._batch = self._batch, None
                if events:
                    self._send_patch(events)

    def when_drawn(self, action: Callable[[], None]) -> None:
        """Call an action once a page has drawn the figure."""
        self._when_drawn.append(action)

    def withdraw(self) -> None:
        """Stop following the models, so that another figure can use them; the page keeps what it has drawn."""
        if self._is_open:
            self._is_open = False
            self.document.remove_on_change(self)
            self.document.clear()

    def close(self) -> None:
        """Remove the figure from the page and stop following its models."""
        if self._picture is not None:
            self._picture.close()
        if self._is_open:
            self._is_open = False
            self.document.remove_on_change(self)
        super().close()

    def _ipython_display_(self) -> None:
        if self._picture is not None:
            self._picture.display(self.model_id)

    def _document_patched(self, event: DocumentPatchedEvent) -> None:
        if event.setter is self:
            return
        with self.lock:
            if self._batch is not None:
                self._batch.append(event)
            else:
                self._send_patch([event])

    def _send_patch(self, events: list[DocumentPatchedEvent]) -> None:
        message = Protocol().create("PATCH-DOC", events)
        content = {"patch": message.content_json, "buffers": [buffer.id for buffer in message.buffers]}
        self.send(content, [buffer.to_bytes() for buffer in message.buffers])

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        question = content.get("question")
        if question == "library":
            self.send({"answer": content["id"]}, [_library()])
        elif question == "document":
            with self.lock:
                self.send({"answer": content["id"], "document": serialize_json(self.document.to_json(deferred=False))})
        elif content.get("drawn"):
            with self.lock:
                self.is_drawn = True
                actions, self._when_drawn = self._when_drawn, []
                for action in actions:
                    action()
        elif "changes" in content and self._is_open:
            with self.lock:
                self.document.apply_json_patch({"events": content["changes"]}, setter=self)


def show(figure: Any, *, theme: str = "page") -> DOMWidget | Image:
    """Return a figure as an object that JupyterLab displays as wide as the page.

    The saved notebook keeps a static picture below the live figure.

    Args:
        figure: Figure from a function of ``workbench.plots``, for either backend.
        theme: ``"page"``, or ``"projector"`` for large type.

    Returns:
        A widget (backend bokeh), or an image (backend matplotlib).

    Raises:
        OptionError: If there is no such theme.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> figure = wb.plots.reliability(wb.risk.reliability([0.9, 0.1], [True, False]))
        >>> shown = widgets.show(figure, theme="projector")
        >>> shown.is_drawn
        False
        >>> shown.close()

    See Also:
        `workbench.plots.save`: Writes a figure to a file.
        `workbench.widgets.SpectrumExplorer`: Shows eigenvalues with controls.
    """
    check_theme(theme)
    if drawn_backends(figure) == ["matplotlib"]:
        return Image(picture_of(figure), format="png")
    root = bokeh_plot(figure).state
    enlarge_text(root, theme)
    return Figure(root, draw=partial(picture_of, figure))


@cache
def _library() -> bytes:
    """Return the BokehJS of the installed bokeh, compressed to about 0.3 MB."""
    source = files("bokeh").joinpath("server/static/js/bokeh.min.js").read_bytes()
    return gzip.compress(source, 6)


# A hidden widget is drawn at its final width, but is invisible and takes no height.
_HIDDEN = {"height": "0px", "overflow": "hidden", "visibility": "hidden"}
_SHOWN: dict[str, str | None] = {"height": None, "overflow": "auto hidden", "visibility": None}


class Stage(ipywidgets.VBox):
    """Shows one of several widgets (``shown``), each in a fixed place; switches once the next one has been drawn."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: list[ipywidgets.Box] = []
        self.shown: ipywidgets.Widget | None = None
        self._canvas: Figure | None = None

    def put(
        self, widget: ipywidgets.Widget, canvas: Figure | None = None, *, replaces: ipywidgets.Widget | None = None
    ) -> None:
        """Show a widget, at once if nobody would see it drawn; one that it replaces is closed, any other hidden."""
        before, self.shown, self._canvas = self._canvas, widget, canvas
        self._slot_of(widget)
        if canvas is None or canvas.is_drawn or before is None or not before.is_drawn:
            self._reveal(widget, replaces)
            return
        self.add_class("workbench-busy")
        canvas.when_drawn(lambda: self._reveal(widget, replaces))

    def clear(self) -> None:
        """Close all widgets and show nothing."""
        self.shown = self._canvas = None
        for slot in self._slots:
            for child in slot.children:
                close_tree(child)
            slot.children = ()

    def _slot_of(self, widget: ipywidgets.Widget) -> ipywidgets.Box:
        """Return the slot of a widget, or assign a free or a new one."""
        for slot in self._slots:
            if widget in slot.children:
                return slot
        slot = next((slot for slot in self._slots if not slot.children), None)
        if slot is None:
            slot = ipywidgets.VBox(layout=_HIDDEN)
            self._slots.append(slot)
            self.children = list(self._slots)
        slot.children = [widget]
        return slot

    def _reveal(self, widget: ipywidgets.Widget, replaces: ipywidgets.Widget | None) -> None:
        if self.shown is widget:
            for slot in self._slots:
                slot.layout = ipywidgets.Layout(**(_SHOWN if widget in slot.children else _HIDDEN))
            self.remove_class("workbench-busy")
        if replaces is not None:
            for slot in self._slots:
                if replaces in slot.children:
                    slot.children = ()
            close_tree(replaces)


class FigureStage(Stage):
    """A container for figures of ``workbench.plots`` (``figure``, its widget ``canvas``), shown as in `Stage`."""

    def __init__(self, theme: str) -> None:
        super().__init__()
        self.theme, self.figure = theme, None
        self.canvas: Figure | None = None

    def draw(self, figure: Any, *, min_width: int = 0) -> None:
        """Show another bokeh figure, or nothing for None; on a page narrower than ``min_width`` pixels it scrolls."""
        before, self.figure, self.canvas = self.canvas, figure, None
        if figure is None:
            self.clear()
            return
        canvas: Any = show(figure, theme=self.theme)
        canvas.layout.width, canvas.layout.min_width = "100%", f"{THEMES[self.theme] * min_width:g}px"
        self.canvas = canvas
        self.put(canvas, canvas, replaces=before)
