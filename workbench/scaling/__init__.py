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
from workbench.scaling.designs import Design
from workbench.scaling.outlook import extrapolated
from workbench.scaling.width_matching import matched_width

__all__ = ["Design", "extrapolated", "matched_width"]

__dir__ = publish(__name__)
