"""Events of a run in the timeline: alarms, faults, actions, the lead time and likely cause of the first alarm."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import xarray as xr

#: Commonly monitored signals; the alarm of a mechanism is early if it precedes theirs.
ESTABLISHED = ("loss", "largest_losses", "grad_norm")


@dataclass(frozen=True)
class TimelineEvent:
    """An event of a run, after ``step`` updates, of a signal or fault (``source``).

    The score is in multiples of the threshold, NaN if there is none; layer and head are None if it concerns none.
    """

    step: int
    kind: str
    source: str = ""
    score: float = math.nan
    message: str = ""
    layer: int | None = None
    head: int | None = None

    @property
    def place(self) -> str:
        """Layer and head as text; empty if there are none."""
        found = [f"{name} {at}" for name, at in (("layer", self.layer), ("head", self.head)) if at is not None]
        return ", ".join(found)

    @property
    def is_established(self) -> bool:
        """Whether it is an alarm of a commonly monitored signal: loss, largest losses or gradient norm."""
        return self.kind == "alarm" and self.source.split(" ")[0] in ESTABLISHED


@dataclass(frozen=True)
class FaultSpan:
    """Steps with an active fault: the first with it, and the first after it (None if it remained active)."""

    name: str
    start: int
    stop: int | None


@dataclass(frozen=True)
class AlarmLead:
    """Lead time from the first alarm of a mechanism to the first established signal or the divergence."""

    first: TimelineEvent
    then: TimelineEvent

    @property
    def n_steps(self) -> int:
        """Number of steps gained; negative if the alarm of the mechanism was later."""
        return self.then.step - self.first.step

    def meets(self, first: float, last: float) -> bool:
        """Return whether any part of it is between two steps."""
        start, stop = sorted([self.first.step, self.then.step])
        return start < last and stop > first


def events_of(run: xr.DataTree) -> list[TimelineEvent]:
    """Return the events of a run by increasing step. Runs of earlier versions have no layer and head."""
    if "events" not in run.children:
        return []
    data = run.children["events"].to_dataset(inherit=False)
    if "step" not in data.variables:
        return []
    n = data["step"].size
    columns = {name: data[name].values.tolist() if name in data.variables else [None] * n for name in _COLUMNS}
    found = [
        TimelineEvent(
            int(step),
            str(kind),
            str(source or ""),
            math.nan if score is None else float(score),
            str(message or ""),
            _place(layer),
            _place(head),
        )
        for step, kind, source, score, message, layer, head in zip(*columns.values(), strict=True)
    ]
    return sorted(found, key=lambda event: event.step)


def alarms_of(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    """Return the alarms among events."""
    return [event for event in events if event.kind == "alarm"]


def onsets_of(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    """Return the first alarm of each signal."""
    first: dict[str, TimelineEvent] = {}
    for event in alarms_of(events):
        first.setdefault(event.source, event)
    return list(first.values())


def divergence_of(events: Iterable[TimelineEvent]) -> TimelineEvent | None:
    """Return the first divergence among events; None if there is none."""
    return next((event for event in events if event.kind == "divergence"), None)


def fault_spans(events: Iterable[TimelineEvent]) -> list[FaultSpan]:
    """Return the spans of active faults: each event toggles one, unless the first one's message says it is off."""
    spans: list[FaultSpan] = []
    since: dict[str, int] = {}
    for event in events:
        if event.kind != "fault":
            continue
        if event.source in since:
            spans.append(FaultSpan(event.source, since.pop(event.source), event.step))
        elif not re.fullmatch(rf"({re.escape(event.source)} )?((is )?switched )?off\.?", event.message):
            since[event.source] = event.step
    spans += [FaultSpan(name, start, None) for name, start in since.items()]
    return sorted(spans, key=lambda span: span.start)


def lead_time(events: Sequence[TimelineEvent]) -> AlarmLead | None:
    """Return the lead of a mechanism's first alarm, from the first fault on, over the established signals, or None."""
    since = min((span.start for span in fault_spans(events)), default=-1)
    alarms = [event for event in alarms_of(events) if event.step >= since]
    first = next((event for event in alarms if not event.is_established), None)
    established = [event for event in alarms if event.is_established]
    if (diverged := divergence_of(events)) is not None and diverged.step >= since:
        established.append(diverged)
    then = min(established, key=lambda event: event.step, default=None)
    return None if first is None or then is None else AlarmLead(first, then)


def signal_of(event: TimelineEvent, names: Iterable[str]) -> str | None:
    """Return the signal of an alarm: its source, or the first signal of the variable in the source; None if unknown."""
    names = list(names)
    if event.source in names:
        return event.source
    return next((name for name in names if event.source and name.split(" ")[0] == event.source.split(" ")[0]), None)


_COLUMNS = ("step", "kind", "source", "score", "message", "layer", "head")


def _place(value: float | None) -> int | None:
    return None if value is None or value != value or value < 0 else int(value)


#: Source of an alarm of a probe -> what the probe checks.
_CHECKED = {"arithmetic": "arithmetic", "gradients": "gradients on their way to the optimizer", "data": "batches"}
#: Source of an alarm at an absolute limit -> what is limited.
_LIMITED = {"logits": "largest attention logit", "limits": "metrics of the updates"}


def account_of(events: Sequence[TimelineEvent], *, last_step: int, is_watched: bool) -> str:
    """Return sentences on the first alarm after the first fault (or the first of all) and its likely cause."""
    alarms, spans = alarms_of(events), fault_spans(events)
    start = spans[0].start if spans else None
    late = [alarm for alarm in alarms if start is None or alarm.step >= start]
    n_before = len(alarms) - len(late)
    before = f" {counted(n_before, 'alarm')} before the fault." if n_before else ""
    if not late:
        if not alarms and not is_watched:
            return ""
        since = "" if start is None else f", {_steps(last_step - start)} after the fault"
        return f"No alarm{' since the fault' if n_before else ''} up to step {last_step:,}{since}.{before}"
    first = late[0]
    since = "" if start is None else f", {_steps(first.step - start)} after the fault"
    settings = {event.source for event in events if event.kind == "setting"}
    what = f"First alarm: step {first.step:,}{since}: {_subject(first, settings)}."
    return f"{what} {_cause(events, first)}{before}"


def _steps(n: int) -> str:
    return counted(n, "step")


def _subject(alarm: TimelineEvent, settings: set[str]) -> str:
    """Return what an alarm is about, where, and how it was detected."""
    if alarm.source in _CHECKED:
        what, how = _CHECKED[alarm.source], "probe"
        what += " of attention" if alarm.source == "arithmetic" and alarm.head is not None else ""
    elif alarm.source in _LIMITED:
        what, how = _LIMITED[alarm.source], "limit"
    else:
        what, how = alarm.source, "setting" if alarm.source in settings else "evidence"
    return f"{', '.join(filter(None, [what, alarm.place]))} ({how})"


def _cause(events: Sequence[TimelineEvent], first: TimelineEvent) -> str:
    """Return the cause attributed to the first alarm, and a later attribution that differs."""
    found = [event for event in events if event.kind == "attribution"]
    # An attribution is recorded when it changes; without one at the alarm, the previous one is still valid.
    known = [event for event in found if event.step <= first.step] or found
    if not known:
        return "Likely cause: unknown."
    likely, latest = known[-1], found[-1]
    later = ""
    if latest.source != likely.source and latest.step > likely.step:
        later = f" From step {latest.step:,} on: {latest.source.replace('_', ' ')}."
    return f"Likely cause: {likely.source.replace('_', ' ')}.{later}"
