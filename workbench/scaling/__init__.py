"""Designs that can be built at any size, ladders of sizes, and extrapolation to a target size.

Example:
    >>> import workbench as wb
    >>> study = wb.samples.scaling().sel(architecture="Pre-LN")
    >>> larger = wb.scaling.extrapolated(study, (512, 4))
    >>> larger["at_target"].sel(quantity="explosion_edge").item() > 0
    True

See Also:
    `workbench.design`: Creates a design.
    `workbench.scaling_study`: Measures a ladder of sizes.
    `workbench.samples.scaling`: Loads the recorded studies.
"""

from workbench.option_checks import publish
from workbench.scaling.coordinate_checks import coordinate_check
from workbench.scaling.designs import Design
from workbench.scaling.explosion_edges import ExplosionEdge, explosion_edge, find_edge, pilot_edge
from workbench.scaling.outlook import extrapolated
from workbench.scaling.size_ladder import LadderTrainer, Parametrization, Rung
from workbench.scaling.trend import Trend, fit_trend
from workbench.scaling.width_matching import matched_width

__all__ = [
    "Design",
    "ExplosionEdge",
    "LadderTrainer",
    "Parametrization",
    "Rung",
    "Trend",
    "coordinate_check",
    "explosion_edge",
    "extrapolated",
    "find_edge",
    "fit_trend",
    "matched_width",
    "pilot_edge",
]

__dir__ = publish(__name__)
