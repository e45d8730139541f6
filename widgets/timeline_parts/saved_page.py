"""The timeline as one HTML file that stays interactive: the widget's own script, and all that it may ask for."""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import counted, listed
from workbench.plots.timeline_events import signal_of
from workbench.widgets.timeline_parts.canvas import N_LISTED, CanvasPart
from workbench.widgets.timeline_parts.packing import selected
from workbench.widgets.timeline_parts.selection import PanelSelection

if TYPE_CHECKING:
    from workbench.widgets.timeline_parts.canvas import TimelineCanvas

#: Buckets of a line, each of which keeps its lowest and highest value: at most some 4,000 points.
_N_BUCKETS = 1400
#: Bytes of all lines, above which lines have fewer points, and of all details, above which fewer steps have them.
_MOST_OF_LINES, _MOST_OF_DETAILS = 6_000_000, 4_000_000
#: Steps with details at most, besides first alarms.
_N_STEPS = 24

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<main class="workbench-{theme}">
<h1>{title}</h1>
<p>{summary}</p>
<div id="timeline"></div>
<noscript>This page draws its figure with a script.</noscript>
</main>
<script type="text/plain" id="record">{record}</script>
<script type="module">
{script}
</script>
</body>
</html>
"""


def saved_page(canvas: TimelineCanvas, mapped: str, *, summary: str, theme: str) -> str:
    """The page.

    Args:
        canvas: The figure; runs that are hidden are in the file too.
        mapped: Signal whose layers are shown where none is asked for; empty: no signal has layers.
        summary: What is shown, in one sentence.
        theme: Theme of the widget.
    """
    here = Path(__file__)
    script = str(canvas._esm) + "\n" + here.with_name("saved_page.js").read_text()
    return _PAGE.format(
        title=html.escape(
            f"Timeline of {listed(list(canvas.runs)) if len(canvas.runs) < 3 else counted(len(canvas.runs), 'run')}"
        ),
        summary=html.escape(summary),
        theme=theme,
        css=here.with_name("saved_page.css").read_text() + str(canvas._css),
        record=packed(*record_of(canvas, mapped)),
        script=script.replace("</", "<\\/"),
    )


def record_of(canvas: TimelineCanvas, mapped: str) -> tuple[dict[str, Any], list[bytes]]:
    """All that the page may ask for: all signals of all runs, and the details of first alarms and of some steps."""
    runs = list(canvas.runs.values())
    names = list(dict.fromkeys(name for run in runs for name in run.entries))
    n_lines = sum(len(run.entries) for run in runs)
    n_buckets = int(np.clip(_MOST_OF_LINES / (2 * 8 * max(n_lines, 1)), 100, _N_BUCKETS))
    content, buffers = canvas.content(CanvasPart(runs, names, canvas.extent, n_buckets))

    def packed_at(step: int, signal: str, **of_alarm: Any) -> dict[str, Any]:
        return selected(PanelSelection.of(runs, step, signal, **of_alarm), runs, buffers) or {}

    alarms = sorted(((run, event) for run in runs for event in run.story.onsets), key=lambda pair: pair[1].step)
    has_layers = {name for run in runs for name, entry in run.entries.items() if entry.places}
    alarmed = {(run.name, event.source): signal_of(event, names) or "" for run, event in alarms}
    shown = [mapped, *canvas.wishes.signals, *alarmed.values()]
    mappable = list(dict.fromkeys(name for name in shown if name in has_layers)) or [""]

    moments = []
    for run, event in alarms[:N_LISTED]:
        signal = alarmed[run.name, event.source]
        moments.append(
            packed_at(event.step, signal if signal in has_layers else mappable[0], run=run.name, event=event)
        )
    steps = np.unique(np.concatenate([np.zeros(0, int), *(run.recorded_steps for run in runs)]))
    if len(steps):
        before = sum(map(len, buffers.done))
        moments += [packed_at(int(steps[-1]), signal) for signal in mappable]
        taken = sum(map(len, buffers.done)) - before
        room = int(np.clip(_MOST_OF_DETAILS / max(taken, 1), 4, _N_STEPS))
        moments += [packed_at(step, signal) for step in _spread(steps[:-1], room - 1) for signal in mappable]
    select, chosen = None, canvas.wishes.selection
    if chosen is not None:
        signal = chosen.signal if chosen.event is None else chosen.event.source
        select = {"step": chosen.step, "signal": signal, "run": chosen.run or None}
        if chosen.event is None:
            moments.append(packed_at(chosen.step, chosen.signal))
    return content | {"moments": moments, "mappable": mappable, "select": select}, buffers.done


def packed(content: Mapping[str, Any], buffers: list[bytes]) -> str:
    """Compressed JSON and arrays as one text; `saved_page.js` takes it apart."""
    head = json.dumps({**content, "sizes": list(map(len, buffers))}, allow_nan=False).encode()
    whole = b"".join([len(head).to_bytes(4, "little"), head, *buffers])
    return base64.b64encode(zlib.compress(whole, 9)).decode()


def _spread(steps: np.ndarray, n: int) -> list[int]:
    """At most so many of rising steps, evenly spread over them."""
    kept = np.unique(np.linspace(0, len(steps) - 1, min(n, len(steps))).round().astype(int))
    return [int(step) for step in steps[kept]]
