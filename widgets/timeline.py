"""Several runs on one axis of steps, also while they train elsewhere: which signal moved first, where, and why."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import capitalized, counted, listed
from workbench.io.run_access import named_runs
from workbench.plots.timeline_events import TimelineEvent, signal_of
from workbench.plots.timeline_figure import chosen_signals, healthy_runs, sentence_alone, timeline
from workbench.schema.statuses import RunState
from workbench.studies import signals as sig
from workbench.studies.lines import checked_quantiles
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.export import ExportBar
from workbench.widgets.files import KINDS, export_runs
from workbench.widgets.timeline_parts.canvas import TimelineCanvas, Wishes
from workbench.widgets.timeline_parts.followed_run import FollowedRun
from workbench.widgets.timeline_parts.saved_page import saved_page
from workbench.widgets.timeline_parts.selection import PanelSelection

if TYPE_CHECKING:
    from pathlib import Path

    import xarray as xr

    Run = xr.DataTree | xr.Dataset | str | os.PathLike[str]

#: Looking at stores takes at most this share of the time.
_SHARE = 0.2


class Timeline(WorkbenchWidget):
    """Signals of several runs, stacked over one axis of steps, with alarms, faults, actions and lead times.

    The first alarm of each run and its likely cause stay in sight at the top. Marks show each measurement of a probe,
    and what it found; the first panels show the evidence of a change in each run as it accumulates to an alarm, for the
    signals that reached one first or are nearest to one. ``run["evidence"] = xr.DataTree(wb.alarms.evidence_of(run))``
    adds the evidence to a run that was recorded without it.

    Drag over the panels to zoom in, use the wheel after a click, double-click to see all; the cursor runs through all
    panels. A click on an alarm, or on any step, shows where the signal is worst: a map of its layers and heads for each
    run, and the eigenvalues recorded nearest to that step. The alarm's layer, or one clicked in a map or a plane
    or chosen from the list, is highlighted in all of them. ``save("x.html")`` writes all of this as one page that works
    without a kernel and a network; only the reduction cannot be changed there.

    A run given as a path is followed while it trains, in this process or another: its store is read every
    ``poll_every`` seconds, and new rows appear automatically.

    Args:
        runs: One run, or several by name: a run, or the path of a stored one.
        signals: Names as of ``workbench.studies.signals.names(run)``; None: the default ones, as in
            `workbench.plots.timeline`.
        reduce: Over layers and heads: ``"min"``, ``"max"``, ``"mean"``, or ``"worst"``, the worst value.
        healthy: Healthy runs, or the number of steps of each run's own healthy start, for a shaded band.
        band: Lower and upper quantile of the band.
        poll_every: Seconds between two readings of the stores.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        runs: Runs by name, as `workbench.widgets.timeline_parts.followed_run.FollowedRun`.
        canvas: The figure.
        export_bar: The buttons that write files.

    Raises:
        SchemaError: If there is no run, or no run has one of the signals.
        StoreError: If there is no run at a path.
        OptionError: If an option is out of range.
    """

    kinds = KINDS | {".nc": ("netCDF", "Everything recorded of the runs shown; a group for each")}

    def __init__(
        self,
        runs: Run | Mapping[str, Run],
        *,
        signals: Sequence[str] | None = None,
        reduce: str = "worst",
        healthy: xr.DataTree | Mapping[str, Run] | int | None = None,
        band: tuple[float, float] = (0.05, 0.95),
        poll_every: float = 1.0,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        self._standing = ""
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()
        if not poll_every > 0:
            raise OptionError(f"poll_every is {poll_every}, expected a positive number of seconds.")
        quantiles = checked_quantiles(band)
        self.runs = _followed(runs)
        references: list[FollowedRun] | int | None
        if isinstance(healthy, str | os.PathLike | Mapping):
            references = list(_followed(healthy).values())
        elif healthy is not None and not isinstance(healthy, int):
            references = [FollowedRun(name, run, 0) for name, run in healthy_runs(healthy).items()]
        else:
            healthy_runs(healthy)
            references = healthy
        self._healthy, self._band = healthy, quantiles
        self._asks_for_signals = signals is None
        # Of runs that have recorded nothing yet, any name may come.
        chosen = chosen_signals(self._trees(), self._stories(), signals) if self.names else list(signals or ())
        self._wishes = Wishes(chosen, list(self.runs))
        self.reduce = reduce
        self.canvas = TimelineCanvas(self.runs, self._wishes, references, quantiles, self.guarded(self._obey))
        self.export_bar = ExportBar(self, self.kinds)
        self.export_bar.suggest("exports/timeline")
        self.fill([self.canvas, self.export_bar])
        self._followed = [run for run in [*self.runs.values(), *_listed(references)] if run.path is not None]
        self._say()
        if self._followed:
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._is_closed, poll_every), name="Timeline", daemon=True
            )
            self._thread.start()

    @property
    def names(self) -> list[str]:
        """Every signal that a run offers."""
        return list(dict.fromkeys(name for run in self.runs.values() for name in run.entries))

    @property
    def signals(self) -> list[str]:
        """The signals shown, top to bottom; set it to choose others."""
        return list(self._wishes.signals)

    @signals.setter
    def signals(self, names: Sequence[str]) -> None:
        self._wishes.signals = chosen_signals(self._trees(), self._stories(), names)
        self._asks_for_signals = False
        self._refresh()

    @property
    def reduce(self) -> str:
        """How signals are reduced over layers and heads: ``"worst"``, ``"min"``, ``"max"`` or ``"mean"``."""
        return self._wishes.reduce or "worst"

    @reduce.setter
    def reduce(self, reduce: str) -> None:
        choice = ("worst", *sig.REDUCTIONS)
        if reduce not in choice:
            raise OptionError(f"The reduction is '{reduce}', expected one of {', '.join(choice)}.")
        self._wishes.reduce = None if reduce == "worst" else reduce
        self._refresh()

    @property
    def shown(self) -> list[str]:
        """The names of the runs that are shown; set it to hide the others."""
        return list(self._wishes.shown)

    @shown.setter
    def shown(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self.runs]:
            raise SchemaError(f"There is no run '{unknown[0]}'; choose from {', '.join(self.runs)}.")
        self._wishes.shown = [name for name in self.runs if name in names]
        self._refresh()

    @property
    def view(self) -> tuple[float, float] | None:
        """First and last step in view; None: all, also those to come. Set it to move there."""
        return self._wishes.view

    @view.setter
    def view(self, view: tuple[float, float] | None) -> None:
        if view is not None:
            start, stop = (float(end) for end in view)
            if not (np.isfinite([start, stop]).all() and start < stop):
                raise OptionError(f"The view is {view!r}, expected a first and a later last step, or None for all.")
            view = (start, stop)
        self._wishes.view = view
        self._refresh()

    @property
    def selection(self) -> PanelSelection | None:
        """The selection next to the panels: a step with the heat maps and eigenvalues of each run; None: nothing."""
        return self._wishes.selection

    @property
    def alarms(self) -> dict[str, list[TimelineEvent]]:
        """The first alarm of each signal, by run."""
        return {name: run.story.onsets for name, run in self.runs.items()}

    @property
    def states(self) -> dict[str, str]:
        """State of each run: ``running``, ``finished``, ``stopped``, ``diverged``, ``removed``; empty: unknown."""
        return {name: run.state for name, run in self.runs.items()}

    def select(self, step: int | None, *, signal: str | None = None, run: str | None = None) -> None:
        """Show layers, heads and eigenvalues at a step, next to the panels; for an alarm, pass its signal and run.

        Args:
            step: The nearest recorded one is shown for each run; None shows nothing.
            signal: Whose layers and heads; of one that has none, a signal that has. None: the first shown that has.
            run: Whose alarm at this step it is, if it is one.

        Raises:
            SchemaError: If there is no such signal or run.
        """
        if step is None:
            self._wishes.selection = None
            self._refresh()
            return
        if run is not None and run not in self.runs:
            raise SchemaError(f"There is no run '{run}'; choose from {', '.join(self.runs)}.")
        event = None
        if run is not None:
            own = [event for event in self.runs[run].story.events if event.kind == "alarm" and event.step == step]
            event = next((event for event in own if event.source == signal), own[0] if own else None)
        if event is not None and signal is not None:
            signal = signal_of(event, self.names) or signal
        elif signal is not None and signal not in self.names:
            raise SchemaError(f"No run has a signal '{signal}'; choose from {', '.join(self.names)}.")
        mapped = self._mapped(int(step), signal, run)
        chosen = PanelSelection.of(list(self.runs.values()), int(step), mapped, run=run or "", event=event)
        self._wishes.selection = chosen
        self._refresh()

    def poll(self) -> bool:
        """Look at the stores now; whether anything was new. The widget does so by itself."""
        is_new = sum(run.poll() for run in self._followed) > 0  # every one of them
        if is_new:
            if self._asks_for_signals:
                self._look_again()
            with self.turn:
                self._say()
            self.canvas.refresh()
            if RunState.RUNNING not in self.states.values():  # a picture of rows that still come would be drawn in vain
                self.settle()
        return is_new

    @property
    def summary(self) -> str:
        """What is shown, in one sentence."""
        if not self.shown:
            return f"Timeline of {counted(len(self.runs), 'run')}, none of which is shown."
        runs = _first([f"{name} ({self.runs[name].state_in_words})" for name in self.shown])
        if not self._has_lines:
            return f"Timeline of {runs}: {self._nothing_to_draw}"
        first, last = self.canvas.extent if self.view is None else self.view
        chosen = "" if self.selection is None else f", with step {self.selection.step:,} selected"
        steps = f"from step {first:,.0f} to {last:,.0f}{chosen}"
        return f"Timeline of {runs}, {steps}: {_first(self.signals)}."

    def figure(self, backend: str = "bokeh") -> Any:
        """What is shown as a figure of its own, to keep or to write with ``workbench.plots.save()``."""
        if not self._has_lines:
            return sentence_alone(capitalized(self._nothing_to_draw), backend=backend)
        runs = {name: self.runs[name].tree for name in self.shown}
        places = {name: run.place for name, run in self.runs.items()}
        healthy: Any = self._healthy
        if isinstance(healthy, str | os.PathLike | Mapping):
            healthy = {name: run.tree for name, run in _followed(healthy).items()}
        return timeline(
            runs,
            signals=self.signals,
            reduce=self._wishes.reduce,
            healthy=healthy,
            band=self._band,
            places=places,
            view=self.view,
            selected=None if self.selection is None else self.selection.step,
            backend=backend,
        )

    def page(self) -> str:
        """One HTML page that stays interactive without a kernel and a network, with all signals of all runs."""
        mapped = self._mapped(int(self.canvas.extent[1]), None, None)
        return saved_page(self.canvas, mapped, summary=self.summary, theme=self.theme)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Endings of files that cannot be written of what is shown, and why."""
        return {} if self.shown else {".nc": "No run is shown; show one first."}

    def _write(self, path: Path, ending: str, *, overwrite: bool) -> Path:
        if ending == ".nc":
            return export_runs({name: self.runs[name].tree for name in self.shown}, path, overwrite=overwrite)
        return super()._write(path, ending, overwrite=overwrite)

    @property
    def _has_lines(self) -> bool:
        """Whether a run that is shown has recorded one of the signals."""
        return any(name in self.runs[run].entries for run in self.shown for name in self.signals)

    @property
    def _nothing_to_draw(self) -> str:
        """Why there is no signal."""
        if not self.shown:
            return "no run is shown."
        if self.names and not self.signals:
            return "no signal is chosen."
        return "no signal has been recorded yet; the figure appears with the first."

    def _draw_picture(self) -> bytes:
        return self.picture()  # of what was read and wished for so far: the user need not wait for it

    def close(self) -> None:
        """Stop following the runs and remove the widget; the stores stay as they are."""
        if hasattr(self, "_is_closed"):
            self._is_closed.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(10)
        super().close()

    def _trees(self) -> dict[str, xr.DataTree]:
        return {name: run.tree for name, run in self.runs.items()}

    def _stories(self) -> list[Any]:
        return [run.story for run in self.runs.values()]

    def _refresh(self) -> None:
        if hasattr(self, "export_bar"):
            self.canvas.refresh()
            self.export_bar.offer(self.refused_kinds)
            self.settle()

    def _look_again(self) -> None:
        """Add alarming signals unless the user has chosen the signals; those already shown keep their place."""
        if not self.names:
            return
        wanted = chosen_signals(self._trees(), self._stories(), None)
        shown = self._wishes.signals
        self._wishes.signals = [*shown, *(name for name in wanted if name not in shown)][: max(8, len(shown))]

    def _mapped(self, step: int, signal: str | None, run: str | None) -> str:
        """The signal whose layers are shown: the one asked for, or the last that alarmed, or the first that has any."""
        has_layers = {name for each in self.runs.values() for name, entry in each.entries.items() if entry.places}
        if signal in has_layers:
            return signal
        stories = [self.runs[run].story] if run is not None else self._stories()
        alarmed = sorted(
            (event for story in stories for event in story.onsets if event.step <= step), key=lambda event: -event.step
        )
        names = [signal_of(event, self.names) for event in alarmed]
        return next((name for name in [*names, *self._wishes.signals, *self.names] if name in has_layers), "")

    def _obey(self, ask: dict[str, Any]) -> None:
        """Handle a request of the user on the page."""
        if "width" in ask:
            self._wishes.width = int(np.clip(ask["width"], 50, 8000))
        if "seen" in ask:
            self._wishes.seen = frozenset(ask["seen"])
        if "view" in ask:
            self.view = None if ask["view"] is None else tuple(ask["view"])
        if "signals" in ask:
            self._wishes.signals = [name for name in ask["signals"] if name in self.names]
            self._asks_for_signals = False
            self._refresh()
        if "reduce" in ask:
            self.reduce = ask["reduce"]
        if "shown" in ask:
            self.shown = ask["shown"]
        if "select" in ask:
            chosen = ask["select"]
            self.select(None) if chosen is None else self.select(
                round(chosen["step"]), signal=chosen.get("signal"), run=chosen.get("run")
            )

    def _say(self) -> None:
        """Show errors of the stores under the widget until they are resolved."""
        sentences = " ".join(run.problem for run in self._followed if run.problem)
        if sentences != self._standing:
            self._standing = sentences
            self._show("")

    def _show(self, sentence: str) -> None:
        super()._show(sentence or getattr(self, "_standing", ""))


