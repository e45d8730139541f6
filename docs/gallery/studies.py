"""Studies of many runs."""

import workbench as wb


def explosion_edge():
    """The fraction of runs that diverged against the learning rate, one line for each method.

    The recorded study of controls. The large marker is the largest rate up to which less than 20 % of the runs
    diverged.
    """
    return wb.plots.explosion_edge(wb.samples.shaping("controls"))


def dose_response():
    """The outcomes of each method against divergence: one row for each method.

    The recorded study of controls. A hollow diamond is the published value.
    """
    return wb.plots.dose_response(wb.samples.shaping("controls"))


def decision_chart():
    """Models at initialization in the decision chart of RKSP, with the outcomes of their runs.

    Recorded runs of different normalizations. The zones are those of the paper.
    """
    runs = wb.samples.divergence_sweep("norms")
    points = runs[["near_unit_mass", "eigenvector_condition"]].mean("layer")
    return wb.plots.decision_chart(points.assign(has_diverged=runs["has_diverged"]))


def predictor_table():
    """The area under the ROC curve of each predictor of divergence, ours and published, with intervals.

    Recorded runs of different normalizations.
    """
    table = wb.outcomes.predictor_table(wb.samples.divergence_sweep("norms"), n_bootstrap=200)
    return wb.plots.predictor_table(table)


def predictor_frame():
    """The same table of predictors as numbers.

    The function returns a pandas table.
    """
    table = wb.outcomes.predictor_table(wb.samples.divergence_sweep("norms"), n_bootstrap=0)
    return wb.plots.predictor_frame(table)


def roc():
    """The ROC curves of scores that predict divergence, with the area under each.

    Three scores at initialization, over recorded runs of many designs. The near-unit mass M does not separate the runs
    that diverge from those that converge.
    """
    runs = wb.samples.divergence_sweep("held out")
    scores = wb.risk.predictor_scores(runs).sel(predictor=["M", "kappa", "initial grad norm"])
    curves = {
        name: wb.risk.roc_curve(score, runs["has_diverged"], n_bootstrap=200)
        for name, score in zip(scores["predictor"].values, scores.T, strict=True)
    }
    return wb.plots.roc(curves)


def reliability():
    """The observed fraction of diverged runs against the predicted probability.

    The risk model that ships with the package, on recorded runs that were held out from its fit. On the dashed diagonal
    predictions are calibrated.
    """
    runs = wb.samples.divergence_sweep("held out")
    cases = (runs.isel(run=[i]) for i in range(0, runs.sizes["run"], 3))
    predicted = [wb.risk.predict(case).explosion.value for case in cases]
    return wb.plots.reliability(wb.risk.reliability(predicted, runs["has_diverged"][::3]))


def scaling_trend():
    """A ladder of sizes: the measurements, their trend, and the prediction for a larger model.

    The explosion edge of a recorded architecture over widths.
    """
    return wb.plots.scaling_trend(wb.samples.scaling().isel(architecture=0))
