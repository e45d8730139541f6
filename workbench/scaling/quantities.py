"""The quantities of a scaling study, and the variables of its dataset."""

from __future__ import annotations

import math

EDGE = "explosion_edge"
#: Quantities whose trends held beyond the ladders of the recorded study (`data/make_scaling.py`).
EXTRAPOLATED = (EDGE,)
#: Spectral quantities, as means over layers, with scale and bounds.
SPECTRAL = {
    "near_unit_mass": ("linear", (0.0, 1.0)),
    "expansive_mass": ("linear", (0.0, 1.0)),
    "contractive_mass": ("linear", (0.0, 1.0)),
    "spectral_radius": ("log", (0.0, math.inf)),
    "nonlinearity_ratio": ("log", (0.0, math.inf)),
}
#: Scalars of `workbench.flow.summarize`, with scale and bounds; some models lack some of them.
FLOW = {
    "total_signal_gain": ("log", (0.0, math.inf)),
    "total_gradient_gain": ("log", (0.0, math.inf)),
    "branch_ratio_mean": ("log", (0.0, math.inf)),
    "token_cosine_end": ("linear", (-1.0, 1.0)),
    "effective_rank_end": ("linear", (0.0, 1.0)),
    "attention_entropy_share_smallest": ("linear", (0.0, 1.0)),
}

#: Attributes of the variables of the dataset.
ATTRS = {
    "n_weights": {"long_name": "number of parameters", "units": "1"},
    "width": {"long_name": "width of the residual stream", "units": "1"},
    "depth": {"long_name": "number of residual blocks", "units": "1"},
    "step": {"long_name": "number of updates", "units": "1"},
    "measured": {"long_name": "value of each quantity for each rung and seed", "units": "1"},
    "initial_size": {"long_name": "initial RMS of the output of a layer group", "units": "1"},
    "update_size": {"long_name": "RMS of the change of the output of a layer group", "units": "1"},
    "update_size_of_seed": {"long_name": "RMS of the change of the output of a layer group, by seed", "units": "1"},
    "coordinate_exponent": {"long_name": "exponent of the width in the change of the output", "units": "1"},
    "initial_exponent": {"long_name": "exponent of the width in the initial output", "units": "1"},
    EDGE: {
        "long_name": "explosion edge",
        "units": "1",
        "meaning": "learning rate at which runs diverge, geometric mean over seeds",
    },
    "edge_low": {"long_name": "largest rate without divergence for every seed", "units": "1"},
    "edge_high": {"long_name": "smallest rate with divergence for every seed", "units": "1"},
    "slope": {"long_name": "exponent of the width, or change per factor e in width", "units": "1"},
    "depth_slope": {"long_name": "exponent of the depth, or change per factor e in depth", "units": "1"},
    "curve": {"long_name": "trend from the smallest rung to the target", "units": "1"},
    "at_target": {"long_name": "value predicted at the target size", "units": "1"},
    "measured_at_target": {"long_name": "value measured at the target size, mean over seeds", "units": "1"},
    "is_supported": {"long_name": "whether the ladder supports the value at the target"},
}


def rule_of(name: str) -> tuple[str, tuple[float, float]]:
    """Return scale and bounds of a quantity."""
    return {**SPECTRAL, **FLOW}.get(name, ("log", (0.0, math.inf)))
