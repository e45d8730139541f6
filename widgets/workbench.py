"""One widget over all others: tick samples, checkpoints, runs and sweeps, and see views of them side by side."""

from __future__ import annotations

import html
import io
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from workbench.errors import StoreError, WorkbenchError, require_listed
from workbench.formatting import listed
from workbench.plots.figure_files import small_png
from workbench.widgets.base import WorkbenchWidget, known
from workbench.widgets.live import cells
from workbench.widgets.live_training import LiveTraining
from workbench.widgets.tables import MUTED
from workbench.widgets.text_picture import text_picture
from workbench.widgets.workbench_parts.calls import LibraryCall, Results, count_uses, statements, unused
from workbench.widgets.workbench_parts.room import Room
from workbench.widgets.workbench_parts.sources import FOLDER, FoundSources, Source, search, shipped, source_of
from workbench.widgets.workbench_parts.views import VIEWS, View, ViewPlan, compute, made_widget, plan_of
from workbench.widgets.worker import MeasuringWidget

#: Seconds between two looks at the controls of the views, and between two searches of the folder.
_EVERY, _SEARCH_EVERY = 1.0, 5.0
#: Maximum fraction of the time spent on searches.
_SHARE = 0.03
#: Maximum number of widgets that are kept after other sources were ticked.
_MOST_KEPT = 8
#: Folder for dropped files, below the folder of the list.
_DROPPED = "dropped"
_KINDS = {
    ".py": ("Python", "The lines that make these views"),
    ".html": ("HTML", "All views as one page that stays interactive without a kernel and without a network"),
    ".png": ("PNG", "All views as a picture"),
}


