"""Risk of divergence before training starts; the names of `wb.risk`.

model = wb.risk.fit(wb.open_sweep("sweep.zarr"))
model.predict(cases), model.largest_stable_rate(cases), model.drivers(cases)
print(model.with_validation(wb.risk.validate(sweep)).card())
"""

from __future__ import annotations

from workbench.risk.features import FEATURE_SETS, FEATURES, feature_table, is_complete
from workbench.risk.fitting import fit
from workbench.risk.measured_stable_rates import share_within, stable_rate_accuracy, stable_rates
from workbench.risk.model_file import load, shipped
from workbench.risk.neighbours import nearest_runs
from workbench.risk.predictors import calibrated_score, predictor_scores
from workbench.risk.rate_grid import over_rates
from workbench.risk.risk_model import RiskModel
from workbench.risk.scores import Auroc, auroc, auroc_within, brier, calibration_error, log_loss, reliability, roc_curve
from workbench.risk.validation import boosted_probability, cross_validate, figures_of, mass_figures, validate

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
    "reliability",
    "roc_curve",
    "share_within",
    "shipped",
    "stable_rate_accuracy",
    "stable_rates",
    "validate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
