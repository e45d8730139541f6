"""Risk of divergence before training starts; the names of `wb.risk`.

model = wb.risk.fit(wb.open_sweep("sweep.zarr"))
model.predict(cases), model.largest_stable_rate(cases), model.drivers(cases)
print(model.with_validation(wb.risk.validate(sweep)).card())
"""

from __future__ import annotations

from workbench.assessment.features import FEATURE_SETS, FEATURES, feature_table, is_complete
from workbench.assessment.fitting import fit
from workbench.assessment.model import RiskModel
from workbench.assessment.model_file import load, shipped
from workbench.assessment.neighbours import nearest_runs
from workbench.assessment.over_rates import over_rates
from workbench.assessment.predictors import calibrated_score, predictor_scores, predictor_table
from workbench.assessment.scores import (
    Auroc,
    auroc,
    auroc_within,
    brier,
    calibration_error,
    log_loss,
    reliability,
    roc_curve,
)
from workbench.assessment.stable_rates import share_within, stable_rate_accuracy, stable_rates
from workbench.assessment.validation import boosted_probability, cross_validate, figures_of, mass_figures, validate

__all__ = [
    "FEATURES",
    "FEATURE_SETS",
    "Auroc",
    "RiskModel",
    "auroc",
    "auroc_within",
    "boosted_probability",
    "brier",
    "calibrated_score",
    "calibration_error",
    "cross_validate",
    "feature_table",
    "figures_of",
    "fit",
    "is_complete",
    "load",
    "log_loss",
    "mass_figures",
    "nearest_runs",
    "over_rates",
    "predictor_scores",
    "predictor_table",
    "reliability",
    "roc_curve",
    "share_within",
    "shipped",
    "stable_rate_accuracy",
    "stable_rates",
    "validate",
]