class Workbench(MeasuringWidget):
    """All widgets in one: a list of sources with tick boxes on the left, and views of what is ticked on the right.

    Sources are the samples, small and published designs, recorded runs and sweeps, and the runs, logs, sweeps,
    checkpoints and plans of a folder. Others are opened by path or name, or dropped on the list. Runs that are being
    written are marked as live. The views are the other widgets, made from what is ticked; several are shown side by
    side. What takes time runs in the background, with its progress and a Stop button, and is computed only once.

    The lines of Python below the buttons do the same as the widget: they make the visible views, and bring their
    controls into the present state.

    Args:
        folder: Folder that is searched for sources; None for the current one. The search is short and not deep.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        folder: The folder.
        views: The widgets of the visible views, by name of the view.

    Raises:
        StoreError: If there is no such folder.
        OptionError: If there is no such theme.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> bench = widgets.Workbench()
        >>> bench.ticked = ["Pre-LN", "Mamba"]
        >>> bench.shown = ["compare"]
        >>> bench.wait()
        >>> bench.summary
        'Workbench with Pre-LN and Mamba: compare.'
        >>> bench.code.splitlines()[-1]
        'comparison'
        >>> bench.close()

    See Also:
        `workbench.widgets.SpectrumExplorer`: One of the views.
        `workbench.samples`: The samples.
    """

    kinds = _KINDS

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, theme: str = "page") -> None:
        super().__init__(theme=theme)
        self.folder = Path(folder if folder is not None else ".").expanduser().absolute()
        if not self.folder.is_dir():
            raise StoreError(f"There is no folder {self.folder}; check the path.")
        self._results = Results()
        self._catalogue = SourceCatalogue()
        self._made: dict[tuple[str, LibraryCall], MadeView] = {}
        self._refused: dict[Any, str] = {}
        self._visible: dict[str, MadeView] = {}
        self._last: dict[str, MadeView] = {}
        self._plans: dict[str, ViewPlan] = {}
        self._job: set[str] = set()
        self._is_held = self._is_paused = False
        self._room = Room(self._take_file, self._guarded, self._doing, self.folder)
        self._fill([self._room.box], suggested="exports/workbench")
        self._catalogue.update(search(self.folder))
        self._fill_list()
        self._watch(self._room.sources, lambda _: self._choose())
        self._watch(self._room.tags, lambda _: self._choose())
        self._watch(self._room.side_by_side, lambda _: self._room.arrange())
        self._watch(self._room.path, lambda _: self._open_field())
        self._on_click(self._room.rescan, lambda _: self.rescan())
        self._on_click(self._room.go_on, lambda _: self._choose())
        cells.succeed(self, self.folder / f"workbench {id(self)}")  # a name that no other widget uses
        with self._attempt():
            self._choose()
        self._next_search = time.monotonic() + _SEARCH_EVERY
        self._repeat(Workbench._follow, _EVERY, share=1.0)

    @property
    def sources(self) -> list[str]:
        """Names of all sources in the list."""
        return list(self._catalogue.sources)

    @property
    def ticked(self) -> list[str]:
        """Names of the ticked sources, in the order in which they were ticked; can be set."""
        return [name for name in self._room.sources.value if name in self._catalogue.sources]

    @ticked.setter
    def ticked(self, names: str | Iterable[str]) -> None:
        names = [names] if isinstance(names, str) else list(names)
        require_listed("ticked", names, self._catalogue.sources, remedy="add others with add()")
        self._room.sources.value = names

    @property
    def shown(self) -> list[str]:
        """Names of the visible views, in their order; can be set. A view that is switched on becomes the first."""
        return self._room.shown

    @shown.setter
    def shown(self, names: str | Iterable[str]) -> None:
        self._room.shown = [names] if isinstance(names, str) else list(names)
        self._choose()

    @property
    def views(self) -> dict[str, Any]:
        """The widgets of the visible views, by name of the view."""
        return {name: made.widget for name, made in self._visible.items()}

    @property
    def code(self) -> str:
        """Lines of Python that make the visible views; empty if none shows a widget."""
        return code_of(self._visible.values())

    @property
    def summary(self) -> str:
        """What is ticked, and the views, in one sentence."""
        if not self.ticked:
            return "Workbench, in which nothing is ticked."
        return f"Workbench with {listed(self.ticked)}: {listed(self.shown) or 'no view'}."

    def add(self, source: str | os.PathLike[str]) -> str:
        """Add a file, folder or name to the list, and tick it.

        Args:
            source: Path of a run, log, sweep, checkpoint, design or plan; name of a source in the list; or name of a
                checkpoint on the hub.

        Returns:
            Its name in the list.

        Raises:
            StoreError: If there is no such path, or it is none of these.
        """
        name = self._catalogue.add(source_of(os.fspath(source), self.folder))
        self._fill_list()
        if name not in self._room.sources.value:
            self._room.sources.value = [*self._room.sources.value, name]
        return name

    def rescan(self) -> None:
        """Search the folder for sources again, and try again to open those that could not be read."""
        with self.turn:
            self._results.forget_failures()
            for source in self._catalogue.sources.values():
                if source.mark:  # a run that was being written
                    self._results.forget(source.value)
            self._catalogue.update(search(self.folder))
            self._fill_list()
            self._choose()

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the first visible view as a separate figure.

        Raises:
            OptionError: If no view shows a widget, or this one has no figure.
        """
        first = next(iter(self.views.values()), None)
        return known(first, "No view shows anything yet; tick a source.", name="ticked").figure(backend)

    def picture(self) -> bytes:
        """Return all visible views as PNG, from top to bottom."""
        remarks = [f"{name}: {self._plans[name].remark}" for name in self.shown if self._plans[name].remark]
        return picture_with(self.summary, remarks, self.views)

    def page(self) -> str:
        """Return all visible views and their code as one HTML page that needs no network."""
        return page_of(self.summary, self.views, self.code)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        return {} if self._visible else dict.fromkeys((".py", ".html"), "No view shows anything yet; tick a source.")

    def close(self) -> None:
        """Remove the widget and all views, visible or not; training and measurements in them end."""
        if hasattr(self, "_made"):
            self._is_closed.set()
            cells.forget(self)
            self._drop()
            for made in self._made.values():
                made.widget.close()
            self._room.close()
        super().close()

    def _retire(self, reason: str) -> None:
        """End what runs, because its cell was run again."""
        self._is_closed.set()
        self.stop()
        for made in self._made.values():
            if isinstance(made.widget, LiveTraining):
                made.widget._retire(reason)
            else:
                made.widget.close()

    def _content(self, ending: str) -> bytes | None:
        if ending == ".py":
            return f"{self.code}\n".encode()
        return self.picture() if ending == ".png" else super()._content(ending)

    def _draw_picture(self) -> bytes:
        return self.picture()  # without the lock, so that the user need not wait for it

    def _open_field(self) -> None:
        """Open what the user has entered."""
        if self._room.path.value.strip():
            self.add(self._room.path.value)
            self._room.path.value = ""

    def _take_file(self, name: str, content: bytes) -> None:
        """Save a dropped file in the folder, and open it."""
        folder = self.folder / _DROPPED
        folder.mkdir(exist_ok=True)
        path, number = folder / name, 2
        while path.exists() and path.read_bytes() != content:
            path, number = folder / f"{number} {name}", number + 1
        path.write_bytes(content)
        self.add(path)

    def _fill_list(self) -> None:
        """Show the sources, and remove the ticks of those that are gone."""
        self._room.sources.fill(self._catalogue.sources.values(), f"Folder {self.folder.name}".strip())
        if self.ticked != self._room.sources.value:
            self._room.sources.value = self.ticked
        note = "" if self._catalogue.is_complete else "Not the whole folder was searched; open others by their path."
        self._room.note.value = f'<div style="{MUTED}">{note}</div>' if note else ""

    def _choose(self) -> None:
        """Show what is ticked, and compute what is missing."""
        self._is_paused = False
        self._update()

    def _update(self) -> None:
        """Show what is available, and start to compute what is missing unless this was stopped."""
        ticked = [self._catalogue.sources[name] for name in self.ticked]
        self._plans = {name: plan_of(VIEWS[name], ticked, self._results, self.theme) for name in self.shown}
        missing = [name for name, plan in self._plans.items() if plan.waits or self._is_unmade(name, plan.call)]
        if not missing or not self._job <= set(missing):
            self._drop()
            self._job = set()
            self._end("")
        if missing and not self._job and not self._is_paused:
            self._job = set(missing)
            shares = {source.name: 1.0 for name in missing for source in VIEWS[name].chosen(ticked)}
            self._begin("Computing", lambda check, tell: self._prepare(missing, ticked, tell), shares)
        self._room.go_on.layout.display = None if missing and self._is_paused else "none"
        self._show_views()

    def _prepare(self, names: Sequence[str], ticked: Sequence[Source], tell: Callable[[str], None]) -> None:
        """Compute what views need and make their widgets, without the lock; each is shown once it is ready."""
        for name in names:
            view = VIEWS[name]
            compute(view, ticked, self._results, tell)
            call = plan_of(view, ticked, self._results, self.theme).call
            if self._is_unmade(name, call):
                assert call is not None
                try:
                    widget = made_widget(call, self._results)
                except WorkbenchError as error:
                    self._refused[name, call] = str(error)
                else:
                    self._made[name, call] = MadeView(view, call, widget, view.state(widget))
            with self.turn:
                tell(f"{name}: ready")  # ends here if it was dropped meanwhile
                self._job.discard(name)
                self._update()

    def _is_unmade(self, name: str, call: LibraryCall | None) -> bool:
        return call is not None and (name, call) not in self._made and (name, call) not in self._refused

    def _show_views(self) -> None:
        """Show the widgets of the plans, each with a remark."""
        visible: dict[str, MadeView] = {}
        self._is_held = False
        for name, (call, remark, waits) in self._plans.items():
            present = self._visible.get(name)
            key = None if call is None else (name, call)
            busy = self._last.get(name)
            made = self._made.get(key) if key else None
            if busy is not None and busy is not made and busy.view.stays and busy.view.is_busy(busy.widget):
                made, self._is_held = busy, True
                remark = "This continues until it ends or is stopped; then what is ticked is shown."
            elif key in self._refused:
                remark = self._refused[key]
            elif made is None and (waits or call is not None):
                made = present if self.ticked else None  # until the next one is ready
                remark = "Stopped; press Continue." if self._is_paused else "Being computed …"
            self._room.frames[name].show(None if made is None else made.widget, remark)
            if made is not None:
                visible[name] = self._last[name] = made
                self._made[name, made.call] = self._made.pop((name, made.call), made)  # the last one
        self._visible = visible
        for made in visible.values():  # of several views, only the common menu is shown
            made.widget.export_bar.layout.display = "none" if len(visible) > 1 else None
        self._room.arrange()
        self._drop_old()
        self._room.code.value = self.code
        self._settle()

    def _drop_old(self) -> None:
        """Close the widgets that were not visible for the longest time."""
        for key, made in list(self._made.items())[:-_MOST_KEPT]:
            if all(made is not one for one in self._visible.values()) and not made.view.is_busy(made.widget):
                del self._made[key]
                self._last = {name: one for name, one in self._last.items() if one is not made}
                made.widget.close()

    def _take(self, found: Any) -> None:
        """Show the computed results, and continue with what was ticked meanwhile."""
        self._job = set()
        self._update()

    def _show_end(self) -> None:
        """Offer to continue after a stop."""
        if self._progress is None and self._job:
            self._job, self._is_paused = set(), True
            self._update()

    def _follow(self, *, looks: bool | None = None) -> None:
        """Update the code, and from time to time or if requested the list; called regularly."""
        start = time.monotonic()
        looks = start > self._next_search if looks is None else looks
        if (code := self.code) != self._room.code.value:
            self._room.code.value = code
            self._settle()
        if (progress := self._progress) is not None:
            self._say(progress, progress.html())  # the elapsed time
        found = search(self.folder) if looks else None  # without the lock, so that the user need not wait for it
        if found is not None or self._is_held:
            with self.turn:
                if found is not None:
                    self._catalogue.update(found)
                    self._fill_list()
                if self._is_held and not any(made.view.is_busy(made.widget) for made in self._visible.values()):
                    self._update()
        if looks:
            now = time.monotonic()
            self._next_search = now + max(_SEARCH_EVERY, (now - start) / _SHARE)


@dataclass(frozen=True)
class MadeView:
    """A widget that a view made."""

    view: View
    call: LibraryCall
    widget: Any
    before: dict[str, Any]


def code_of(visible: Iterable[MadeView]) -> str:
    """Return the code that makes these widgets and brings their controls into their present state."""
    visible = list(visible)
    if not visible:
        return ""
    counts: dict[Any, int] = {}
    for made in visible:
        for part in made.call.parts:
            count_uses(part, counts)
    names: dict[Any, str] = {}
    lines: list[str] = []
    for made in visible:
        text = made.call.code([statements(part, names, lines, counts) for part in made.call.parts])
        names[made.call] = variable = unused(made.call.variable, names.values())
        lines += [f"{variable} = {text}", *made.view.changes(made.widget, variable, made.before)]
    shown = [names[made.call] for made in visible]
    lines.append(shown[0] if len(shown) == 1 else f"display({', '.join(shown)})")
    return "\n".join([*_imports(visible, lines), "", *lines])


def _imports(visible: list[MadeView], lines: list[str]) -> list[str]:
    text = "\n".join(lines)
    found = ["import workbench as wb"] if "wb." in text else []
    if "xr." in text:
        found.insert(0, "import xarray as xr")
    if len(visible) > 1:
        found.insert(0, "from IPython.display import display")
    functions = sorted({made.call.function for made in visible}, key=str.lower)
    return [*found, f"from workbench.widgets import {', '.join(functions)}"]


class SourceCatalogue:
    """The sources of the list."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {source.name: source for source in shipped()}
        self.is_complete = True
        self._opened: list[Source] = []

    def update(self, found: FoundSources) -> None:
        """Replace the sources of the folder; after an incomplete search, earlier ones that still exist are kept."""
        sources = {source.name: source for source in (*self._opened, *shipped())}
        paths = {source.path for source in self._opened}
        in_folder = {source.path: source for source in found.sources if source.path not in paths}
        if not found.is_complete:
            before = {one.path: one for one in self.sources.values() if one.group == FOLDER and one.path not in paths}
            in_folder |= {path: one for path, one in before.items() if path not in in_folder and path and path.exists()}
        for source in in_folder.values():
            name = source.name
            while name in sources:
                name = f"./{name}"
            sources[name] = replace(source, name=name)
        self.sources, self.is_complete = sources, found.is_complete

    def add(self, source: Source) -> str:
        """Add a source unless it is there, and return its name."""
        for name, other in self.sources.items():
            if source.value == other.value or (source.path is not None and source.path == other.path):
                return name
        name = source.name
        while name in self.sources:
            name = f"{name}, opened"
        source = replace(source, name=name)
        self._opened.append(source)
        self.sources = {name: source, **self.sources}
        return name


