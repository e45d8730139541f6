"""The static picture of a widget in a saved notebook, which is hidden while the live view works.

JupyterLab always prefers the live view of an output to its other representations, and shows "model not found" without a
kernel. The picture is therefore a separate output, which every notebook viewer can show. The first output contains CSS
that hides the picture while the live view works, and the live view otherwise.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget

_log = logging.getLogger(__name__)

WIDGET = "application/vnd.jupyter.widget-view+json"
#: Seconds between the last change and the redraw of the picture.
_REST = 1.5

# An output whose widget has no model contains only text. The first output, which contains only this style, is hidden.
_CSS = """<style class="workbench-static">
.jp-OutputArea-child:has(style.workbench-static),
.jp-OutputArea-child:has(style.workbench-static)
  + .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(> .jupyter-widgets > *)),
.jp-OutputArea-child:has(style.workbench-static) + .jp-OutputArea-child:has(.workbench-alive) + .jp-OutputArea-child {
  display: none;
}
.jp-RenderedImage img { max-width: 100%; height: auto; }
</style>"""


class Presence(anywidget.AnyWidget):
    """An invisible part of a live view that marks it as working once the kernel answers, and names its controls."""

    _esm = Path(__file__).with_name("presence.js")
    _css = Path(__file__).with_name("presence.css")

    def __init__(self) -> None:
        super().__init__(layout={"display": "none"})
        self.on_msg(lambda _, content, buffers: self.send({"alive": True}) if content.get("here") else None)


class StaticPicture:
    """The static picture of one widget in the outputs of its cells."""

    def __init__(self, draw: Callable[[], bytes], words: Callable[[], str]) -> None:
        self._draw, self._words = draw, words
        self._drawing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ids: list[str] = []
        self._is_stale = False
        self._shell: Any = None

    def display(self, model_id: str) -> None:
        """Add the live view of a widget and its picture to the outputs of the current cell."""
        from IPython import get_ipython
        from IPython.display import display

        if self._shell is None and (shell := get_ipython()) is not None:
            self._shell = shell
            shell.events.register("post_run_cell", self._after_cell)
        display({"text/html": _CSS, "text/plain": ""}, raw=True)
        display({WIDGET: {"version_major": 2, "version_minor": 0, "model_id": model_id}, "text/plain": ""}, raw=True)
        with self._drawing:
            self._is_stale = False
            # A picture that cannot be drawn yet may be drawn later.
            bundle = self._bundle() or {"text/plain": self._words()}
            self._ids = [*self._ids[-7:], display(bundle, raw=True, display_id=True).display_id]

    def settle(self) -> None:
        """Schedule a redraw once nothing has changed for a while, or at the end of the running cell."""
        self._is_stale = True
        if not self._ids:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_REST, self.refresh)
        self._timer.daemon = True
        self._timer.start()

    def refresh(self) -> None:
        """Redraw the picture in all outputs if the state has changed."""
        from IPython.display import update_display

        with self._drawing:
            if not self._ids or not self._is_stale:
                return
            self._is_stale = False
            bundle = self._bundle()
            for display_id in self._ids if bundle is not None else ():
                update_display(bundle, display_id=display_id, raw=True)

    def close(self) -> None:
        """Stop redrawing; the picture stays in the outputs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None
        self._ids = []

    def _after_cell(self, *_: Any) -> None:
        self.refresh()

    def _bundle(self) -> dict[str, Any] | None:
        try:
            picture = base64.b64encode(self._draw()).decode()
        except Exception:  # noqa: BLE001  (the live view is more important than its picture)
            _log.exception("The picture of a widget could not be drawn.")
            return None
        return {"image/png": picture, "text/plain": self._words()}
