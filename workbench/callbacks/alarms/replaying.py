"""A recorded run replayed through alarms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.callbacks.alarms.recorded_observations import observations

if TYPE_CHECKING:
    import xarray as xr

    from workbench.callbacks.alarms.alarm import Alarm
    from workbench.callbacks.alarms.alarms import Alarms


def replay(run: xr.DataTree, alarms: Alarms, *, rest: int = 0) -> list[Alarm]:
    """The alarms that a recorded run raises.

    Args:
        run: Run from `workbench.open_run`.
        alarms: Alarms to run on the record; afterwards they are in the state that the run would have left.

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
    """
    answered = action_steps(run) if rest else []
    for observation in observations(run):
        while answered and answered[0] <= observation.step:
            alarms.rest(answered.pop(0), n_steps=rest)
        alarms.observe(observation)
    for step in answered:
        alarms.rest(step, n_steps=rest)
    return list(alarms.raised)


def action_steps(run: xr.DataTree) -> list[int]:
    """Steps, in their order, after which a recorded run did what its alarms asked for."""
    if "events" not in run.children:
        return []
    events = run.children["events"].to_dataset()
    return sorted({int(step) for step in events["step"].values[events["kind"].values == "action"]})
