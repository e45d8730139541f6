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

    Example:
        >>> import workbench as wb
        >>> from workbench.studies.checks import checks_of
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
        >>> options = {"recorder": wb.Recorder(every={"precision": 4}), "store": "checked.zarr"}
        >>> fault = wb.faults.low_precision_attention(n_bits=6, start=6)
        >>> records = list(wb.train(model, task, n_steps=8, faults=[fault], **options))
        >>> checks = checks_of(wb.open_run("checked.zarr"))
        >>> [(check.step, check.is_sound) for check in checks if check.signal == "arithmetic"]
        [(3, True), (7, False)]
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
