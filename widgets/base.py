"""Base class of all widgets: error line, serialized callbacks, static picture, files with buttons, and cleanup."""

from __future__ import annotations

import functools
import html
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ipywidgets
import xarray as xr

from workbench.errors import OptionError, StoreError, WorkbenchError, require_listed
from workbench.formatting import file_size
from workbench.io.atomic import check_free, replacing
from workbench.io.store import export_netcdf
from workbench.plots.figure_files import picture_of
from workbench.plots.figure_files import save as save_figure
from workbench.widgets.static_picture import Presence, StaticPicture
from workbench.widgets.text_picture import text_picture

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM


#: Theme -> factor of all text sizes.
THEMES = {"page": 1.0, "projector": 1.5}


def check_theme(theme: str) -> None:
    """Raise an exception if a theme does not exist."""
    require_listed("theme", [theme], THEMES)


def enlarge_text(root: LayoutDOM, theme: str) -> None:
    """Scale all text of a bokeh layout to a theme; text that is already scaled stays unchanged."""
    factor = THEMES[theme]
    if factor == 1:
        return
    for model in root.references():
        if theme in model.tags:
            continue
        model.tags = [*model.tags, theme]
        sizes = {name: getattr(model, name) for name in model.properties() if name.endswith("text_font_size")}
        points = {name: size for name, size in sizes.items() if isinstance(size, str) and size.endswith("pt")}
        model.update(**{name: f"{factor * float(size.removesuffix('pt')):g}pt" for name, size in points.items()})


_log = logging.getLogger(__name__)
T = TypeVar("T")
#: Suffix -> label and tooltip of the button that writes such a file.
KINDS = {
    ".png": ("PNG", "The figure as a bitmap with 200 dots per inch"),
    ".svg": ("SVG", "The figure as vector graphics, for print"),
    ".html": ("HTML", "A single page that stays interactive without a kernel and without a network"),
    ".nc": ("netCDF", "All recorded data of the models shown, at all steps, one group per model"),
}


