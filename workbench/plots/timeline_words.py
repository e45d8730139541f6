"""Texts of the timeline: lead times, the first alarm of each run, and the explanation of its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.formatting import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_panels import RunEvents


EVIDENCE_TITLE = "Evidence of a change (alarm at 1)"


def lead_in_words(lead: Any) -> str:
    """Return the lead time as text, such as "effective_rank D2, 620 steps before grad_norm"."""
    first, then = lead.first.source, "divergence" if lead.then.kind == "divergence" else lead.then.source
    n = abs(lead.n_steps)
    if n == 0:
        return f"{first} at the same step as {then}"
    return f"{first}, {n:,} step{'s' if n > 1 else ''} {'before' if lead.n_steps > 0 else 'after'} {then}"


def landmarks(run_events: RunEvents) -> list[tuple[TimelineEvent, str]]:
    """Return events with a line through all panels, and its dash: both ends of the lead time, or the first alarm."""
    if run_events.lead is not None:
        return [(run_events.lead.first, "dashed"), (run_events.lead.then, "dotted")]
    first = run_events.onsets[:1]
    return [(first[0], "dashed")] if first else []


def accounts(all_events: Sequence[RunEvents]) -> list[str]:
    """Return the first alarm and its likely cause for each run."""
    found = [(run_events.run, run_events.account) for run_events in all_events if run_events.account]
    return [account if len(all_events) == 1 else f"{run}: {account}" for run, account in found]


def marks_in_words(all_events: Sequence[RunEvents]) -> list[str]:
    """Return explanations of the marks that occur."""
    onsets = [event for run_events in all_events for event in run_events.onsets]
    alarms = [event for run_events in all_events for event in run_events.events if event.kind == "alarm"]
    words = {
        "shaded: fault active": any(run_events.faults for run_events in all_events),
        "▼ first alarm of a mechanism": any(not event.is_established for event in onsets),
        "▽ first alarm of loss or gradient norm": any(event.is_established for event in onsets),
        "| later alarm": len(alarms) > len(onsets),
        "◆ action": any(event.kind == "action" for run_events in all_events for event in run_events.events),
        "× divergence": any(run_events.diverged is not None for run_events in all_events),
        "· probe passed": any(check.is_sound for run_events in all_events for check in run_events.checks),
        "■ probe failed": any(run_events.findings for run_events in all_events),
    }
    return [word for word, occurs in words.items() if occurs] or [no_alarms_in_words(all_events)]


def no_alarms_in_words(all_events: Sequence[RunEvents]) -> str:
    """Return what it means that no run has an alarm: that none was raised, or that no alarms were attached."""
    watched = [run_events.run for run_events in all_events if run_events.evidence is not None]
    others = [run_events.run for run_events in all_events if run_events.evidence is None]
    if watched and others:
        return f"alarms attached, none raised: {listed(watched)}; recorded without alarms: {listed(others)}"
    return "alarms attached, none raised" if watched else "recorded without alarms"
