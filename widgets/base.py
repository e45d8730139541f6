"""The base class of all widgets: errors shown under it, callbacks in turn, a picture that stays, a complete close()."""

from __future__ import annotations

import functools
import html
import logging
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ipywidgets

from workbench.errors import OptionError, StoreError, WorkbenchError
from workbench.io.atomic import check_free, replacing
from workbench.plots.figure_files import picture_of
from workbench.plots.figure_files import save as save_figure
from workbench.widgets.files import KINDS, ending_of, make_folder
from workbench.widgets.static_picture import Presence, StaticPicture
from workbench.widgets.text_picture import text_picture
from workbench.widgets.theme import check_theme

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

_log = logging.getLogger(__name__)


T = TypeVar("T")


class WorkbenchWidget(ipywidgets.VBox):
    """A column of widgets with a line for errors at its end.

    JupyterLab may run callbacks in a thread of their own, so they take turns, and an exception in one would be seen
    nowhere: both are handled here for every callback that is registered with `watch`, `on_click` or `guarded`.

    Displayed in a notebook, a widget leaves a picture of its state below, which the saved notebook keeps; call `settle`
    when what is shown has changed.

    Attributes:
        kinds: Endings of the files that `save` writes, with label and tip of their buttons.

    Args:
        theme: ``"page"``, or ``"projector"`` for large type.

    Raises:
        OptionError: If there is no such theme.
    """

    kinds: Mapping[str, tuple[str, str]] = {ending: KINDS[ending] for ending in (".png", ".svg", ".html")}

    def __init__(self, *, theme: str = "page", **kwargs: Any) -> None:
        check_theme(theme)
        self.theme = theme
        self.turn = threading.RLock()
        self._undo: list[Callable[[], None]] = []
        self._error = ""
        self._is_inside = self._has_failed = False
        self.message = ipywidgets.HTML()
        self._presence = Presence()
        self._picture = StaticPicture(self._draw_picture, lambda: self.summary)
        super().__init__([self._presence, self.message], **kwargs)
        self.add_class("workbench-widget")
        if theme != "page":
            self.add_class(f"workbench-{theme}")

    def fill(self, children: Sequence[ipywidgets.Widget]) -> None:
        """Put the children above the line for errors."""
        self.children = [self._presence, *children, self.message]

    @property
    def summary(self) -> str:
        """What is shown, in one sentence; for readers that show no pictures."""
        return type(self).__name__

    def figure(self, backend: str = "bokeh") -> Any:
        """What is shown as a figure of its own, to keep or to write with ``workbench.plots.save()``."""
        raise NotImplementedError

    def picture(self) -> bytes:
        """What is shown, as PNG."""
        return picture_of(self.figure("matplotlib"))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write what is shown to a file, completely or not at all; its folder is made.

        Args:
            path: Path of the file; its ending, one of `kinds`, decides what is written. ``.html`` is one page that
                stays interactive, without a kernel and without a network.
            overwrite: Whether to replace an existing file.

        Returns:
            The path.

        Raises:
            StoreError: If the ending is unknown, what is shown has no such file, the file exists, or the disk is full.
        """
        with self.turn:
            path = Path(path).expanduser()
            ending = ending_of(path, self.kinds)
            if ending in self.refused_kinds:
                raise StoreError(self.refused_kinds[ending])
            check_free(path, overwrite=overwrite)
            make_folder(path)
            return self._write(path, ending, overwrite=overwrite)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written of what is shown, and why."""
        return {}

    def page(self) -> str:
        """What is shown as one HTML page that stays interactive, without a kernel and without a network."""
        raise NotImplementedError

    def settle(self) -> None:
        """Draw the picture in the notebook again, once nothing has changed for a moment; from any thread."""
        self._picture.settle()

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
        if not hasattr(self, "_picture"):  # it was refused as it was made
            return
        self._picture.close()
        while self._undo:
            self._undo.pop()()
        for child in self.children:
            close_tree(child)
        super().close()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        """Write one of the kinds of files; all checks are done."""
        if ending != ".html":
            return save_figure(self.figure("matplotlib"), path, overwrite=overwrite)
        content = self.page()
        with replacing(path) as partial:
            partial.write_text(content, encoding="utf-8")
        return path

    def _ipython_display_(self) -> None:
        self._picture.display(self.model_id)

    def _draw_picture(self) -> bytes:
        with self.turn:
            try:
                return self.picture()
            except WorkbenchError as error:  # there is nothing to draw yet
                return text_picture(self.summary, [str(error)])

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
