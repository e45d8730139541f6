"""The data of one step that the training process sends to the kernel for display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.callbacks.alarms import WATCHED
from workbench.plots.timeline_events import TimelineEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import xarray as xr

    from workbench.callbacks.actions import Action
    from workbench.callbacks.alarms import Alarm, Alarms, Attribution
    from workbench.callbacks.alarms.probe_alarms import Check
    from workbench.training.step_record import StepRecord

_SIGNALS = [watched.name for watched in WATCHED]


@dataclass(frozen=True)
class StepNews:
    """The displayed data of one step of a run.

    Attributes:
        step: The step, the number of completed updates.
        loss: Loss of the batch, in nats for cross entropy.
        grad_norm: Gradient norm before clipping.
        cause: Reason why the step counts as diverged; empty otherwise.
        kss_enabled: Whether KSS was on.
        active_faults: Names of the faults that were on.
        spectra: Spectra with a ``step`` dimension of size 1; None if none were due.
        is_watched: Whether the run has alarms.
        alarms: Alarms raised at the step.
        attribution: Attribution of the alarms after the step; None if no alarm was raised.
        events: The alarms and their attributions as events of a timeline.
        checks: Measurements of probes at the step.
        evidence: Names of signals and their evidence, each of shape (signal,); None if no row was completed.
        actions: Actions that alarms have triggered since the previous step.
    """

    step: int
    loss: float
    grad_norm: float
    cause: str = ""
    kss_enabled: bool = False
    active_faults: tuple[str, ...] = ()
    spectra: xr.Dataset | None = None
    is_watched: bool = False
    alarms: tuple[Alarm, ...] = ()
    attribution: Attribution | None = None
    events: tuple[TimelineEvent, ...] = ()
    checks: tuple[Check, ...] = ()
    evidence: tuple[np.ndarray, np.ndarray] | None = None
    actions: tuple[Action, ...] = ()

    @classmethod
    def of(cls, record: StepRecord, alarms: Alarms | None = None, actions: Sequence[Action] = ()) -> StepNews:
        """Create the news from the record of a step and the alarms of the run."""
        known: dict[str, Any] = {} if alarms is None else _known(record, alarms)
        return cls(
            step=record.step,
            loss=record.loss,
            grad_norm=record.grad_norm,
            cause=record.cause,
            kss_enabled=record.kss_enabled,
            active_faults=tuple(record.active_faults),
            spectra=record.spectra,
            alarms=tuple(record.alarms),
            actions=tuple(actions),
            **known,
        )

    @property
    def divergence(self) -> str:
        """The reason why the step counts as diverged, as text; empty otherwise."""
        if self.cause == "loss":
            return f"its loss rose to {self.loss:.3g}"
        if self.cause == "grad_norm":
            return f"its gradient norm rose to {self.grad_norm:.3g}"
        return "its loss or gradients are not finite" if self.cause else ""


def _known(record: StepRecord, alarms: Alarms) -> dict[str, Any]:
    """Return the fields that come from the alarms of a run after a step."""
    events = []
    for alarm in record.alarms:
        place = (at if at >= 0 else None for at in (alarm.layer, alarm.head))
        if alarm.signal not in (*_SIGNALS, *alarms.checks, "data", "limits", "logits"):
            events.append(TimelineEvent(alarm.step, "setting", alarm.signal))
        events.append(TimelineEvent(alarm.step, "alarm", alarm.signal, alarm.score, alarm.message, *place))
    found = alarms.attribute() if record.alarms else None
    if found is not None:
        events.append(TimelineEvent(record.step, "attribution", found.cause, found.score, found.message))
    row = alarms.latest_evidence
    is_new = row is not None and row.step == record.step
    return {
        "is_watched": True,
        "attribution": found,
        "events": tuple(events),
        "checks": tuple(check for check in alarms.checks.values() if check.step == record.step),
        "evidence": (row.coords["signal"], row.values["evidence"]) if row is not None and is_new else None,
    }