class WorkbenchWidget(ipywidgets.VBox):
    """Base class of the widgets: a column of widgets with a line for errors below.

    JupyterLab may run callbacks in a separate thread, and their exceptions would not be visible. Callbacks registered
    with `_watch`, `_on_click` or `_guarded` run one at a time, and their exceptions are shown under the widget.

    A displayed widget adds a static picture of its state to the cell output, which the saved notebook keeps. Call
    `_settle` after the displayed content has changed.

    Attributes:
        kinds: File suffixes that `save` accepts -> label and tooltip of their buttons.
        export_bar: Controls for writing files.

    Args:
        theme: ``"page"``, or ``"projector"`` for large type.

    Raises:
        OptionError: If there is no such theme.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> widget = widgets.Timeline(wb.open_run(wb.samples.failed_run("hyperparameter")))
        >>> sorted(widget.kinds)
        ['.html', '.nc', '.png', '.svg']
        >>> widget.close()

    See Also:
        `workbench.widgets.show`: Shows a single figure.
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
        self.export_bar = ExportBar(self)
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__([self._presence, self.message], **kwargs)
        self.add_class("workbench-widget")
        if theme != "page":
            self.add_class(f"workbench-{theme}")

    def _fill(self, children: Sequence[ipywidgets.Widget], *, suggested: str | None = None) -> None:
        """Set the children above the line for errors, and with a suggested path also the controls for writing files."""
        if suggested is not None:
            self.export_bar.suggest(suggested)
            children = [*children, self.export_bar]
        self.children = [self._presence, *children, self.message]

    @property
    def summary(self) -> str:
        """The displayed content in one sentence, for programs that show no pictures."""
        return type(self).__name__

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the displayed content as a separate figure, for example for ``workbench.plots.save()``.

        Args:
            backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.
        """
        raise NotImplementedError

    def picture(self) -> bytes:
        """Return the displayed content as PNG."""
        return picture_of(self.figure("matplotlib"))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the displayed content to a file atomically; missing folders are created.

        Args:
            path: File to write. The suffix, one of `kinds`, selects the format. ``.html`` is a single page that stays
                interactive without a kernel and without a network.
            overwrite: Whether to replace an existing file.

        Returns:
            The path.

        Raises:
            StoreError: If the suffix is unknown, the content cannot be written in this format, the file exists, or the
                disk is full.
        """
        with self.turn:
            path = Path(path).expanduser()
            ending = path.suffix.lower()
            if ending not in self.kinds:
                raise StoreError(f"'{path.name}' has the suffix '{ending}', expected one of {', '.join(self.kinds)}.")
            if ending in (refused := self.refused_kinds):
                raise StoreError(refused[ending])
            check_free(path, overwrite=overwrite)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"The folder {path.parent} cannot be created ({error.strerror}); choose another one."
                ) from error
            return self._write(path, ending, overwrite=overwrite)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        return {}

    def page(self) -> str:
        """Return a single HTML page that stays interactive without a kernel and without a network."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Schedule a redraw of the static picture once nothing has changed for a moment; callable from any thread."""
        self.export_bar.offer(self.refused_kinds)
        self._picture.settle()

    @property
    def error(self) -> str:
        """The error shown under the widget; empty if there is none."""
        return self._error

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Hold the lock while the block runs; show its exception under the widget, or clear the line if there is none.

        A control may change another one, whose callbacks then run inside the block; their errors stay on the line.
        """
        with self.turn:
            is_inner, self._is_inside = self._is_inside, True
            self._has_failed = is_inner and self._has_failed
            try:
                yield
            except WorkbenchError as error:
                self._fail(
                    str(error).replace("pass overwrite=True", "tick Overwrite")
                )  # as the box of `ExportBar` says
            except Exception as error:  # noqa: BLE001  (a bug: the widget stays usable, and the log has the traceback)
                _log.exception("A callback of %s failed.", type(self).__name__)
                self._fail(f"{type(error).__name__}: {error}")
            finally:
                self._is_inside = is_inner
            if not self._has_failed:
                self._show("")

    def _guarded(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a function that runs the callback inside `_attempt`."""

        @functools.wraps(callback)  # bokeh checks the signature
        def run(*args: Any) -> None:
            with self._attempt():
                callback(*args)

        return run

    def _watch(self, control: ipywidgets.Widget, callback: Callable[[Any], None], names: str = "value") -> None:
        """Call ``callback(change)`` whenever a control changes, until the widget is closed."""
        run = self._guarded(callback)
        control.observe(run, names)
        self._undo.append(lambda: control.unobserve(run, names))

    def _on_click(self, button: ipywidgets.Button, callback: Callable[[Any], None]) -> None:
        """Call ``callback(button)`` on each click, until the widget is closed."""
        run = self._guarded(callback)
        button.on_click(run)
        self._undo.append(lambda: button.on_click(run, remove=True))

    def _repeat(self, act: Callable[[Any], Any], every: float, *, share: float) -> None:
        """Call ``act(widget)`` regularly in a thread, for at most a share of the time, while the widget exists."""
        arguments = weakref.ref(self), self._is_closed, act, every, share
        self._thread = threading.Thread(target=_repeat, args=arguments, name=type(self).__name__, daemon=True)
        self._thread.start()

    def _at_close(self, action: Callable[[], None]) -> None:
        """Run an action when the widget is closed; actions run in reverse order of registration."""
        self._undo.append(action)

    def close(self) -> None:
        """Stop all callbacks, and remove the widget and its children from the page and the kernel."""
        if not hasattr(self, "_picture"):  # the constructor raised an exception
            return
        self._is_closed.set()
        self._picture.close()
        while self._undo:
            self._undo.pop()()
        for child in (*self.children, self.export_bar):
            close_tree(child)
        super().close()

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        """Write a file of one kind, after all checks."""
        if ending == ".nc":
            return export_runs(self._shown_runs(), path, overwrite=overwrite)
        content = self._content(ending)
        if content is None:
            return save_figure(self.figure("matplotlib"), path, overwrite=overwrite)
        with replacing(path) as place:
            place.write_bytes(content)
        return path

    def _content(self, ending: str) -> bytes | None:
        """Return the content of a file; None for the figure."""
        return self.page().encode() if ending == ".html" else None

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        """Return the runs of a netCDF file by name."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        self._picture.display(self.model_id)

    def _draw_picture(self) -> bytes:
        with self.turn:
            try:
                return self.picture()
            except WorkbenchError as error:  # there is no figure yet
                return text_picture(self.summary, [str(error)])

    def _fail(self, sentence: str) -> None:
        self._has_failed = True
        self._show(sentence)

    def _show(self, sentence: str) -> None:
        self._error = sentence
        style = "color:var(--jp-error-color1,#d32f2f);font-weight:600;line-height:1.5"
        self.message.value = f'<div role="alert" style="{style}">{html.escape(sentence)}</div>' if sentence else ""


def _repeat(
    reference: weakref.ref[Any], is_closed: threading.Event, act: Callable[[Any], Any], every: float, share: float
) -> None:
    pause = every
    while not is_closed.wait(pause):
        widget = reference()
        if widget is None:
            return
        start = time.monotonic()
        try:  # without the lock, because the user's actions must not wait for it
            act(widget)
        except Exception:  # shown under the widget, like an exception of any callback
            with widget._attempt():
                raise
        pause = max(every, (time.monotonic() - start) / share)
        del widget


def close_tree(widget: ipywidgets.Widget) -> None:
    """Close a widget and all its descendants."""
    for child in getattr(widget, "children", ()):
        close_tree(child)
    widget.close()


def known(value: T | None, sentence: str = "There is nothing to show yet.", *, name: str = "data") -> T:
    """Return a value that must not be None; otherwise raise an exception with this sentence."""
    if value is None:
        raise OptionError(sentence)
    return value


def export_runs(runs: Mapping[str, xr.DataTree], path: Path, *, overwrite: bool = False) -> Path:
    """Write several runs to one netCDF file, one group per run; ``wb.open_run(path)[name]`` returns a run."""
    groups = {name.replace("/", "|"): run for name, run in runs.items()}
    if len(groups) < len(runs):
        raise StoreError("Two runs have the same name after their slashes are replaced; rename one of them.")
    return export_netcdf(xr.DataTree(children=groups), path, overwrite=overwrite)


class ExportBar(ipywidgets.VBox):
    """A path, a button for each kind of file, and a line with the last file written."""

    def __init__(self, owner: WorkbenchWidget) -> None:
        self._suggested = ""
        self._owner = owner
        self.path = ipywidgets.Text(
            description="Save as",
            style={"description_width": "64px"},
            layout={"width": "300px", "max_width": "98%"},
            continuous_update=False,
        )
        self.overwrite = ipywidgets.Checkbox(description="Overwrite", tooltip="Replace an existing file", indent=False)
        self.overwrite.layout.width = "auto"
        self.buttons = {
            ending: ipywidgets.Button(description=label, tooltip=tip, layout={"width": "88px"})
            for ending, (label, tip) in owner.kinds.items()
        }
        self.note = ipywidgets.HTML()
        row = ipywidgets.HBox(
            [self.path, *self.buttons.values(), self.overwrite],
            layout={"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px"},
        )
        super().__init__([row, self.note])
        for ending, button in self.buttons.items():
            owner._on_click(button, partial(self._save, ending))

    def suggest(self, path: str) -> None:
        """Put a path into the text field unless the user has entered another one."""
        if self.path.value == self._suggested:
            self.path.value = path
        self._suggested = path

    def offer(self, refused: Mapping[str, str]) -> None:
        """Disable the buttons of these suffixes, with the reason as tooltip, and enable all others."""
        for ending, button in self.buttons.items():
            button.disabled = ending in refused
            button.tooltip = refused.get(ending) or self._owner.kinds[ending][1]

    def _save(self, ending: str, _: Any) -> None:
        self.note.value = ""
        path = Path(self.path.value.strip()).expanduser()
        if not path.name:
            raise StoreError("The file name is empty; enter one, such as exports/figure.")
        if path.suffix.lower() != ending:
            path = path.with_name(path.name + ending)
        path = self._owner.save(path, overwrite=self.overwrite.value)
        said = html.escape(f"Saved {path.resolve()} ({file_size(path.stat().st_size)}).")
        style = "color:var(--jp-ui-font-color2);margin-left:70px;line-height:1.4"
        self.note.value = f'<div role="status" style="{style}">{said}</div>'
