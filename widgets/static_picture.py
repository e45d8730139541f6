"""The picture of a widget that stays in the saved notebook, below the live view, which hides it while it is alive.

JupyterLab always prefers the live view of an output to its other forms, and shows "model not found" without a kernel.
The picture is therefore an output of its own, which any reader of notebooks can show. A few lines of CSS, the first
output, hide the picture where the live view is alive, and the live view where it is not.
"""

from __future__ import annotations

import base64
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

WIDGET = "application/vnd.jupyter.widget-view+json"
#: Seconds after the last change until the picture is drawn again.
_REST = 1.5

# An output whose widget has no model holds text alone. The first output, which holds nothing but this, is hidden too.
_CSS = """<style class="workbench-static">
.jp-OutputArea-child:has(style.workbench-static),
.jp-OutputArea-child:has(style.workbench-static)
  + .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(> .jupyter-widgets > *)),
.jp-OutputArea-child:has(style.workbench-static) + .jp-OutputArea-child:has(.workbench-alive) + .jp-OutputArea-child {
  display: none;
}
.jp-RenderedImage img { max-width: 100%; height: auto; }
</style>"""

_ESM = """
function render({ model, el, signal }) {
  const hear = (content) => el.classList.toggle("workbench-alive", Boolean(content.alive));
  model.on("msg:custom", hear);
  signal.addEventListener("abort", () => model.off("msg:custom", hear));
  try {
    model.send({ here: true });
  } catch { // restored from a saved notebook, without a kernel
    return;
  }
  nameControlsAround(el, signal);
}
export default { render };
"""


# What all widgets share; controls alone are enlarged as a whole, since figures have text sizes of their own.
_WIDGET_CSS = """
.workbench-widget :is(button, input, select, .noUi-handle):focus-visible {
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px;
}
.workbench-projector :is(.widget-inline-hbox, .widget-button, .widget-html, .widget-toggle-buttons, .widget-play,
  .widget-label, .workbench-tags) { zoom: 1.4; }
.workbench-projector .widget-inline-hbox .widget-label { zoom: 1; }
.workbench-busy { cursor: progress; }
"""


class Presence(anywidget.AnyWidget):
    """An invisible part of a live view: it marks the view as alive once the kernel has answered it.

    It also gives names to controls that have none for a screen reader.
    """

    _esm = Path(__file__).with_name("access.js").read_text(encoding="utf-8") + _ESM
    _css = _WIDGET_CSS

    def __init__(self) -> None:
        super().__init__(layout={"display": "none"})
        self.on_msg(lambda _, content, buffers: self.send({"alive": True}) if content.get("here") else None)


class StaticPicture:
    """The picture of one widget in the outputs of its cells.

    Args:
        draw: Returns the present state as PNG; called in turn with nothing, from any thread.
        words: Returns the state in one sentence, for readers that show no pictures.
    """

    def __init__(self, draw: Callable[[], bytes], words: Callable[[], str]) -> None:
        self._draw, self._words = draw, words
        self._drawing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ids: list[str] = []
        self._is_stale = False
        self._shell: Any = None

    def display(self, model_id: str) -> None:
        """Add the live view of a widget and its picture to the outputs of the present cell."""
        from IPython import get_ipython
        from IPython.display import display

        if self._shell is None and (shell := get_ipython()) is not None:
            self._shell = shell
            shell.events.register("post_run_cell", self._after_cell)
        display({"text/html": _CSS, "text/plain": ""}, raw=True)
        display({WIDGET: {"version_major": 2, "version_minor": 0, "model_id": model_id}, "text/plain": ""}, raw=True)
        with self._drawing:
            self._is_stale = False
            # Where it cannot be drawn now, it may be later.
            bundle = self._bundle() or {"text/plain": self._words()}
            self._ids = [*self._ids[-7:], display(bundle, raw=True, display_id=True).display_id]

    def settle(self) -> None:
        """Draw the picture again as soon as nothing has changed for a while, or at the end of the running cell."""
        self._is_stale = True
        if not self._ids:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_REST, self.refresh)
        self._timer.daemon = True
        self._timer.start()

    def refresh(self) -> None:
        """Replace the picture in every output that has it by one of the present state, if it has changed."""
        from IPython.display import update_display

        with self._drawing:
            if not self._ids or not self._is_stale:
                return
            self._is_stale = False
            bundle = self._bundle()
            for display_id in self._ids if bundle is not None else ():
                update_display(bundle, display_id=display_id, raw=True)

    def close(self) -> None:
        """Draw no more; the picture stays where it is."""
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
