"""What the timeline says in words: lead times, the first alarm of each run, and the meaning of its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.plots.timeline_panels import Story


def lead_in_words(lead: Any) -> str:
    """The lead time as text, such as "effective_rank D2, 620 steps before grad_norm"."""
    first, then = lead.first.source, "divergence" if lead.then.kind == "divergence" else lead.then.source
    n = abs(lead.n_steps)
    if n == 0:
        return f"{first} together with {then}"
    return f"{first}, {n:,} step{'s' if n > 1 else ''} {'before' if lead.n_steps > 0 else 'after'} {then}"


def landmarks(story: Story) -> list[tuple[TimelineEvent, str]]:
    """Vertical lines through all panels where the lead time begins and ends; or the first alarm and the divergence."""
    if story.lead is not None:
        return [(story.lead.first, "dashed"), (story.lead.then, "dotted")]
    first = story.onsets[:1]
    return [(first[0], "dashed")] if first else []


def accounts(stories: Sequence[Story]) -> list[str]:
    """The first alarm and its likely cause of each run."""
    told = [(story.run, story.account) for story in stories if story.account]
    return [account if len(stories) == 1 else f"{run}: {account}" for run, account in told]


def marks_in_words(stories: Sequence[Story]) -> list[str]:
    """Meaning of the marks that occur."""
    onsets = [event for story in stories for event in story.onsets]
    alarms = [event for story in stories for event in story.events if event.kind == "alarm"]
    words = {
        "shaded: fault on": any(story.faults for story in stories),
        "▼ first alarm of a mechanism": any(not event.is_established for event in onsets),
        "▽ of loss, gradient norm, spikes": any(event.is_established for event in onsets),
        "| later alarm": len(alarms) > len(onsets),
        "◆ action": any(event.kind == "action" for story in stories for event in story.events),
        "× divergence": any(story.diverged is not None for story in stories),
        "· probe, sound": any(check.is_sound for story in stories for check in story.checks),
        "■ probe, broken": any(story.findings for story in stories),
    }
    return [word for word, occurs in words.items() if occurs] or ["no alarms, faults or actions recorded"]
