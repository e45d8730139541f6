"""Studies of many runs."""

import workbench as wb


def explosion_edge():
    """The fraction of runs that diverged against the learning rate, one line for each method.

    The recorded study of controls. The large marker is the largest rate up to which less than 20 % of the runs
    diverged.
    """
    return wb.plots.explosion_edge(wb.samples.open("shaping", "controls"))


def reliability():
    """The observed fraction of diverged runs against the predicted probability.

    The risk model that ships with the package, on recorded runs that were held out from its fit. On the dashed diagonal
    predictions are calibrated.
    """
    runs = wb.samples.open("divergence_sweep", "held out")
    cases = (runs.isel(run=[i]) for i in range(0, runs.sizes["run"], 3))
    predicted = [wb.risk.predict(case).explosion.value for case in cases]
    return wb.plots.reliability(wb.risk.reliability(predicted, runs["has_diverged"][::3]))
