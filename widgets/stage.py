"""Places for one widget or figure at a time: it stays until the next one has been drawn, so that no page goes blank."""

from __future__ import annotations

from typing import Any

import ipywidgets

from workbench.widgets.base import close_tree
from workbench.widgets.figure import Figure, show
from workbench.widgets.theme import THEMES

# Drawn as wide as it will be, but neither seen nor taking any height.
_HIDDEN = {"height": "0px", "overflow": "hidden", "visibility": "hidden"}
_SHOWN: dict[str, str | None] = {"height": None, "overflow": "auto hidden", "visibility": None}


class Stage(ipywidgets.VBox):
    """Shows one of several widgets, and changes to another when the figure in it has been drawn.

    Each has a slot of its own, which keeps its place: a page draws all children anew that follow a removed one.

    Attributes:
        shown: The widget that is shown, or will be as soon as it is drawn; None: none yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slots: list[ipywidgets.Box] = []
        self.shown: ipywidgets.Widget | None = None
        self._canvas: Figure | None = None

    def put(
        self, widget: ipywidgets.Widget, canvas: Figure | None = None, *, replaces: ipywidgets.Widget | None = None
    ) -> None:
        """Show a widget; at once where it is drawn already, has no figure, or no page shows the present one.

        Args:
            widget: The widget; one that was here before is still drawn.
            canvas: The figure in it, or the widget itself; None: it has none.
            replaces: Widget that is closed when this one is shown; None: the present one is kept, out of sight.
        """
        before, self.shown, self._canvas = self._canvas, widget, canvas
        self._slot_of(widget)
        if canvas is None or canvas.is_drawn or before is None or not before.is_drawn:
            self._reveal(widget, replaces)
            return
        self.add_class("workbench-busy")
        canvas.when_drawn(lambda: self._reveal(widget, replaces))

    def clear(self) -> None:
        """Close everything, and show nothing."""
        self.shown = self._canvas = None
        for slot in self._slots:
            for child in slot.children:
                close_tree(child)
            slot.children = ()

    def _slot_of(self, widget: ipywidgets.Widget) -> ipywidgets.Box:
        """The slot of a widget; a free one, or one more, if it has none."""
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
    """Shows a figure of ``workbench.plots``; each stays until the next one has been drawn.

    Args:
        theme: Theme of the figures.

    Attributes:
        figure: The figure that is shown, or will be as soon as it is drawn; None: none.
        canvas: The same on the page.
    """

    def __init__(self, theme: str) -> None:
        super().__init__()
        self.theme, self.figure = theme, None
        self.canvas: Figure | None = None

    def draw(self, figure: Any, *, min_width: int = 0) -> None:
        """Show another figure; None: nothing.

        Args:
            figure: The figure, of backend bokeh.
            min_width: Width in pixels below which its text would have no room; it scrolls on a narrower page.
        """
        before, self.figure, self.canvas = self.canvas, figure, None
        if figure is None:
            self.clear()
            return
        canvas: Any = show(figure, theme=self.theme)
        canvas.layout.width, canvas.layout.min_width = "100%", f"{THEMES[self.theme] * min_width:g}px"
        self.canvas = canvas
        self.put(canvas, canvas, replaces=before)
