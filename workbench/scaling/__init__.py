"""One architecture at any size: designs, ladders of sizes, and extrapolation to the target size."""

from workbench.scaling.coordinate_checks import coordinate_check
from workbench.scaling.designs import Design
from workbench.scaling.explosion_edges import ExplosionEdge, explosion_edge, find_edge, pilot_edge
from workbench.scaling.outlook import extrapolated
from workbench.scaling.size_ladder import Parametrization, Rung, Workshop
from workbench.scaling.trend import Trend, fit_trend
from workbench.scaling.width_matching import matched_width

__all__ = [
    "Design",
    "ExplosionEdge",
    "Parametrization",
    "Rung",
    "Trend",
    "Workshop",
    "coordinate_check",
    "explosion_edge",
    "extrapolated",
    "find_edge",
    "fit_trend",
    "matched_width",
    "pilot_edge",
]


def __dir__() -> list[str]:
    return sorted(__all__)
