"""One architecture at any size: designs, ladders of sizes, and what they say about the size that is meant."""

from workbench.scaling.coordinate_check import coordinate_check
from workbench.scaling.design import Design, design
from workbench.scaling.ladder import Parametrization, Rung, Workshop
from workbench.scaling.matched_width import matched_width
from workbench.scaling.outlook import foretold
from workbench.scaling.stable_edge import Edge, find_edge, rehearsed_edge, stable_edge
from workbench.scaling.study import scaling_study
from workbench.scaling.trend import Trend, fit_trend

__all__ = [
    "Design",
    "Edge",
    "Parametrization",
    "Rung",
    "Trend",
    "Workshop",
    "coordinate_check",
    "design",
    "find_edge",
    "fit_trend",
    "foretold",
    "matched_width",
    "rehearsed_edge",
    "scaling_study",
    "stable_edge",
]
