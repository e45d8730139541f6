"""Risk of a planned training before it starts; the names of `wb.risk`.

print(wb.risk.predict(case))                   # from settings and the fresh model
print(wb.risk.predict(case, pilot=found))      # after wb.find_rate
"""

from __future__ import annotations

from workbench.risk.edge_model import EdgeModel, fit, load
from workbench.risk.edge_regression import Edges
from workbench.risk.features import FEATURES, feature_table
from workbench.risk.predictors import predictor_scores
from workbench.risk.risk import Chance, Risk, over_rates, predict
from workbench.risk.scores import Auroc, auroc, auroc_within, calibration_error, reliability, roc_curve
from workbench.risk.shipped_model import shipped

__all__ = [
    "FEATURES",
    "Auroc",
    "Chance",
    "EdgeModel",
    "Edges",
    "Risk",
    "auroc",
    "auroc_within",
    "calibration_error",
    "feature_table",
    "fit",
    "load",
    "over_rates",
    "predict",
    "predictor_scores",
    "reliability",
    "roc_curve",
    "shipped",
]


def __dir__() -> list[str]:
    return sorted(__all__)
