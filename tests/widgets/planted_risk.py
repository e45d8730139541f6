"""A risk model whose edge is planted: real predictions without the time that a fit takes."""

import numpy as np

from tests.risk.made_sweep import SLOPE
from workbench.risk.applicability import Applicability
from workbench.risk.feature_map import FeatureMap
from workbench.risk.features import FEATURES
from workbench.risk.risk_model import RiskModel

#: Feature -> what one unit of it adds to log10 of the edge; as `tests.assessment.made_sweep.edge`.
COEFFICIENTS = {"near_unit_mass mean": -0.8, "d_model": -0.4, "n_layers": 0.0, "warmup": 0.15}
#: log10 of the edge where these features are 0.
INTERCEPT = -1.5 + 0.8 * 0.5 + 0.4 * 1.9
#: How much the resamples move the edge.
SPREAD = 0.1


def planted_model(sweep, *, more=(), with_optimizer=True):
    """A model of the sweep's features; further ones have no weight."""
    names = (*COEFFICIENTS, *more)
    design = FeatureMap.of(sweep, (*names, *(["optimizer"] if with_optimizer else [])))
    n = len(names)
    of_column = np.zeros(len(design.columns))
    of_column[:n] = [COEFFICIENTS.get(name, 0.0) for name in names]
    center = INTERCEPT + of_column @ design.center
    row = np.array([SLOPE, center, *of_column * design.scale])
    moved = np.zeros_like(row)
    moved[1] = SPREAD
    base = design.matrix(design.read(sweep))[:, : design.n_base]
    applicability = Applicability.of(base, sweep["cell"].values, sweep["configuration"].values)
    rates = np.log10(sweep["learning_rate"].values)
    return RiskModel(
        feature_map=design, applicability=Applicability(applicability.points, 8.0),
        weights=np.stack([row, row - moved, row + moved]), seen=(-4.0, 4.0), log_rate=(rates.mean(), rates.std()),
        spread=(SLOPE, SPREAD), about={"options": {"level": 0.95}},
    )  # fmt: skip


def planted_probability(case):
    """What the model says about one case, from the formula."""
    log_edge = INTERCEPT
    for name, weight in COEFFICIENTS.items():
        if name.endswith(" mean"):
            value = float(case[name.split()[0]].mean())
        else:
            feature = FEATURES[name]
            value = np.log10(float(case[name].values[0]) + feature.shift)
        log_edge += weight * value
    return 1 / (1 + np.exp(-SLOPE * (np.log10(float(case["learning_rate"].values[0])) - log_edge)))