def _followed(runs: Run | Mapping[str, Run]) -> dict[str, FollowedRun]:
    """Runs by name.

    Raises:
        SchemaError: If there is no run, or something is no run.
        StoreError: If there is no run at a path.
    """
    import xarray as xr

    if isinstance(runs, str | os.PathLike):
        name = os.path.basename(os.path.normpath(runs)).removesuffix(".zarr")
        return {name: FollowedRun(name, runs, 0)}
    if isinstance(runs, xr.DataTree | xr.Dataset):
        return {name: FollowedRun(name, run, 0) for name, run in named_runs(runs, needs_spectra=False).items()}
    if not isinstance(runs, Mapping) or not runs:
        kind = "an empty dict" if isinstance(runs, Mapping) else f"of type {type(runs).__name__}"
        raise SchemaError(f"The runs are {kind}, expected a run, the path of one, or a non-empty dict of name: run.")
    return {str(name): FollowedRun(str(name), run, place) for place, (name, run) in enumerate(runs.items())}


def _first(names: Sequence[str], n: int = 4) -> str:
    """The first of several names, and how many more there are."""
    more = [f"{len(names) - n} more"] if len(names) > n else []
    return listed([*names[:n], *more])


def _listed(references: Any) -> list[FollowedRun]:
    return references if isinstance(references, list) else []


def _watch(widget: weakref.ref[Timeline], is_closed: threading.Event, poll_every: float) -> None:
    """Look at the stores again and again, as long as the widget is there; this thread only reads."""
    pause = poll_every
    while not is_closed.wait(pause):
        watched = widget()
        if watched is None:
            return
        start = time.monotonic()
        try:  # not inside attempt(): reading takes a while, and the user's actions need not wait for it
            watched.poll()
        except Exception:  # shown under the widget, like that of any callback
            with watched.attempt():
                raise
        pause = max(poll_every, (time.monotonic() - start) / _SHARE)
        del watched
