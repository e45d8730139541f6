"""Sweeps: many short training runs over architectures and settings, executed in parallel and recorded in one store.

Example:
    >>> import workbench as wb
    >>> norms, task = {"Pre-LN": {"norm": "pre_ln"}, "No-Norm": {"norm": "none"}}, {"name": "associative_recall"}
    >>> runs = wb.sweeps.grid(norms, learning_rate=[1e-3, 1e-2], n_steps=200, task=task, seed=range(3))
    >>> len(runs)
    12
    >>> outcomes = wb.sweeps.run(runs, "norms.zarr")  # doctest: +SKIP

See Also:
    `workbench.open_sweep`: Opens a recorded sweep.
    `workbench.outcomes`: Summarizes the outcomes of a sweep.
    `workbench.risk`: Predicts outcomes from the measurements before training.
"""

from workbench.option_checks import publish
from workbench.sweeps.case_measures import measure_case
from workbench.sweeps.execution import SweepStore, make_run, run
from workbench.sweeps.run_settings import TASKS, RunSettings, grid, replan

__all__ = ["TASKS", "RunSettings", "SweepStore", "grid", "make_run", "measure_case", "replan", "run"]

__dir__ = publish(__name__)
