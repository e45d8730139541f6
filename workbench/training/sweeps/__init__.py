"""Sweeps: many short training runs over architectures and settings, side by side, into one store.

runs = wb.sweeps.grid({"Pre-LN": {"norm": "pre_ln"}, "No-Norm": {"norm": "none"}}, learning_rate=[1e-3, 1e-2],
                      n_steps=200, task={"name": "associative_recall"}, seed=range(3))
outcomes = wb.sweep(runs, "sweeps/norms.zarr")
"""

from workbench.training.sweeps.execution import sweep
from workbench.training.sweeps.measures import measure_case
from workbench.training.sweeps.one_run import count_spikes, make_run
from workbench.training.sweeps.planned import replan
from workbench.training.sweeps.settings import TASKS, RunSettings, grid
from workbench.training.sweeps.store import SweepStore, join, open_sweep

__all__ = [
    "TASKS",
    "RunSettings",
    "SweepStore",
    "count_spikes",
    "grid",
    "join",
    "make_run",
    "measure_case",
    "open_sweep",
    "replan",
    "sweep",
]
