"""Replay of a recorded run through alarms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.alarms import Alarms
from workbench.callbacks.alarms.recorded_observations import observations
from workbench.callbacks.alarms.watched import WATCHED
from workbench.option_checks import NonNegativeInt
from workbench.schema.runs import EVIDENCE

if TYPE_CHECKING:
    import xarray as xr

    from workbench.callbacks.alarms.alarm import Alarm
    from workbench.callbacks.observation import Observation


def replay(run: xr.DataTree, alarms: Alarms, *, rest: NonNegativeInt = 0) -> list[Alarm]:
    """Pass a recorded run through alarms, and return the alarms raised.

    Args:
        run: Run from `workbench.open_run`.
        alarms: Alarms that receive the record; afterwards they are in the state at the end of the run.
        rest: Steps for which the alarms rested after each action of the run; see `workbench.Actions`.

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
    for _ in _observed(run, alarms, rest):
        pass
    return list(alarms.raised)


def evidence_of(run: xr.DataTree, alarms: Alarms | None = None, *, rest: NonNegativeInt = 0) -> xr.Dataset:
    """Compute the part ``evidence`` of a run that was recorded without it, by replaying the record.

    ``run["evidence"] = xr.DataTree(wb.alarms.evidence_of(run))`` adds it to a run, for `workbench.plots.timeline` and
    `workbench.widgets.Timeline`.

    Args:
        run: Run from `workbench.open_run`.
        alarms: Alarms that receive the record, in their current state; None for new ones with default options.
        rest: Steps for which the alarms rested after each action of the run; see `workbench.Actions`.

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
    rows = [row for each in _observed(run, alarms, rest) if (row := alarms._evidence_row(each)) is not None]
    names = [watched.name for watched in WATCHED]
    values = np.array([row.values["evidence"] for row in rows]).reshape(len(rows), len(names))
    variable = EVIDENCE["evidence"]
    coords = {"step": np.array([row.step for row in rows], dtype=np.int64), "signal": names}
    return xr.Dataset({"evidence": (variable.dims, values, variable.attrs)}, coords)


def _observed(run: xr.DataTree, alarms: Alarms, rest: int) -> Iterator[Observation]:
    """Yield the observations of a run, each after the alarms have processed it."""
    answered = action_steps(run) if rest else []
    for observation in observations(run):
        while answered and answered[0] <= observation.step:
            alarms.rest(answered.pop(0), n_steps=rest)
        alarms.observe(observation)
        yield observation
    for step in answered:
        alarms.rest(step, n_steps=rest)


def action_steps(run: xr.DataTree) -> list[int]:
    """Return the steps after which a recorded run carried out actions, in increasing order."""
    if "events" not in run.children:
        return []
    events = run.children["events"].to_dataset()
    return sorted({int(step) for step in events["step"].values[events["kind"].values == "action"]})
