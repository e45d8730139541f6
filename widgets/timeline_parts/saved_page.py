"""The timeline as one interactive HTML file with the script of the widget and all data that it may request."""

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

#: Maximum number of buckets of a line, each of which keeps its lowest and highest value.
_N_BUCKETS = 1400
#: Maximum bytes of all lines, which limits the points per line, and of all details, which limits the steps.
_MOST_OF_LINES, _MOST_OF_DETAILS = 6_000_000, 4_000_000
#: Maximum number of steps with details, in addition to first alarms.
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
<noscript>This page needs JavaScript to draw its figure.</noscript>
</main>
<script type="text/plain" id="record">{record}</script>
<script type="module">
{script}
</script>
</body>
</html>
"""


def saved_page(canvas: TimelineCanvas, mapped: str, *, summary: str, theme: str) -> str:
    """Return the page as HTML."""
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
    """Return all data that the page may request: signals of all runs, and details of first alarms and some steps."""
    runs = list(canvas.runs.values())
    names = list(dict.fromkeys(name for run in runs for name in run.entries))
    n_lines = sum(len(run.entries) for run in runs)
    n_buckets = int(np.clip(_MOST_OF_LINES / (2 * 8 * max(n_lines, 1)), 100, _N_BUCKETS))
    content, buffers = canvas.content(CanvasPart(runs, names, canvas.extent, n_buckets))

    def packed_at(step: int, signal: str, **of_alarm: Any) -> dict[str, Any]:
        return selected(PanelSelection.of(runs, step, signal, **of_alarm), runs, buffers) or {}

    alarms = sorted(((run, event) for run in runs for event in run.run_events.onsets), key=lambda pair: pair[1].step)
    has_layers = {name for run in runs for name, entry in run.entries.items() if entry.places}
    alarmed = {(run.name, event.source): signal_of(event, names) or "" for run, event in alarms}
    shown = [mapped, *canvas.settings.signals, *alarmed.values()]
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
    select, chosen = None, canvas.settings.selection
    if chosen is not None:
        signal = chosen.signal if chosen.event is None else chosen.event.source
        select = {"step": chosen.step, "signal": signal, "run": chosen.run or None}
        if chosen.event is None:
            moments.append(packed_at(chosen.step, chosen.signal))
    return content | {"moments": moments, "mappable": mappable, "select": select}, buffers.done


def packed(content: Mapping[str, Any], buffers: list[bytes]) -> str:
    """Return JSON and arrays compressed as one text, which `saved_page.js` unpacks."""
    head = json.dumps({**content, "sizes": list(map(len, buffers))}, allow_nan=False).encode()
    content_bytes = b"".join([len(head).to_bytes(4, "little"), head, *buffers])
    return base64.b64encode(zlib.compress(content_bytes, 9)).decode()


def _spread(steps: np.ndarray, n: int) -> list[int]:
    """Return at most n evenly spaced elements of increasing steps."""
    kept = np.unique(np.linspace(0, len(steps) - 1, min(n, len(steps))).round().astype(int))
    return [int(step) for step in steps[kept]]
