"""Runs over their steps."""

import workbench as wb


def timeline():
    """Signals of several runs on one axis of steps, with alarms, faults and lead times.

    The run that failed, next to the healthy one.
    """
    runs = {kind: wb.open_run(wb.samples.failed_run(kind)) for kind in ("healthy", "hyperparameter")}
    return wb.plots.timeline(runs, signals=["loss", "grad_norm", "effective_rank D2"])


def traces():
    """Monitors over steps: one panel for each variable, one line for each run.

    Two recorded runs, one healthy and one that failed because of its learning rate. The cross marks the step at which
    it diverged.
    """
    runs = {kind: wb.open_run(wb.samples.failed_run(kind)) for kind in ("healthy", "hyperparameter")}
    return wb.plots.traces(runs, variables=["loss", "grad_norm", "near_unit_mass"])


def step_grid():
    """The eigenvalues of a run at several steps, one row for each run.

    A recorded run that failed. Each panel states the mean near-unit mass and the largest spectral radius.
    """
    run = wb.open_run(wb.samples.failed_run("hyperparameter"))
    return wb.plots.step_grid({"failed run": run})
