"""One architecture at any size: designs, ladders of sizes, and extrapolation to the target size."""

from workbench.scaling.coordinate_checks import coordinate_check
from workbench.scaling.designs import Design
from workbench.scaling.outlook import extrapolated
from workbench.scaling.size_ladder import Parametrization, Rung, Workshop
from workbench.scaling.stable_edges import StableEdge, find_edge, pilot_edge, stable_edge
from workbench.scaling.trend import Trend, fit_trend
from workbench.scaling.width_matching import matched_width

__all__ = [
    "Design",
    "Parametrization",
    "Rung",
    "StableEdge",
    "Trend",
    "Workshop",
    "coordinate_check",
    "extrapolated",
    "find_edge",
    "fit_trend",
    "matched_width",
    "pilot_edge",
    "stable_edge",
]


def __dir__() -> list[str]:
    return sorted(__all__)
