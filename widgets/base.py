"""The base class of all widgets: errors shown under the widget, serialized callbacks, and a complete close()."""

from __future__ import annotations

import functools
import html
import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import ipywidgets

from workbench.errors import OptionError, WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger(__name__)


T = TypeVar("T")


class WorkbenchWidget(ipywidgets.VBox):
    """A column of widgets with a line for errors at its end.

    JupyterLab may run callbacks in a thread of their own, so they take turns, and an exception in one would be seen
    nowhere: both are handled here for every callback that is registered with `watch`, `on_click` or `guarded`.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.turn = threading.RLock()
        self._undo: list[Callable[[], None]] = []
        self._error = ""
        self._is_inside = self._has_failed = False
        self.message = ipywidgets.HTML()
        super().__init__([self.message], **kwargs)
        self.add_class("workbench-widget")

    def fill(self, children: Sequence[ipywidgets.Widget]) -> None:
        """Put the children above the line for errors."""
        self.children = [*children, self.message]

    @property
    def error(self) -> str:
        """The sentence shown under the widget; empty if all is well."""
        return self._error

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the block alone; show its exception under the widget, or clear the line if there is none.

        One control may move another, whose callbacks then run inside: what failed there stays on the line.
        """
        with self.turn:
            is_inner, self._is_inside = self._is_inside, True
            self._has_failed = is_inner and self._has_failed
            try:
                yield
            except WorkbenchError as error:
                self._fail(str(error))
            except Exception as error:  # noqa: BLE001  (a bug of ours: the widget stays usable, the log has the traceback)
                _log.exception("A callback of %s failed.", type(self).__name__)
                self._fail(f"{type(error).__name__}: {error}")
            finally:
                self._is_inside = is_inner
            if not self._has_failed:
                self._show("")

    def guarded(self, callback: Callable[..., None]) -> Callable[..., None]:
        """The callback, run inside `attempt`."""

        @functools.wraps(callback)  # bokeh looks at the signature
        def run(*args: Any) -> None:
            with self.attempt():
                callback(*args)

        return run

    def watch(self, control: ipywidgets.Widget, callback: Callable[[Any], None], names: str = "value") -> None:
        """Call ``callback(change)`` when a control changes, until the widget is closed."""
        run = self.guarded(callback)
        control.observe(run, names)
        self._undo.append(lambda: control.unobserve(run, names))

    def on_click(self, button: ipywidgets.Button, callback: Callable[[Any], None]) -> None:
        """Call ``callback(button)`` at each click, until the widget is closed."""
        run = self.guarded(callback)
        button.on_click(run)
        self._undo.append(lambda: button.on_click(run, remove=True))

    def at_close(self, action: Callable[[], None]) -> None:
        """Run an action when the widget is closed; the last one registered runs first."""
        self._undo.append(action)

    def close(self) -> None:
        """Stop all callbacks and remove the widget, with everything in it, from the page and the kernel."""
        while self._undo:
            self._undo.pop()()
        for child in self.children:
            close_tree(child)
        super().close()

    def _fail(self, sentence: str) -> None:
        self._has_failed = True
        self._show(sentence)

    def _show(self, sentence: str) -> None:
        self._error = sentence
        style = "color:var(--jp-error-color1,#d32f2f);font-weight:600;line-height:1.5"
        self.message.value = f'<div role="alert" style="{style}">{html.escape(sentence)}</div>' if sentence else ""


def close_tree(widget: ipywidgets.Widget) -> None:
    """Close a widget and everything in it."""
    for child in getattr(widget, "children", ()):
        close_tree(child)
    widget.close()


def known(value: T | None, sentence: str = "Nothing is shown yet; call tell() first.") -> T:
    """A value that must exist by now.

    Raises:
        OptionError: If it does not, with the sentence.
    """
    if value is None:
        raise OptionError(sentence)
    return value
