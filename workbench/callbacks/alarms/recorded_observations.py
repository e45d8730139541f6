"""Observations of a recorded run, in the order in which the recorder published them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.probe_alarms import SIGNALS
from workbench.callbacks.alarms.watched import WATCHED
from workbench.callbacks.observation import Observation, changed_setting
from workbench.errors import SchemaError

if TYPE_CHECKING:
    import xarray as xr

#: Parts in the order in which a recorder publishes the observations of one step: the metrics of the update come last.
_PARTS = tuple(dict.fromkeys([*(w.part for w in WATCHED if w.part != "monitors"), *SIGNALS, "monitors"]))


def observations(run: xr.DataTree) -> Iterator[Observation]:
    """Yield the observations of a recorded run that alarms receive, in their order.

    Args:
        run: Run from `workbench.open_run`.

    Raises:
        SchemaError: If the run has no monitors.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> first = next(wb.alarms.observations(run))
        >>> first.step, first.part
        (0, 'monitors')

    See Also:
        `workbench.alarms.replay`: Passes all observations of a run to alarms.
        `workbench.alarms.Observation`: One observation.
    """
    if "monitors" not in run.children:
        raise SchemaError("The run has no monitors to replay; record it with wb.train() or a wb.Recorder.")
    measured = []
    for place, name in enumerate(_PARTS):
        if name not in run.children:
            continue
        part = run.children[name].to_dataset(inherit=False).load()
        coords = {str(key): np.asarray(v.values) for key, v in part.coords.items() if "step" not in v.dims}
        values = {str(key): v.values for key, v in part.data_vars.items() if v.dims[:1] == ("step",)}
        measured += [(int(step), place, row, name, values, coords) for row, step in enumerate(part["step"].values)]
    measured.sort(key=lambda found: found[:2])
    settings = _changed_settings(run)
    for step, place, row, name, values, coords in measured:
        yield Observation(step, name, {key: value[row] for key, value in values.items()}, coords)
        while place == len(_PARTS) - 1 and settings and settings[0].step <= step:
            yield settings.pop(0)


def _changed_settings(run: xr.DataTree) -> list[Observation]:
    """Return the changes of settings, which a run stores as events."""
    if "events" not in run.children or "source" not in run.children["events"]:
        return []
    events = run.children["events"].to_dataset()
    rows = zip(*(events[name].values.tolist() for name in ("kind", "step", "source", "score", "message")), strict=True)
    return [changed_setting(*change) for kind, *change in rows if kind == "setting"]
