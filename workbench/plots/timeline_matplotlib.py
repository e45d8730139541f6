"""The timeline as one matplotlib picture, whose panels are placed in inches, so that no text meets another.

matplotlib draws all of it, inside a hook of one holoviews element: holoviews gives the panels of a layout one height,
and takes half a minute for the marks of six runs.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import clipped
from workbench.plots import style
from workbench.plots.timeline_evidence import ALARM
from workbench.plots.timeline_words import accounts, landmarks, lead_in_words, marks_in_words
from workbench.studies.lines import decimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_evidence import EvidencePanel
    from workbench.plots.timeline_panels import SignalPanel, Story

#: Inches: width of the panels and of the column of names to their right, heights of a panel and of a run's row.
_WIDTH, _NAMES, _PANEL, _ROW = 6.7, 1.85, 0.9, 0.5
#: Inches that a line of a title and of small text takes, and a letter of small text is wide.
_TITLE_LINE, _SMALL_LINE, _LETTER = 0.21, 0.15, 0.066
_SMALL = style.TICK_SIZE - 1
_N_BUCKETS = 1200
#: From so many runs on, shades of several colours would add up to one that means nothing: edges are drawn instead.
CROWDED = 3


@dataclass(frozen=True)
class TimelinePicture:
    """What is drawn.

    Attributes:
        stories: Events of each run, in the order of the runs.
        panels: One for each signal.
        span: Steps in view.
        band: What the healthy band is; empty: there is none.
        selected: A step to mark; None: none.
    """

    stories: Sequence[Story]
    panels: Sequence[SignalPanel]
    span: tuple[float, float]
    band: str = ""
    selected: int | None = None

    def element(self, hv: Any) -> Any:
        """The picture as a holoviews element of backend matplotlib."""
        look = {"title": "", "xaxis": None, "yaxis": None, "hooks": [self._draw]}
        return hv.Curve([]).opts(**look, backend="matplotlib")

    def _draw(self, plot: Any, element: Any) -> None:
        """A holoviews hook: all panels instead of the axes of the element."""
        plot.handles["axis"].set_visible(False)
        _Sheet(plot.handles["fig"], self).draw()


class _Sheet:
    """Draws panels on a figure, from the top down; places are in inches from its lower left corner."""

    def __init__(self, figure: Any, picture: TimelinePicture) -> None:
        self.figure, self.picture, self.stories = figure, picture, picture.stories
        self.span = picture.span
        self._top = 0.0
        self._words: list[tuple[float, str, dict[str, Any]]] = []

    def draw(self) -> None:
        """Draw everything."""
        self._head()
        self._lanes()
        for story in self.stories:
            if story.evidence is not None:
                self._evidence(story, story.evidence)
        for panel in self.picture.panels:
            self._signal(panel)
        last = self.figure.axes[-1]
        last.tick_params(labelbottom=True)
        last.set_xlabel("step", fontsize=style.LABEL_SIZE, color=style.INK)
        whole = self._axes(-self._top, bottom=self._top)  # in inches, for all that is written between the panels
        whole.set_axis_off()
        whole.set_xlim(0, _WIDTH)
        whole.set_ylim(self._top, 0)
        for bottom, words, look in self._words:
            whole.text(0, bottom, words, va="bottom", color=style.INK, **look)

    def _head(self) -> None:
        marks = "   ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in marks_in_words(self.stories))
        words = [*accounts(self.stories), marks, self.picture.band]
        if self.picture.selected is not None:
            words.append(f"dotted line through all panels: step {self.picture.selected:,}, which is selected")
        self._text("What happened", _TITLE_LINE, size=style.TITLE_SIZE, weight="bold")
        for line in filter(None, words):
            for part in textwrap.wrap(line, int((_WIDTH + _NAMES) / _LETTER), subsequent_indent="    "):
                self._text(part, _SMALL_LINE, size=_SMALL)

    def _lanes(self) -> None:
        """The events, one row for each run."""
        n = len(self.stories)
        axes = self._axes(_ROW * n)
        axes.set_ylim(-0.36, n - 0.36)
        axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
        axes.grid(visible=False, axis="y")
        for spine in axes.spines.values():
            spine.set_visible(False)
        for index, story in enumerate(self.stories):
            row, look = n - 1 - index, style.model_style(story.place)
            for fault in story.faults:
                stop = story.last_step if fault.stop is None else fault.stop
                axes.fill_between([fault.start, stop], row - 0.14, row + 0.14, color=look["color"], alpha=0.2, lw=0)
            end = story.diverged.step if story.diverged is not None else story.last_step
            axes.plot([story.first_step, end], [row, row], color=look["color"], ls=look["dash"], lw=1.7)
            self._row(axes, story, row, look["color"])
            name = clipped(story.run, 24, keep_end=True)
            axes.annotate(
                name, (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                va="center", fontsize=style.TICK_SIZE, color=style.INK,
            )  # fmt: skip
        for index, story in enumerate(self.stories):  # on top of all
            self._lead(axes, story, n - 1 - index)
        self._mark_selected(axes)

    def _row(self, axes: Any, story: Story, row: int, color: str) -> None:
        """Measurements of probes, alarms, actions and the divergence of one run."""
        onsets = story.onsets
        sound = sorted({check.step for check in story.checks if check.is_sound})
        axes.scatter(sound, [row - 0.22] * len(sound), s=3, color=style.NEUTRAL, lw=0)
        broken = [event.step for event in story.findings]
        axes.scatter(broken, [row - 0.22] * len(broken), s=13, color=style.BROKEN, marker="s", lw=0)
        later = [event.step for event in story.events if event.kind == "alarm" and event not in onsets]
        axes.vlines(later, row - 0.14, row + 0.14, color=color, lw=0.9, alpha=0.7)
        for event in onsets:
            _alarm(axes, event, row, color)
        actions = [event.step for event in story.events if event.kind == "action"]
        axes.scatter(actions, [row] * len(actions), s=34, color=color, marker="D", ec="white", lw=0.8, zorder=5)
        if story.diverged is not None:
            _cross(axes, story.diverged.step, row, color)

    def _lead(self, axes: Any, story: Story, row: int) -> None:
        """An arrow from the first mechanism's alarm to the first established signal, and its length as text."""
        first, last = self.span
        if story.lead is None or not story.lead.meets(first, last):
            return
        start, stop = story.lead.first.step, story.lead.then.step
        height = row + 0.28
        axes.plot([start, start, start, stop], [height - 0.07, height + 0.07, height, height], color=style.INK, lw=1.1)
        axes.scatter([stop], [height], marker=">" if stop >= start else "<", s=18, color=style.INK, lw=0)
        words = lead_in_words(story.lead)
        half = 0.5 * _LETTER * len(words) / _WIDTH * (last - first)
        middle = np.clip([start, stop], first, last).mean()
        x = float(np.clip(middle, first + half, max(last - half, first + half)))
        axes.text(x, height + 0.07, words, ha="center", va="bottom", fontsize=_SMALL, color=style.INK)

    def _evidence(self, story: Story, evidence: EvidencePanel) -> None:
        of_run = f": {story.run}" if len(self.stories) > 1 else ""
        axes = self._panel(f"evidence of a change (1: an alarm){of_run}", evidence.note, evidence.view, is_log=True)
        self._shade(axes, [story])
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
        """One signal of all runs."""
        panel = signal.panel
        axes = self._panel(panel.title, panel.note, panel.view, is_log=panel.is_logarithmic)
        self._shade(axes, self.stories)
        is_crowded = len(signal.bands) >= CROWDED
        for place, band in signal.bands:
            look = {"color": style.NEUTRAL, "dash": "solid"} if place is None else style.model_style(place)
            if not is_crowded:
                alpha = 0.28 if place is None else 0.16
                axes.fill_between(band["step"], band["lower"], band["upper"], color=look["color"], alpha=alpha, lw=0)
                continue
            for edge in ("lower", "upper"):
                axes.plot(band["step"], band[edge], color=look["color"], ls=look["dash"], lw=0.6, alpha=0.8)
        for line, story in zip(panel.lines, self.stories, strict=True):
            look = style.model_style(story.place)
            step, value = decimate(line.step, line.value, _N_BUCKETS)
            marker = {"marker": style.MATPLOTLIB_MARKERS[look["marker"]], "ms": 4, "mew": 0} if line.has_markers else {}
            axes.plot(step, value, color=look["color"], ls=look["dash"], lw=1.25, **marker)
        for line, onset, story in zip(panel.lines, signal.onsets, self.stories, strict=True):
            color = style.model_style(story.place)["color"]
            if onset is not None:
                _alarm(axes, onset[0], onset[1], color)
            if line.cross is not None:
                _cross(axes, line.cross[0], float(np.clip(line.cross[1], *panel.limits)), color)

    def _panel(self, title: str, note: str, view: tuple[float, float], *, is_log: bool) -> Any:
        """A titled frame, the selected step in it; the last one of all has the steps' numbers."""
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
        """Axes below all that is drawn so far, or at a place."""
        from matplotlib.transforms import Bbox

        self._top = self._top - 0.05 - height if bottom is None else bottom
        inches = Bbox.from_bounds(0, self._top, _WIDTH, height)
        axes = self.figure.add_axes((0, 0, 1, 1), label=f"{self._top:.3f}")
        # Only when the figure is drawn: holoviews changes its size after the hooks.
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

    def _text(self, words: str, height: float, **look: Any) -> None:
        """One line of text below all that is drawn so far."""
        self._top -= height
        self._words.append((self._top, words, look))

    def _shade(self, axes: Any, stories: Sequence[Story]) -> None:
        """Where faults were on, and begin and end of the lead time, through the height of a panel."""
        faulty = [story for story in stories if story.faults]
        for story in faulty if len(faulty) < CROWDED else []:  # the lanes show them too
            color = style.model_style(story.place)["color"]
            for fault in story.faults:
                stop = story.last_step if fault.stop is None else fault.stop
                axes.axvspan(fault.start, stop, color=color, alpha=0.09, lw=0)
        for story in stories:
            color = style.model_style(story.place)["color"]
            for event, dash in landmarks(story):
                axes.axvline(event.step, color=color, ls=dash, lw=0.9, alpha=0.75)

    def _mark_selected(self, axes: Any) -> None:
        if self.picture.selected is not None:
            axes.axvline(self.picture.selected, color=style.INK, ls=(0, (1, 2)), lw=1.2, zorder=6)


def _set_ticks(axes: Any, view: tuple[float, float], *, is_log: bool) -> None:
    """Few ticks, plain numbers: powers of ten; over less than 50, also 2 and 5 times these; round ones below 10."""
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
