"""Content of the panels of the timeline: events and evidence of each run, each signal of all runs, and the texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import counted, listed
from workbench.plots.curve_figures import _WIDE as WIDE
from workbench.plots.curve_figures import BOUNDED, UNBOUNDED, Trace, TracesPanel
from workbench.plots.style import depth_colors
from workbench.plots.timeline_events import (
    AlarmLead,
    FaultSpan,
    TimelineEvent,
    account_of,
    divergence_of,
    events_of,
    fault_spans,
    lead_time,
    onsets_of,
    signal_of,
)
from workbench.studies.signals import Check, SignalBand, checks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from workbench.plots.timeline_events import TimelineEvent

#: Evidence at which an alarm is raised.
ALARM = 1.0
#: Number of signals that are drawn.
_N_SIGNALS = 4
#: Ends of the logarithmic axis; values beyond them are drawn at its ends.
LOWEST, FARTHEST = 0.1, 1000.0
_TOPS = (2.0, 10.0, 100.0, FARTHEST)


@dataclass(frozen=True)
class EvidenceLine:
    """Evidence of one signal relative to that of an alarm, clipped to the axis, shape (row,)."""

    signal: str
    color: str
    step: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class EvidencePanel:
    """Evidence of a run: signals that alarmed first, then the nearest to it; the ends of the log axis; a remark."""

    lines: list[EvidenceLine]
    view: tuple[float, float]
    note: str

    @classmethod
    def of(cls, run: xr.DataTree) -> EvidencePanel | None:
        """Read the evidence of a run; None if it has none. `workbench.alarms.evidence_of` computes it."""
        if "evidence" not in run.children:
            return None
        data = run.children["evidence"].to_dataset(inherit=False)
        step, names = data["step"].values.astype(np.int64), data["signal"].values.astype(str)
        values = data["evidence"].transpose("step", "signal").values.astype(float)
        is_known = ~np.isnan(values)
        known = np.flatnonzero(is_known.any(axis=0))
        if not len(known):
            return cls(
                [], (LOWEST, _TOPS[0]), "no evaluated step yet: the first 200 steps and the warm-up are excluded"
            )
        peaks = np.nanmax(values[:, known], axis=0)
        reached = np.where(values[:, known] >= ALARM, step[:, None], np.inf).min(axis=0)
        chosen = sorted(known[np.lexsort([-peaks, reached])[:_N_SIGNALS]].tolist())
        top = np.nanmax(values[:, chosen])
        beyond = [str(names[i]) for i in chosen if np.nanmax(values[:, i]) > FARTHEST]
        lines = []
        for i, color in zip(chosen, depth_colors(len(chosen)), strict=True):
            here = is_known[:, i]
            lines.append(EvidenceLine(str(names[i]), color, step[here], np.clip(values[here, i], LOWEST, FARTHEST)))
        n_others = len(known) - len(chosen)
        notes = [
            f"{counted(n_others, 'weaker signal')} not shown" if n_others else "",
            f"{listed(beyond)} above {FARTHEST:g}" if beyond else "",
        ]
        high = next(end for end in _TOPS if top <= end or end == FARTHEST)
        return cls(lines, (LOWEST, high), "; ".join(filter(None, notes)))


#: On a logarithmic axis, values above the usual ones by more than this factor are out of view.
_FARTHEST_VALUE = 1e3


@dataclass(frozen=True)
class RunEvents:
    """Events of one run in a style, by increasing step, its spans of faults, and its divergence, if any.

    ``lead`` runs from the first alarm of a mechanism to the first established signal, None unless both occurred;
    ``checks`` are measurements of the probes.
    """

    run: str
    place: int
    events: list[TimelineEvent] = field(default_factory=list)
    faults: list[FaultSpan] = field(default_factory=list)
    lead: AlarmLead | None = None
    diverged: TimelineEvent | None = None
    first_step: int = 0
    last_step: int = 0
    checks: list[Check] = field(default_factory=list)
    evidence: EvidencePanel | None = None

    @classmethod
    def of(cls, name: str, run: xr.DataTree, place: int) -> RunEvents:
        """Read the events of a run, if it has any."""
        events = events_of(run)
        parts = [node.to_dataset() for node in run.children.values()]
        found = [part["step"].values for part in parts if "step" in part.variables]
        steps = np.concatenate([np.atleast_1d(step) for step in found] or [np.zeros(0)])
        first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        spans, lead, diverged = fault_spans(events), lead_time(events), divergence_of(events)
        return cls(name, place, events, spans, lead, diverged, first, last, checks_of(run), EvidencePanel.of(run))

    @property
    def account(self) -> str:
        """First alarm and its likely cause, or that there was none; empty if the run was not monitored."""
        return account_of(self.events, last_step=self.last_step, is_watched=self.evidence is not None)

    @property
    def findings(self) -> list[TimelineEvent]:
        """Probe measurements that found a fault, and alarms of the data, of which every batch is checked."""
        broken = [TimelineEvent(c.step, "probe", c.signal, message=c.message) for c in self.checks if not c.is_sound]
        data = [event for event in self.events if event.kind == "alarm" and event.source == "data"]
        return sorted([*broken, *data], key=lambda event: event.step)

    @property
    def onsets(self) -> list[TimelineEvent]:
        """First alarm of each signal."""
        return onsets_of(self.events)


@dataclass(frozen=True)
class SignalPanel:
    """One signal of all runs, ready to be drawn: panel, first alarms, and bands (place None: reference runs)."""

    name: str
    panel: TracesPanel
    onsets: list[tuple[TimelineEvent, float] | None]
    bands: list[tuple[int | None, dict[str, np.ndarray]]]

    @classmethod
    def of(
        cls,
        name: str,
        lines: list[Trace],
        all_events: Sequence[RunEvents],
        bands: list[tuple[int | None, SignalBand]],
        *,
        shows_all: bool = False,
        span: tuple[float, float] | None = None,
    ) -> SignalPanel:
        """Choose the axis and place the alarms on their lines; see `panel_of`."""
        panel = panel_of(lines, shows_all=shows_all, span=span)
        onsets: list[tuple[TimelineEvent, float] | None] = []
        for line, run_events in zip(lines, all_events, strict=True):
            own = [event for event in run_events.onsets if signal_of(event, [name]) == name]
            columns = line.columns
            if not own or not len(columns["step"]):
                onsets.append(None)
                continue
            row = max(int(np.searchsorted(columns["step"], own[0].step, side="right")) - 1, 0)
            onsets.append((own[0], float(np.clip(columns["value"][row], *panel.limits))))
        low, high = panel.view
        clipped = []
        for place, found in bands:
            edges = {"lower": np.clip(found.lower, low, high), "upper": np.clip(found.upper, low, high)}
            clipped.append((place, {"step": found.step, **edges}))
        return cls(name, panel, onsets, clipped)


@dataclass(frozen=True)
class PanelAxis:
    """Axis of a signal."""

    low: float
    high: float
    is_logarithmic: bool

    @classmethod
    def of(cls, variable: str, values: np.ndarray, *, shows_all: bool = False) -> PanelAxis:
        """Choose the axis as in `traces`, but with the divergence in view."""
        if not len(values):
            return cls(0.0, 1.0, False)
        low, high = float(values.min()), float(values.max())
        is_wide = variable in UNBOUNDED or high > WIDE * low
        is_logarithmic = bool(variable not in BOUNDED and low > 0 and is_wide)
        if not shows_all and variable not in BOUNDED:
            usual = float(np.quantile(values, 0.8))
            farthest = usual * _FARTHEST_VALUE if is_logarithmic else usual + WIDE * (usual - low)
            high = min(high, farthest) if farthest > low else high
        return cls(low, high, is_logarithmic)


def panel_of(lines: list[Trace], *, shows_all: bool = False, span: tuple[float, float] | None = None) -> TracesPanel:
    """Return the lines of one signal with their axis, which fits the view or all values, and a note on the rest."""
    values = [_in_view(line, span) for line in lines]
    pooled = np.concatenate(values)
    axis = PanelAxis.of(lines[0].variable, pooled, shows_all=shows_all)
    note = TracesPanel.of(lines, shows_all=True).note
    beyond = [
        (f"{line.run} " if len(lines) > 1 else "") + f"up to {top:.3g}, above the axis"
        for line, value in zip(lines, values, strict=True)
        if (top := value.max(initial=-np.inf)) > axis.high
    ]
    return TracesPanel(lines, (axis.low, axis.high), axis.is_logarithmic, "; ".join(filter(None, [note, *beyond])))


def _in_view(line: Trace, span: tuple[float, float] | None) -> np.ndarray:
    """Return the finite values of a line from a first to a last step."""
    columns = line.columns
    first, last = span or (-np.inf, np.inf)
    return columns["value"][(columns["step"] >= first) & (columns["step"] <= last)]


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
