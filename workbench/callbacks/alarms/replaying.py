"""Replay of a recorded run through alarms, the alarms that it recorded, and their lead time over the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.alarms import Alarms
from workbench.callbacks.alarms.run_evidence import observations
from workbench.callbacks.alarms.watched import WATCHED
from workbench.callbacks.observation import Alarm, Observation
from workbench.schema.runs import EVIDENCE

if TYPE_CHECKING:
    import xarray as xr


#: Steps after an action of `workbench.Actions` in which no alarm is raised.
REST = 60


def replay(run: xr.DataTree, alarms: Alarms) -> list[Alarm]:
    """Pass a recorded run through alarms, and return the alarms raised.

    After each action of the run the alarms rest, as they did during the run.

    Args:
        run: Run from `workbench.open_run`.
        alarms: Alarms that receive the record; afterwards they are in the state at the end of the run.

    Returns:
        Alarms in the order of their steps.

    Raises:
        SchemaError: If the run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> loss = np.r_[3.0 + 0.1 * np.sin(np.arange(300)), np.full(50, 30.0)]
        >>> monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(350)})
        >>> raised = wb.alarms.replay(xr.DataTree.from_dict({"/monitors": monitors}), wb.Alarms())
        >>> raised[0].signal, raised[0].step >= 300
        ('loss', True)

    See Also:
        `workbench.alarms.recorded_alarms`: The alarms that a run recorded itself.
        `workbench.alarms.evidence_of`: The evidence at every step.
    """
    for _ in _observed(run, alarms):
        pass
    return list(alarms.raised)


def evidence_of(run: xr.DataTree, alarms: Alarms | None = None) -> xr.Dataset:
    """Compute the part ``evidence`` of a run that was recorded without it, by replaying the record.

    ``run["evidence"] = xr.DataTree(wb.alarms.evidence_of(run))`` adds it to a run, for `workbench.plots.timeline` and
    `workbench.widgets.Timeline`.

    Args:
        run: Run from `workbench.open_run`.
        alarms: Alarms that receive the record, in their current state; None for new ones with default options.

    Returns:
        Dataset with dims ``step`` and ``signal``: ``evidence`` over the threshold of an alarm, as described in
        ``schema.EVIDENCE``. These are the values that the same alarms would have written during training.

    Raises:
        SchemaError: If the run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> loss = np.r_[3.0 + 0.1 * np.sin(np.arange(300)), np.full(50, 30.0)]
        >>> monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(350)})
        >>> found = wb.alarms.evidence_of(xr.DataTree.from_dict({"/monitors": monitors}))
        >>> is_alarm = found["evidence"].sel(signal="loss") >= 1
        >>> bool(is_alarm.sel(step=slice(299)).any()), bool(is_alarm.sel(step=slice(300, None)).any())
        (False, True)

    See Also:
        `workbench.plots.timeline`: Draws a run with its evidence.
        `workbench.alarms.replay`: The alarms alone.
    """
    import xarray as xr

    alarms = Alarms() if alarms is None else alarms
    rows = [row for each in _observed(run, alarms) if (row := alarms._evidence_row(each)) is not None]
    names = [watched.name for watched in WATCHED]
    values = np.array([row.values["evidence"] for row in rows]).reshape(len(rows), len(names))
    variable = EVIDENCE["evidence"]
    coords = {"step": np.array([row.step for row in rows], dtype=np.int64), "signal": names}
    return xr.Dataset({"evidence": (variable.dims, values, variable.attrs)}, coords)


def _observed(run: xr.DataTree, alarms: Alarms) -> Iterator[Observation]:
    """Yield the observations of a run, each after the alarms have processed it."""
    answered = action_steps(run)
    for observation in observations(run):
        while answered and answered[0] <= observation.step:
            alarms.rest(answered.pop(0), n_steps=REST)
        alarms.observe(observation)
        yield observation
    for step in answered:
        alarms.rest(step, n_steps=REST)


def action_steps(run: xr.DataTree) -> list[int]:
    """Return the steps after which alarms triggered actions in a recorded run, in increasing order."""
    if "events" not in run.children:
        return []
    events = run.children["events"].to_dataset()
    is_action = (events["kind"].values == "action") & (events["source"].values != "optimizer")
    return sorted({int(step) for step in events["step"].values[is_action]})


_OUTCOMES = frozenset(watched.name for watched in WATCHED if watched.is_outcome)


@dataclass(frozen=True)
class LeadTime:
    """First warning of each kind.

    Attributes:
        mechanism: First alarm of a mechanism monitor; None if there was none.
        outcome: First alarm of the losses or the gradient norm; None if there was none.
        divergence: Step at which the run diverged; None if it did not.
        by_outcome: Step of the first alarm of each outcome signal.

    Example:
        >>> import workbench as wb
        >>> alarm = wb.alarms.Alarm(100, "effective_rank D2", 1, 2, 3.5, 1.1, is_outcome=False, message="")
        >>> wb.alarms.LeadTime(mechanism=alarm, outcome=None, divergence=130, by_outcome={}).steps
        30.0

    See Also:
        `workbench.alarms.lead_time`: Computes it from the alarms of a run.
    """

    mechanism: Alarm | None
    outcome: Alarm | None
    divergence: int | None
    by_outcome: dict[str, int]

    @property
    def steps(self) -> float:
        """Steps from the mechanism alarm to the first outcome alarm or the divergence, whichever came first.

        Negative if the mechanism alarm came later; NaN if either side is missing.
        """
        ends = [*self.by_outcome.values(), *([] if self.divergence is None else [self.divergence])]
        return math.nan if self.mechanism is None or not ends else float(min(ends) - self.mechanism.step)

    @property
    def is_first(self) -> bool:
        """Whether the mechanism alarm came before every other warning."""
        return self.mechanism is not None and not self.steps <= 0


def lead_time(alarms: Iterable[Alarm], *, divergence: int | None = None, since: int = 0) -> LeadTime:
    """Find the first alarm of each kind.

    Args:
        alarms: Alarms of one run.
        divergence: Step at which it diverged; None if it did not.
        since: Alarms before this step, such as the onset of a fault, do not count.

    Example:
        >>> import workbench as wb
        >>> mechanism = wb.alarms.Alarm(100, "effective_rank D2", 1, 2, 3.5, 1.1, is_outcome=False, message="")
        >>> outcome = wb.alarms.Alarm(140, "loss", -1, -1, 2.0, 9.0, is_outcome=True, message="")
        >>> wb.alarms.lead_time([mechanism, outcome], divergence=150).steps
        40.0

    See Also:
        `workbench.alarms.recorded_alarms`: The alarms of a recorded run.
        `workbench.early_warning.delays`: Delays between faults and alarms in the recorded study.
    """
    late = sorted((alarm for alarm in alarms if alarm.step >= since), key=lambda alarm: alarm.step)
    mechanism = next((alarm for alarm in late if not alarm.is_outcome), None)
    outcome = next((alarm for alarm in late if alarm.is_outcome), None)
    by_outcome: dict[str, int] = {}
    for alarm in late:
        if alarm.is_outcome:
            by_outcome.setdefault(alarm.signal, alarm.step)
    return LeadTime(mechanism, outcome, divergence, by_outcome)


def recorded_alarms(run: xr.DataTree) -> list[Alarm]:
    """Return the alarms among the events of a run that was recorded with them.

    Args:
        run: Run from `workbench.open_run`.

    Returns:
        Alarms in the order of the events; their ``value`` is NaN, since events do not hold it.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> wb.alarms.recorded_alarms(run)  # it was trained without alarms
        []

    See Also:
        `workbench.alarms.replay`: Raises alarms on a run that was recorded without them.
    """
    if "events" not in run.children:
        return []
    events = run.children["events"].to_dataset(inherit=False).load()
    found = []
    for i in np.flatnonzero(events["kind"].values == "alarm"):
        row = events.isel(event=int(i))
        signal = str(row["source"].item())
        found.append(
            Alarm(
                step=int(row["step"]),
                signal=signal,
                layer=int(row["layer"]),
                head=int(row["head"]),
                score=float(row["score"]),
                value=math.nan,
                is_outcome=signal in _OUTCOMES,
                message=str(row["message"].item()),
            )
        )
    return found
