"""Several runs on one axis of steps: their signals, their events, and which signal changed first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import counted, percent_range
from workbench.io.run_access import named_runs
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.timeline_drawing import Drawing
from workbench.plots.timeline_events import signal_of
from workbench.plots.timeline_matplotlib import TimelinePicture
from workbench.plots.timeline_panels import SignalPanel, Story
from workbench.plots.traces_figure import Trace
from workbench.studies import signals as sig
from workbench.studies.lines import checked_quantiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr


@redrawable
def timeline(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    *,
    signals: Sequence[str] | None = None,
    reduce: str | None = None,
    healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None = None,
    band: tuple[float, float] = (0.05, 0.95),
    shows_all: bool = False,
    places: Mapping[str, int] | None = None,
    view: tuple[float, float] | None = None,
    selected: int | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw signals of several runs over one axis of steps, with alarms, faults, actions, divergence and lead times.

    The first panel has one lane per run and shows its events: where a fault was on, the first alarm of each signal
    (filled: a mechanism; hollow: loss, gradient norm or spike score), actions, the divergence, the lead time from
    the first mechanism's alarm to the first established signal or divergence, and the measurements of probes: a dot
    where they were sound, a square where they found a fault. Above it, a sentence names the first alarm and its likely
    cause. Below is the evidence of each run that has it: the signals that reached an alarm first, or are nearest to
    one (`workbench.alarms.evidence_of` adds it to older runs). Then one panel for each signal and one line for each
    run; alarms are on the line of their own signal.

    Args:
        runs: One run, or several by name. They may differ in recorded variables and steps, and need no events.
        signals: Names as in ``wb.signals.names(run)``, such as ``"effective_rank D2"``. None: loss and gradient norm,
            the signals that alarmed first, and those that distinguish mechanisms.
        reduce: Reduction over layers, heads and the like: ``"min"``, ``"max"`` or ``"mean"``. None: the worst, the
            minimum of ranks and entropies and the maximum of the rest.
        healthy: Runs known to be healthy: the range between two quantiles of their values, along the steps, is shaded.
            A number: the range of each run's own values before that step.
        band: The two quantiles of that range.
        shows_all: Whether the axes fit every run, as in `traces`.
        places: Style number of each run (`style.model_style`), by name; None: in the order given.
        view: First and last step in view, to whose values the axes are fitted; None: all.
        selected: A step to mark in all panels; None: none.
        backend: ``"bokeh"`` for the screen (linked zoom and cursor, details under the pointer) or ``"matplotlib"``.

    Returns:
        A holoviews Layout with options for that backend only; of matplotlib one element, which draws all panels. Lines
        of more than a few thousand points are drawn as the lowest and highest value of short stretches, so that no
        spike is lost.

    Raises:
        SchemaError: If there is no run, or no run has one of the signals.
        OptionError: If the backend, the reduction, the band, or a run's place does not exist.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> figure = wb.plots.timeline({"a failed run": run}, signals=["loss", "effective_rank D2"])
        >>> len(figure)  # panels
        3
    """
    trees = named_runs(runs, needs_spectra=False)
    order = style.model_places(trees, places)
    quantiles = checked_quantiles(band)
    if reduce is not None and reduce not in sig.REDUCTIONS:
        raise OptionError(f"The reduction is '{reduce}', expected one of {', '.join(sig.REDUCTIONS)}.")
    references = healthy_runs(healthy)
    stories = [Story.of(name, run, place) for place, (name, run) in zip(order, trees.items(), strict=True)]
    chosen = chosen_signals(trees, stories, signals)
    panels = []
    for name in chosen:
        lines = [_line(run, name, story, reduce) for run, story in zip(trees.values(), stories, strict=True)]
        bands = _bands(lines, stories, references, healthy, name, reduce, quantiles)
        panels.append(SignalPanel.of(name, lines, stories, bands, shows_all=shows_all, span=view))
    span = view or _view(panels, stories)
    word = _band_in_words(references, healthy, quantiles)
    with style.drawing(backend) as hv:
        if backend == "matplotlib":
            return TimelinePicture(stories, panels, span, word, selected).element(hv)
        drawing = Drawing(hv, span, stories, selected)
        drawn = [drawing.lane(word)]
        drawn += [drawing.evidence(story, story.evidence) for story in stories if story.evidence is not None]
        drawn += [drawing.panel(panel, is_last=panel is panels[-1]) for panel in panels]
        return style.laid_out(hv, drawn, backend)


@redrawable
def sentence_alone(sentence: str, *, backend: str = "bokeh") -> Any:
    """A small figure that says why there is nothing to draw yet."""
    with style.drawing(backend) as hv:
        words = hv.Labels({("x", "y"): [(0.0, 0.5)], "text": [sentence]}, ["x", "y"], "text")
        frame = {"xlim": (0, 1), "ylim": (0, 1), "xaxis": None, "yaxis": None, "title": "", "backend": backend}
        if backend == "bokeh":
            text: dict[str, Any] = {"text_color": style.NEUTRAL, "text_align": "left", "text_font_size": "11pt"}
            hooks = [style.dress_bokeh]
            return words.opts(**text, **frame, frame_width=700, frame_height=60, toolbar=None, hooks=hooks)
        text = {"color": style.INK, "horizontalalignment": "left", "size": 11}
        hooks = [_no_frame_matplotlib]
        return words.opts(**text, **frame, fig_inches=(7.0, 0.6), aspect=11.0, hooks=hooks)


