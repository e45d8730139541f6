"""Lead time of mechanism alarms over alarms of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.alarm import Alarm
from workbench.callbacks.alarms.watched import WATCHED

if TYPE_CHECKING:
    import xarray as xr

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
