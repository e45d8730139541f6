"""Sweeps: many short training runs over architectures and settings, in parallel, recorded in one store.

runs = wb.sweeps.grid({"Pre-LN": {"norm": "pre_ln"}, "No-Norm": {"norm": "none"}}, learning_rate=[1e-3, 1e-2],
                      n_steps=200, task={"name": "associative_recall"}, seed=range(3))
outcomes = wb.sweeps.run(runs, "sweeps/norms.zarr")
"""

from workbench.sweeps.case_measures import measure_case
from workbench.sweeps.execution import run
from workbench.sweeps.one_run import count_spikes, make_run
from workbench.sweeps.planned_runs import replan
from workbench.sweeps.run_settings import TASKS, RunSettings, grid
from workbench.sweeps.sweep_store import SweepStore, join

__all__ = [
    "TASKS",
    "RunSettings",
    "SweepStore",
    "count_spikes",
    "grid",
    "join",
    "make_run",
    "measure_case",
    "replan",
    "run",
]


def __dir__() -> list[str]:
    return sorted(__all__)