def _no_frame_matplotlib(plot: Any, element: Any) -> None:
    """A holoviews hook: no axes, which have nothing to show."""
    plot.handles["axis"].set_axis_off()


def chosen_signals(
    runs: Mapping[str, xr.DataTree], stories: Sequence[Story], signals: Sequence[str] | None
) -> list[str]:
    """The requested signals, or a default selection.

    Raises:
        SchemaError: If no run has one of them, or none is named.
    """
    known = list(dict.fromkeys(name for run in runs.values() for name in sig.names(run)))
    if signals is None:
        onsets = sorted((event for story in stories for event in story.onsets), key=lambda event: event.step)
        alarmed = [name for event in onsets if (name := signal_of(event, known)) is not None]
        signals = sig.default_names(runs, alarmed) or known[:4]
    signals = [signals] if isinstance(signals, str) else list(dict.fromkeys(signals))
    for name in signals:
        if name not in known:
            choice = f"choose from {', '.join(known)}" if known else "the runs hold nothing that has steps"
            raise SchemaError(f"No run has a signal '{name}'; {choice}.")
    if not signals:
        choice = f"choose from {', '.join(known)}" if known else "the runs hold nothing that has steps"
        raise SchemaError(f"No signal was named; {choice}.")
    return signals


def healthy_runs(healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None) -> dict[str, xr.DataTree]:
    """The runs in ``healthy``; none if it is a number of steps or None.

    Raises:
        SchemaError: If it is neither runs nor a number.
        OptionError: If it is a number below 2.
    """
    if healthy is None:
        return {}
    if isinstance(healthy, int | np.integer) and not isinstance(healthy, bool):
        if healthy < 2:
            raise OptionError(f"healthy is {healthy}, expected at least 2 steps, or healthy runs.")
        return {}
    return named_runs(cast("Any", healthy), needs_spectra=False)


def _line(run: xr.DataTree, name: str, story: Story, reduce: str | None) -> Trace:
    """One signal of a run; without values if the run lacks it, which the panel then states."""
    diverged = None if story.diverged is None else story.diverged.step
    if name not in sig.catalogue(run):
        return Trace(story.run, name, name, np.zeros(0, int), np.zeros(0), diverged=diverged)
    found = sig.read(run, name, reduce=reduce)
    title = found.long_name + (f" ({found.unit})" if found.unit not in ("1", "") else "")
    return Trace(story.run, title, found.variable, found.step, found.value, found.part == "spectra", diverged=diverged)


def _bands(
    lines: list[Trace],
    stories: Sequence[Story],
    references: Mapping[str, xr.DataTree],
    healthy: Any,
    name: str,
    reduce: str | None,
    quantiles: tuple[float, float],
) -> list[tuple[int | None, sig.SignalBand]]:
    if references:
        found = [sig.read(run, name, reduce=reduce) for run in references.values() if name in sig.catalogue(run)]
        return [(None, sig.healthy_band([(line.step, line.value) for line in found], quantiles=quantiles))]
    if healthy is None:
        return []
    return [
        (story.place, own_band(line.step, line.value, int(healthy), quantiles))
        for line, story in zip(lines, stories, strict=True)
    ]


def own_band(step: np.ndarray, value: np.ndarray, before: int, quantiles: tuple[float, float]) -> sig.SignalBand:
    """The range of a line's own values before a step, repeated over all its steps."""
    start = value[(step < before) & np.isfinite(value)]
    if not len(start):
        return sig.SignalBand(np.zeros(0), np.zeros(0), np.zeros(0))
    lower, upper = np.quantile(start, quantiles)
    return sig.SignalBand(step[[0, -1]].astype(float), np.repeat(lower, 2), np.repeat(upper, 2))


def _band_in_words(references: Mapping[str, Any], healthy: Any, quantiles: tuple[float, float]) -> str:
    share = percent_range(*quantiles)
    if references:
        return f"grey band: {share} of {counted(len(references), 'healthy run')}"
    return "" if healthy is None else f"band: {share} of a run's own values before step {healthy}"


def _view(panels: Sequence[SignalPanel], stories: Sequence[Story]) -> tuple[float, float]:
    ends = [end for story in stories for end in (story.first_step, story.last_step)]
    steps = [line.step[[0, -1]] for panel in panels for line in panel.panel.lines if len(line.step)]
    first, last = min(ends), max(ends, default=1)
    if steps:
        first, last = min(first, np.min(steps)), max(last, np.max(steps))
    space = 0.02 * (last - first) or 0.5
    return float(first - space), float(last + space)
