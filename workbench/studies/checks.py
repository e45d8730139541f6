"""Measurements of the probes of a run, and whether each passed its check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.probe_alarms import SIGNALS, Check, ProbeAlarms
from workbench.callbacks.observation import Observation

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Check", "checks_of"]


def checks_of(run: xr.DataTree) -> list[Check]:
    """Return every measurement of the probes of arithmetic and gradients in a run, as evaluated by the alarms.

    Args:
        run: A run; it may have no probes.

    Returns:
        The measurements by increasing step.
    """
    probes, found = ProbeAlarms(), []
    for part in ("precision", "reduction"):
        if part not in run.children:
            continue
        data = run.children[part].to_dataset(inherit=False).load()
        columns = {str(name): values.values for name, values in data.data_vars.items()}
        for row, step in enumerate(data["step"].values.tolist()):
            probes.observe(Observation(step, part, {name: np.asarray(column[row]) for name, column in columns.items()}))
            check = probes.checks.get(SIGNALS[part])
            if check is not None and check.step == step:
                found.append(check)
    return sorted(found, key=lambda check: check.step)