#: Each view is a page of its own in a frame, so that their scripts and styles do not affect each other.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 12px 16px; }}
h1 {{ font-size: 1.3em; margin: 0 0 .5em; }}
h2 {{ font-size: 1.1em; margin: .8em 0 .3em; }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(620px, 100%), 1fr)); gap: 12px; }}
section {{ min-width: 0; }}
iframe {{ width: 100%; height: 640px; border: 1px solid #8888; border-radius: 4px; background: Canvas; }}
pre {{ overflow: auto; padding: 8px 10px; border: 1px solid #8888; border-radius: 4px; }}
</style></head>
<body><h1>{title}</h1><main>{views}</main><h2>The same in Python</h2><pre tabindex="0">{code}</pre>
<script>
for (const frame of document.querySelectorAll("iframe")) {{
  const fit = () => {{
    const {{ scrollHeight }} = frame.contentDocument.documentElement;
    if (scrollHeight > frame.clientHeight) frame.style.height = `${{Math.min(scrollHeight + 4, 1600)}}px`;
  }};
  frame.addEventListener("load", () => {{ fit(); setTimeout(fit, 1500); }});
}}
</script></body></html>
"""


def page_of(title: str, views: Mapping[str, WorkbenchWidget], code: str) -> str:
    """Return one HTML page of several widgets, each interactive, and the code that makes them."""
    parts = []
    for name, widget in views.items():
        try:
            content = widget.page()
        except WorkbenchError as error:  # nothing to save yet
            content = f"<p>{html.escape(str(error))}</p>"
        parts.append(
            f'<section><h2>{html.escape(name)}</h2><iframe title="{html.escape(name)}" '
            f'srcdoc="{html.escape(content, quote=True)}"></iframe></section>'
        )
    return _PAGE.format(title=html.escape(title), views="".join(parts), code=html.escape(code))


def picture_with(title: str, lines: list[str], views: Mapping[str, WorkbenchWidget]) -> bytes:
    """Return a PNG of a title, lines of text, and the pictures of several widgets from top to bottom."""
    pictures = []
    for name, widget in views.items():
        try:
            pictures.append(Image.open(io.BytesIO(widget.picture())).convert("RGB"))
        except WorkbenchError as error:  # there is no figure yet
            lines = [*lines, f"{name}: {error}"]
    head = Image.open(io.BytesIO(text_picture(title, lines))).convert("RGB")
    scaled = [_narrowed(picture, head.width) for picture in pictures]
    whole = Image.new("RGB", (head.width, head.height + sum(picture.height for picture in scaled)), "white")
    place = 0
    for picture in (head, *scaled):
        whole.paste(picture, (0, place))
        place += picture.height
    return small_png(whole)


def _narrowed(picture: Image.Image, width: int) -> Image.Image:
    if picture.width <= width:
        return picture
    return picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
