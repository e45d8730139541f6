"""Summary of the first alarm of a run and its likely cause, as sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.formatting import counted, percent
from workbench.plots.timeline_events import alarms_of, fault_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.plots.timeline_events import TimelineEvent

#: Source of an alarm of a probe -> what the probe checks.
_CHECKED = {
    "arithmetic": "arithmetic",
    "gradients": "gradients on their way to the optimizer",
    "data": "batches",
}
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
        later = f" From step {latest.step:,} on: {_named(latest)}."
    return f"Likely cause: {_named(likely)}.{later}"


def _named(attribution: TimelineEvent) -> str:
    probability = f" ({percent(attribution.score)})" if math.isfinite(attribution.score) else ""
    return f"{attribution.source.replace('_', ' ')}{probability}"
