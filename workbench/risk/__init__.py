"""Risk of a planned training: the probability that it does not learn well, predicted before it starts.

Example:
    >>> import workbench as wb
    >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
    >>> risk = wb.risk.predict(case)  # pass pilot=wb.find_rate(...) after a pilot
    >>> 0 <= risk.failure.low <= risk.failure.value <= risk.failure.high <= 1
    True

See Also:
    `workbench.sweeps.measure_case`: Measures the case of a planned training.
    `workbench.find_rate`: Measures the useful rates by a pilot.
"""

from __future__ import annotations

from workbench.option_checks import publish
from workbench.risk.edge_model import EdgeModel, Edges, fit, load, shipped
from workbench.risk.features import FEATURES
from workbench.risk.risk import Probability, Risk, over_rates, predict
from workbench.risk.scores import reliability

__all__ = [
    "FEATURES", "EdgeModel", "Edges", "Probability", "Risk", "fit", "load", "over_rates", "predict", "reliability",
    "shipped",
]  # fmt: skip

__dir__ = publish(__name__)
