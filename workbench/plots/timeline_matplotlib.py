"""Timeline as one matplotlib picture with panels placed in inches, so that no texts overlap.

The picture is drawn inside a hook of one holoviews element, because holoviews gives all panels of a layout the same
height and takes half a minute for the marks of six runs.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import capitalized, clipped
from workbench.plots import style
from workbench.plots.timeline_evidence import ALARM
from workbench.plots.timeline_words import EVIDENCE_TITLE, accounts, landmarks, lead_in_words, marks_in_words
from workbench.studies.signals import decimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_evidence import EvidencePanel
    from workbench.plots.timeline_panels import RunEvents, SignalPanel

#: Inches: width of the panels and of the column of names to their right, heights of a panel and of a run's row.
_WIDTH, _NAMES, _PANEL, _ROW = 6.7, 1.85, 0.9, 0.5
#: Inches: height of a line of a title, height of a line of small text, width of a letter of small text.
_TITLE_LINE, _SMALL_LINE, _LETTER = 0.21, 0.15, 0.066
_SMALL = style.TICK_SIZE - 1
_N_BUCKETS = 1200
#: From this number of runs on, edges are drawn instead of shades, whose colors would mix.
CROWDED = 3


@dataclass(frozen=True)
class TimelinePicture:
    """Content of the picture.

    Attributes:
        all_events: Events of each run, in the order of the runs.
        panels: One panel per signal.
        span: Steps in view.
        band: Explanation of the healthy band; empty if there is none.
        selected: Step to mark; None marks none.
    """

    all_events: Sequence[RunEvents]
    panels: Sequence[SignalPanel]
    span: tuple[float, float]
    band: str = ""
    selected: int | None = None

    def element(self, hv: Any) -> Any:
        """Return the picture as a holoviews element for matplotlib."""
        styling = {"title": "", "xaxis": None, "yaxis": None, "hooks": [self._draw]}
        return hv.Curve([]).opts(**styling, backend="matplotlib")

    def _draw(self, plot: Any, element: Any) -> None:
        """Draw all panels in place of the axes of the element, as a holoviews hook."""
        plot.handles["axis"].set_visible(False)
        _Sheet(plot.handles["fig"], self).draw()


class _Sheet:
    """Drawing of panels on a figure, from top to bottom; positions are in inches from its lower left corner."""

    def __init__(self, figure: Any, picture: TimelinePicture) -> None:
        self.figure, self.picture, self.all_events = figure, picture, picture.all_events
        self.span = picture.span
        self._top = 0.0
        self._words: list[tuple[float, str, dict[str, Any]]] = []

    def draw(self) -> None:
        """Draw everything."""
        self._head()
        self._lanes()
        for run_events in self.all_events:
            if run_events.evidence is not None:
                self._evidence(run_events, run_events.evidence)
        for panel in self.picture.panels:
            self._signal(panel)
        last = self.figure.axes[-1]
        last.tick_params(labelbottom=True)
        last.set_xlabel("step", fontsize=style.LABEL_SIZE, color=style.INK)
        page = self._axes(-self._top, bottom=self._top)  # in inches, for all texts between the panels
        page.set_axis_off()
        page.set_xlim(0, _WIDTH)
        page.set_ylim(self._top, 0)
        for bottom, words, styling in self._words:
            page.text(0, bottom, words, va="bottom", color=style.INK, **styling)

    def _head(self) -> None:
        marks = "   ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in marks_in_words(self.all_events))
        words = [*accounts(self.all_events), marks, self.picture.band]
        if self.picture.selected is not None:
            words.append(f"dotted line: selected step {self.picture.selected:,}")
        self._text("Events", _TITLE_LINE, size=style.TITLE_SIZE, weight="bold")
        for line in filter(None, words):
            for part in textwrap.wrap(line, int((_WIDTH + _NAMES) / _LETTER), subsequent_indent="    "):
                self._text(part, _SMALL_LINE, size=_SMALL)

    def _lanes(self) -> None:
        """Draw the events, one row per run."""
        n = len(self.all_events)
        axes = self._axes(_ROW * n)
        axes.set_ylim(-0.36, n - 0.36)
        axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
        axes.grid(visible=False, axis="y")
        for spine in axes.spines.values():
            spine.set_visible(False)
        for index, run_events in enumerate(self.all_events):
            row, styling = n - 1 - index, style.model_style(run_events.place)
            for fault in run_events.faults:
                stop = run_events.last_step if fault.stop is None else fault.stop
                axes.fill_between([fault.start, stop], row - 0.14, row + 0.14, color=styling["color"], alpha=0.2, lw=0)
            end = run_events.diverged.step if run_events.diverged is not None else run_events.last_step
            axes.plot([run_events.first_step, end], [row, row], color=styling["color"], ls=styling["dash"], lw=1.7)
            self._row(axes, run_events, row, styling["color"])
            name = clipped(run_events.run, 24, keep_end=True)
            axes.annotate(
                name, (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                va="center", fontsize=style.TICK_SIZE, color=style.INK,
            )  # fmt: skip
        for index, run_events in enumerate(self.all_events):  # on top of everything else
            self._lead(axes, run_events, n - 1 - index)
        self._mark_selected(axes)

    def _row(self, axes: Any, run_events: RunEvents, row: int, color: str) -> None:
        """Draw measurements of probes, alarms, actions and the divergence of one run."""
        onsets = run_events.onsets
        sound = sorted({check.step for check in run_events.checks if check.is_sound})
        axes.scatter(sound, [row - 0.22] * len(sound), s=3, color=style.NEUTRAL, lw=0)
        broken = [event.step for event in run_events.findings]
        axes.scatter(broken, [row - 0.22] * len(broken), s=13, color=style.BROKEN, marker="s", lw=0)
        later = [event.step for event in run_events.events if event.kind == "alarm" and event not in onsets]
        axes.vlines(later, row - 0.14, row + 0.14, color=color, lw=0.9, alpha=0.7)
        for event in onsets:
            _alarm(axes, event, row, color)
        actions = [event.step for event in run_events.events if event.kind == "action"]
        axes.scatter(actions, [row] * len(actions), s=34, color=color, marker="D", ec="white", lw=0.8, zorder=5)
        if run_events.diverged is not None:
            _cross(axes, run_events.diverged.step, row, color)

    def _lead(self, axes: Any, run_events: RunEvents, row: int) -> None:
        """Draw the lead time as an arrow with a label."""
        first, last = self.span
        if run_events.lead is None or not run_events.lead.meets(first, last):
            return
        start, stop = run_events.lead.first.step, run_events.lead.then.step
        height = row + 0.28
        axes.plot([start, start, start, stop], [height - 0.07, height + 0.07, height, height], color=style.INK, lw=1.1)
        axes.scatter([stop], [height], marker=">" if stop >= start else "<", s=18, color=style.INK, lw=0)
        words = lead_in_words(run_events.lead)
        half = 0.5 * _LETTER * len(words) / _WIDTH * (last - first)
        middle = np.clip([start, stop], first, last).mean()
        x = float(np.clip(middle, first + half, max(last - half, first + half)))
        axes.text(x, height + 0.07, words, ha="center", va="bottom", fontsize=_SMALL, color=style.INK)

    def _evidence(self, run_events: RunEvents, evidence: EvidencePanel) -> None:
        of_run = f": {run_events.run}" if len(self.all_events) > 1 else ""
        axes = self._panel(f"{EVIDENCE_TITLE}{of_run}", evidence.note, evidence.view, is_log=True)
        self._shade(axes, [run_events])
        axes.axhline(ALARM, color=style.NEUTRAL, lw=0.9, ls="dashed")
        for line, dash in zip(evidence.lines, cycle(style.MODEL_DASHES)):
            step, value = decimate(line.step, line.value, _N_BUCKETS)
            axes.plot(step, value, color=line.color, ls=dash, lw=1.3, label=clipped(line.signal, 22, keep_end=True))
        if evidence.lines:
            axes.legend(
                loc="upper left", bbox_to_anchor=(1.0, 1.08), frameon=False, fontsize=_SMALL, labelcolor=style.INK,
                handlelength=2.0, borderpad=0.2, labelspacing=0.3,
            )  # fmt: skip

    def _signal(self, signal: SignalPanel) -> None:
        """Draw one signal of all runs."""
        panel = signal.panel
        axes = self._panel(capitalized(panel.title), panel.note, panel.view, is_log=panel.is_logarithmic)
        self._shade(axes, self.all_events)
        is_crowded = len(signal.bands) >= CROWDED
        for place, band in signal.bands:
            styling = {"color": style.NEUTRAL, "dash": "solid"} if place is None else style.model_style(place)
            if not is_crowded:
                alpha = 0.28 if place is None else 0.16
                axes.fill_between(band["step"], band["lower"], band["upper"], color=styling["color"], alpha=alpha, lw=0)
                continue
            for edge in ("lower", "upper"):
                axes.plot(band["step"], band[edge], color=styling["color"], ls=styling["dash"], lw=0.6, alpha=0.8)
        for line, run_events in zip(panel.lines, self.all_events, strict=True):
            styling = style.model_style(run_events.place)
            step, value = decimate(line.step, line.value, _N_BUCKETS)
            marker = (
                {"marker": style.MATPLOTLIB_MARKERS[styling["marker"]], "ms": 4, "mew": 0} if line.has_markers else {}
            )
            axes.plot(step, value, color=styling["color"], ls=styling["dash"], lw=1.25, **marker)
        for line, onset, run_events in zip(panel.lines, signal.onsets, self.all_events, strict=True):
            color = style.model_style(run_events.place)["color"]
            if onset is not None:
                _alarm(axes, onset[0], onset[1], color)
            if line.cross is not None:
                _cross(axes, line.cross[0], float(np.clip(line.cross[1], *panel.limits)), color)

    def _panel(self, title: str, note: str, view: tuple[float, float], *, is_log: bool) -> Any:
        """Return the axes of a panel, below its title and note, with the selected step marked."""
        self._top -= 0.11
        longest = int((_WIDTH + _NAMES) / (1.3 * _LETTER))
        self._text(clipped(title, longest, keep_end=True), _TITLE_LINE, size=style.TITLE_SIZE - 1, weight="bold")
        for line in textwrap.wrap(note, int((_WIDTH + _NAMES) / _LETTER), max_lines=3, placeholder=" …"):
            self._text(line, _SMALL_LINE, size=_SMALL)
        axes = self._axes(_PANEL)
        if is_log:
            axes.set_yscale("log")
        axes.set_ylim(*view)
        _set_ticks(axes, view, is_log=is_log)
        self._mark_selected(axes)
        return axes

    def _axes(self, height: float, *, bottom: float | None = None) -> Any:
        """Return axes below everything drawn so far, or at a position."""
        from matplotlib.transforms import Bbox

        self._top = self._top - 0.05 - height if bottom is None else bottom
        inches = Bbox.from_bounds(0, self._top, _WIDTH, height)
        axes = self.figure.add_axes((0, 0, 1, 1), label=f"{self._top:.3f}")
        # Evaluated when the figure is drawn, because holoviews changes its size after the hooks.
        axes.set_axes_locator(
            lambda axes, _: inches.transformed(axes.figure.dpi_scale_trans + axes.figure.transFigure.inverted())
        )
        axes.set_xlim(*self.span)
        axes.set_axisbelow(True)
        axes.grid(visible=True, color=style.NEUTRAL, alpha=0.22, linewidth=0.6)
        axes.tick_params(colors=style.INK, labelsize=style.TICK_SIZE, labelbottom=False)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(style.INK)
        return axes

    def _text(self, words: str, height: float, **styling: Any) -> None:
        """Add a line of text below everything drawn so far."""
        self._top -= height
        self._words.append((self._top, words, styling))

    def _shade(self, axes: Any, all_events: Sequence[RunEvents]) -> None:
        """Shade active faults and draw the ends of the lead time through the height of a panel."""
        faulty = [run_events for run_events in all_events if run_events.faults]
        for run_events in faulty if len(faulty) < CROWDED else []:  # the lanes show them as well
            color = style.model_style(run_events.place)["color"]
            for fault in run_events.faults:
                stop = run_events.last_step if fault.stop is None else fault.stop
                axes.axvspan(fault.start, stop, color=color, alpha=0.09, lw=0)
        for run_events in all_events:
            color = style.model_style(run_events.place)["color"]
            for event, dash in landmarks(run_events):
                axes.axvline(event.step, color=color, ls=dash, lw=0.9, alpha=0.75)

    def _mark_selected(self, axes: Any) -> None:
        if self.picture.selected is not None:
            axes.axvline(self.picture.selected, color=style.INK, ls=(0, (1, 2)), lw=1.2, zorder=6)


def _set_ticks(axes: Any, view: tuple[float, float], *, is_log: bool) -> None:
    """Set few ticks with plain numbers.

    A logarithmic axis over at least a factor of 10 has powers of ten, and below a factor of 50 also 2 and 5 times
    these. Other axes have round numbers.
    """
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

    low, high = view
    if is_log and high >= 10 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,), numticks=5))
    else:
        ticks = MaxNLocator(3).tick_values(low, high)
        axes.yaxis.set_major_locator(FixedLocator([at for at in ticks if at > 0 or not is_log]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))


def _alarm(axes: Any, event: TimelineEvent, value: float, color: str) -> None:
    face = "white" if event.is_established else color
    axes.scatter([event.step], [value], marker="v", s=42, facecolor=face, edgecolor=color, lw=1.3, zorder=5)


def _cross(axes: Any, step: int, value: float, color: str) -> None:
    axes.scatter([step], [value], marker="X", s=62, color=color, edgecolor="white", lw=0.6, zorder=5)
