"""Containers that show one widget or figure at a time, and replace it only after the next one has been drawn."""

from __future__ import annotations

from typing import Any

import ipywidgets

from workbench.widgets.base import close_tree
from workbench.widgets.figure import Figure, show
from workbench.widgets.theme import THEMES

# A hidden widget is drawn at its final width, but is invisible and takes no height.
_HIDDEN = {"height": "0px", "overflow": "hidden", "visibility": "hidden"}
_SHOWN: dict[str, str | None] = {"height": None, "overflow": "auto hidden", "visibility": None}


class Stage(ipywidgets.VBox):
    """A container that shows one of several widgets, and switches to another once its figure has been drawn.

    Each widget has a slot with a fixed place, because the page redraws all children that follow a removed one.

    Attributes:
        shown: The widget that is shown, or will be shown once drawn; None if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slots: list[ipywidgets.Box] = []
        self.shown: ipywidgets.Widget | None = None
        self._canvas: Figure | None = None

    def put(
        self, widget: ipywidgets.Widget, canvas: Figure | None = None, *, replaces: ipywidgets.Widget | None = None
    ) -> None:
        """Show a widget: immediately if it is drawn or has no figure, or if no page shows the current one.

        Args:
            widget: The widget; one that was shown before is still drawn.
            canvas: The figure in it, or the widget itself; None if it has no figure.
            replaces: Widget to close when this one is shown; None keeps the current one, hidden.
        """
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
    """A container for figures of ``workbench.plots``; each stays until the next one has been drawn.

    Attributes:
        figure: The figure that is shown, or will be shown once drawn; None if there is none.
        canvas: The widget of the figure.
    """

    def __init__(self, theme: str) -> None:
        super().__init__()
        self.theme, self.figure = theme, None
        self.canvas: Figure | None = None

    def draw(self, figure: Any, *, min_width: int = 0) -> None:
        """Show another figure.

        Args:
            figure: A figure for the backend bokeh; None to show nothing.
            min_width: Minimum width in pixels that its text needs; on a narrower page the figure scrolls.
        """
        before, self.figure, self.canvas = self.canvas, figure, None
        if figure is None:
            self.clear()
            return
        canvas: Any = show(figure, theme=self.theme)
        canvas.layout.width, canvas.layout.min_width = "100%", f"{THEMES[self.theme] * min_width:g}px"
        self.canvas = canvas
        self.put(canvas, canvas, replaces=before)
