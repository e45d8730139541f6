"""Signals of several runs over steps, also while they train in another process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from workbench.callbacks.alarms.probe_alarms import SIGNALS
from workbench.errors import OptionError, SchemaError, require_listed
from workbench.formatting import capitalized, counted, listed
from workbench.io.store import named_runs
from workbench.option_checks import checked
from workbench.option_kinds import PositiveFloat
from workbench.plots.timeline_events import TimelineEvent, alarms_of, signal_of
from workbench.plots.timeline_figure import chosen_signals, healthy_runs, sentence_alone, timeline
from workbench.schema.statuses import RunState
from workbench.studies import signals as sig
from workbench.studies.signals import Quantiles
from workbench.widgets.base import KINDS, WorkbenchWidget
from workbench.widgets.timeline_parts.canvas import PanelSelection, TimelineCanvas, ViewSettings, saved_page
from workbench.widgets.timeline_parts.followed_run import FollowedRun

if TYPE_CHECKING:
    Run = xr.DataTree | xr.Dataset | str | os.PathLike[str]

#: Maximum fraction of the time spent on reading stores.
_SHARE = 0.2


class Timeline(WorkbenchWidget):
    """Signals of several runs in panels over a shared step axis, with alarms, faults, actions and lead times.

    The first alarm of each run and its likely cause stay visible at the top. Marks show each measurement of a probe and
    its finding. The first panels show the evidence of a change in each run as it accumulates to an alarm, for the
    signals that raised an alarm first or are closest to one. For a run that was recorded without evidence, add it by
    ``run["evidence"] = xr.DataTree(wb.alarms.evidence_of(run))``.

    Drag over the panels to zoom in, use the mouse wheel after a click, and double-click to see all steps. A click on an
    alarm, on the red mark of a probe or on any step shows a map of the signal's layers and heads for each run, and the
    eigenvalues recorded closest to that step. The layer of the alarm, or a layer clicked in a map or a plane or chosen
    from the list, is highlighted in all of them. ``save("x.html")`` writes all of this as one page that needs no kernel
    and no network; only the reduction cannot be changed there.

    A run given as a path is followed while it trains, in this process or another: its store is read every
    ``poll_every`` seconds, and new rows are added automatically.

    Args:
        runs: One run, or several by name: a run, the path of a stored run, or a log of another tool, from
            `workbench.read_log` or as a path.
        signals: Names from ``workbench.studies.signals.names(run)``; None for the default ones, as in
            `workbench.plots.timeline`.
        reduce: Reduction over layers and heads: ``"min"``, ``"max"``, ``"mean"``, or ``"worst"`` for the worst value.
        healthy: Healthy runs, or the number of healthy initial steps of each run, for a shaded band.
        band: Lower and upper quantile of the band.
        poll_every: Seconds between two readings of the stores.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        runs: Runs by name, as `workbench.widgets.timeline_parts.followed_run.FollowedRun`.
        canvas: The figure.

    Raises:
        SchemaError: If there is no run, or no run has one of the signals.
        StoreError: If there is no run at a path.
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> timeline = widgets.Timeline({"failed": run}, signals=["loss", "grad_norm"])
        >>> timeline.signals
        ['loss', 'grad_norm']
        >>> timeline.close()

    See Also:
        `workbench.plots.timeline`: Draws the same figure without controls.
        `workbench.widgets.LiveTraining`: Trains and shows runs at the same time.
    """

    kinds = KINDS | {".nc": ("netCDF", "All recorded data of the runs shown, one group per run")}

    @checked
    def __init__(
        self,
        runs: Run | Mapping[str, Run],
        *,
        signals: Sequence[str] | None = None,
        reduce: str = "worst",
        healthy: xr.DataTree | Mapping[str, Run] | int | None = None,
        band: Quantiles = (0.05, 0.95),
        poll_every: PositiveFloat = 1.0,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        self._standing = ""
        self.runs = _followed(runs)
        references: list[FollowedRun] | int | None
        if isinstance(healthy, str | os.PathLike | Mapping):
            references = list(_followed(healthy).values())
        elif healthy is not None and not isinstance(healthy, int):
            references = [FollowedRun(name, run, 0) for name, run in healthy_runs(healthy).items()]
        else:
            healthy_runs(healthy)
            references = healthy
        self._healthy, self._band = healthy, band
        self._has_default_signals = signals is None
        # Runs that have recorded nothing yet may record any signal later.
        chosen = chosen_signals(self._trees(), self._all_events(), signals) if self.names else list(signals or ())
        self._settings = ViewSettings(chosen, list(self.runs))
        self.reduce = reduce
        self.canvas = TimelineCanvas(self.runs, self._settings, references, band, self._guarded(self._obey))
        self._fill([self.canvas], suggested="exports/timeline")
        self._followed = [
            run
            for run in [*self.runs.values(), *(references if isinstance(references, list) else [])]
            if run.path is not None
        ]
        self._say()
        if self._followed:
            self._repeat(Timeline.poll, poll_every, share=_SHARE)

    @property
    def names(self) -> list[str]:
        """All signals of all runs."""
        return list(dict.fromkeys(name for run in self.runs.values() for name in run.entries))

    @property
    def signals(self) -> list[str]:
        """The displayed signals from top to bottom; can be set."""
        return list(self._settings.signals)

    @signals.setter
    def signals(self, names: Sequence[str]) -> None:
        self._settings.signals = chosen_signals(self._trees(), self._all_events(), names)
        self._has_default_signals = False
        self._refresh()

    @property
    def reduce(self) -> str:
        """Reduction over layers and heads: ``"worst"``, ``"min"``, ``"max"`` or ``"mean"``; can be set."""
        return self._settings.reduce or "worst"

    @reduce.setter
    def reduce(self, reduce: str) -> None:
        require_listed("reduce", [reduce], ("worst", *sig.REDUCTIONS))
        self._settings.reduce = None if reduce == "worst" else reduce
        self._refresh()

    @property
    def shown(self) -> list[str]:
        """Names of the displayed runs; can be set."""
        return list(self._settings.shown)

    @shown.setter
    def shown(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self.runs]:
            raise self._no_run(unknown[0])
        self._settings.shown = [name for name in self.runs if name in names]
        self._refresh()

    @property
    def view(self) -> tuple[float, float] | None:
        """First and last step in view; None for all steps, including future ones; can be set."""
        return self._settings.view

    @view.setter
    def view(self, view: tuple[float, float] | None) -> None:
        if view is not None:
            start, stop = (float(end) for end in view)
            if not (np.isfinite([start, stop]).all() and start < stop):
                raise OptionError.of("view", view, "a first step and a later last step, or None for all steps")
            view = (start, stop)
        self._settings.view = view
        self._refresh()

    @property
    def selection(self) -> PanelSelection | None:
        """The selected step with heat maps and eigenvalues of each run; None if there is none."""
        return self._settings.selection

    @property
    def alarms(self) -> dict[str, list[TimelineEvent]]:
        """The first alarm of each signal, by run."""
        return {name: run.run_events.onsets for name, run in self.runs.items()}

    @property
    def states(self) -> dict[str, str]:
        """State of each run: running, finished, stopped, diverged, removed or unreadable; empty if unknown."""
        return {name: run.state for name, run in self.runs.items()}

    def select(self, step: int | None, *, signal: str | None = None, run: str | None = None) -> None:
        """Show layers, heads and eigenvalues at a step, next to the panels.

        Args:
            step: The step, of which each run shows the nearest recorded one; None shows nothing.
            signal: Signal of the heat maps; if it has no layers, another one is shown. None for the first displayed
                signal with layers. For an alarm or a probe, its signal.
            run: For an alarm at this step, or a probe that found a fault there, its run.

        Raises:
            SchemaError: If there is no such signal or run.
        """
        if step is None:
            self._settings.selection = None
            self._refresh()
            return
        if run is not None and run not in self.runs:
            raise self._no_run(run)
        event = None
        if run is not None:
            of = self.runs[run].run_events
            own = [event for event in (*alarms_of(of.events), *of.findings) if event.step == step]
            event = next((event for event in own if event.source == signal), own[0] if own else None)
        if event is not None and signal is not None:
            signal = signal_of(event, self.names) or signal
            if signal in SIGNALS.values():  # a probe: show what it measures by layer and head
                entries = self.runs[run or ""].entries.items()
                measured = (name for name, each in entries if each.places and SIGNALS.get(each.part) == event.source)
                signal = next(measured, signal)
        elif signal is not None and signal not in self.names:
            raise SchemaError(f"No run has a signal '{signal}'; choose from {', '.join(self.names)}.")
        mapped = self._mapped(int(step), signal, run)
        chosen = PanelSelection.of(list(self.runs.values()), int(step), mapped, run=run or "", event=event)
        self._settings.selection = chosen
        self._refresh()

    def poll(self) -> bool:
        """Read the stores now, and return whether there were new data; the widget does so regularly."""
        is_new = sum(run.poll() for run in self._followed) > 0  # a sum, so that all stores are read
        if is_new:
            if self._has_default_signals:
                self._add_alarming_signals()
            with self.turn:
                self._say()
            self.canvas.refresh()
            if RunState.RUNNING not in self.states.values():  # a picture of a running run would soon be out of date
                self._settle()
        return is_new

    @property
    def summary(self) -> str:
        """Runs, steps and signals in one sentence."""
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
        """Return the displayed panels as a separate figure, for example for ``workbench.plots.save()``."""
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
            reduce=self._settings.reduce,
            healthy=healthy,
            band=self._band,
            places=places,
            view=self.view,
            selected=None if self.selection is None else self.selection.step,
            backend=backend,
        )

    def page(self) -> str:
        """Return one interactive HTML page with all signals of all runs, without a kernel and without a network."""
        mapped = self._mapped(int(self.canvas.extent[1]), None, None)
        return saved_page(self.canvas, mapped, summary=self.summary, theme=self.theme)

    @property
    def refused_kinds(self) -> Mapping[str, str]:
        """Suffixes of files that cannot be written at present -> reason."""
        return {} if self.shown else {".nc": "No run is shown; show one first."}

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        return {name: self.runs[name].tree for name in self.shown}

    @property
    def _has_lines(self) -> bool:
        """Whether a displayed run has recorded one of the signals."""
        return any(name in self.runs[run].entries for run in self.shown for name in self.signals)

    @property
    def _nothing_to_draw(self) -> str:
        """The reason why no signal is drawn."""
        if not self.shown:
            return "no run is shown."
        if self.names and not self.signals:
            return "no signal is chosen."
        return "no signal has been recorded yet; the figure appears with the first one."

    def _draw_picture(self) -> bytes:
        return self.picture()  # without the lock, so that the user need not wait for it

    def close(self) -> None:
        """Stop following the runs and remove the widget; the stores stay unchanged."""
        if hasattr(self, "_is_closed"):  # unless the constructor raised an exception
            self._is_closed.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(10)
        super().close()

    def _trees(self) -> dict[str, xr.DataTree]:
        return {name: run.tree for name, run in self.runs.items()}

    def _all_events(self) -> list[Any]:
        return [run.run_events for run in self.runs.values()]

    def _refresh(self) -> None:
        if hasattr(self, "canvas"):
            self.canvas.refresh()
            self._settle()

    def _no_run(self, name: str) -> SchemaError:
        """Return the exception for an unknown run."""
        sentence = f"There is no run '{name}'; choose from {', '.join(self.runs)}."
        return SchemaError(sentence)

    def _add_alarming_signals(self) -> None:
        """Append signals with alarms to the displayed ones, which keep their places."""
        if not self.names:
            return
        default = chosen_signals(self._trees(), self._all_events(), None)
        shown = self._settings.signals
        self._settings.signals = [*shown, *(name for name in default if name not in shown)][: max(8, len(shown))]

    def _mapped(self, step: int, signal: str | None, run: str | None) -> str:
        """Return the signal of the heat maps: the given one, the latest with an alarm, or the first one with layers."""
        has_layers = {name for each in self.runs.values() for name, entry in each.entries.items() if entry.places}
        if signal in has_layers:
            return signal
        all_events = [self.runs[run].run_events] if run is not None else self._all_events()
        alarmed = sorted(
            (event for run_events in all_events for event in run_events.onsets if event.step <= step),
            key=lambda event: -event.step,
        )
        names = [signal_of(event, self.names) for event in alarmed]
        return next((name for name in [*names, *self._settings.signals, *self.names] if name in has_layers), "")

    def _obey(self, ask: dict[str, Any]) -> None:
        """Handle a request of the user on the page."""
        if "width" in ask:
            self._settings.width = int(np.clip(ask["width"], 50, 8000))
        if "seen" in ask:
            self._settings.seen = frozenset(ask["seen"])
        if "view" in ask:
            self.view = None if ask["view"] is None else tuple(ask["view"])
        if "signals" in ask:
            self._settings.signals = [name for name in ask["signals"] if name in self.names]
            self._has_default_signals = False
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
        """Show errors of the stores under the widget as long as they persist."""
        sentences = " ".join(run.problem for run in self._followed if run.problem)
        if sentences != self._standing:
            self._standing = sentences
            self._show("")

    def _show(self, sentence: str) -> None:
        super()._show(sentence or getattr(self, "_standing", ""))


def _followed(runs: Run | Mapping[str, Run]) -> dict[str, FollowedRun]:
    """Return runs by name."""
    if isinstance(runs, str | os.PathLike):
        name = os.path.basename(os.path.normpath(runs)).removesuffix(".zarr")
        return {name: FollowedRun(name, runs, 0)}
    if isinstance(runs, xr.DataTree | xr.Dataset):
        return {name: FollowedRun(name, run, 0) for name, run in named_runs(runs, needs_spectra=False).items()}
    if not isinstance(runs, Mapping) or not runs:
        kind = "an empty dict" if isinstance(runs, Mapping) else f"of type {type(runs).__name__}"
        raise SchemaError(f"The runs are {kind}, expected a run, the path of a run, or a non-empty dict of name: run.")
    return {str(name): FollowedRun(str(name), run, place) for place, (name, run) in enumerate(runs.items())}


def _first(names: Sequence[str], n: int = 4) -> str:
    """Return the first names, and the number of the remaining ones."""
    more = [f"{len(names) - n} more"] if len(names) > n else []
    return listed([*names[:n], *more])
