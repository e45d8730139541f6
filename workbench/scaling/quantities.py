"""The quantities of a scaling study, and the variables of its dataset."""

from __future__ import annotations

import math

EDGE = "explosion_edge"
#: Quantities whose trends held beyond their ladders in the recorded study (`data/make_scaling.py`).
CARRIED_ON = (EDGE,)
#: Measures of the spectra, as means over layers, and their bounds.
SPECTRAL = {
    "near_unit_mass": ("linear", (0.0, 1.0)),
    "expansive_mass": ("linear", (0.0, 1.0)),
    "contractive_mass": ("linear", (0.0, 1.0)),
    "spectral_radius": ("log", (0.0, math.inf)),
    "nonlinearity_ratio": ("log", (0.0, math.inf)),
}
#: Scalars of `workbench.flow.summarize`, where they are measured.
FLOW = {
    "total_signal_gain": ("log", (0.0, math.inf)),
    "total_gradient_gain": ("log", (0.0, math.inf)),
    "branch_ratio_mean": ("log", (0.0, math.inf)),
    "token_cosine_end": ("linear", (-1.0, 1.0)),
    "effective_rank_end": ("linear", (0.0, 1.0)),
    "attention_entropy_share_smallest": ("linear", (0.0, 1.0)),
}

#: Attributes of the dataset's variables.
ATTRS = {
    "n_weights": {"long_name": "weights", "units": "1"},
    "width": {"long_name": "width of the residual stream", "units": "1"},
    "depth": {"long_name": "residual blocks", "units": "1"},
    "step": {"long_name": "updates done", "units": "1"},
    "measured": {"long_name": "each quantity on each rung from each seed", "units": "1"},
    "initial_size": {"long_name": "rms of a layer group's output before training", "units": "1"},
    "update_size": {"long_name": "rms of the change of a layer group's output since the start", "units": "1"},
    "update_size_of_seed": {"long_name": "the same of each seed", "units": "1"},
    "coordinate_exponent": {"long_name": "power of the width that the updates grow with", "units": "1"},
    "initial_exponent": {"long_name": "power of the width that the initial outputs grow with", "units": "1"},
    EDGE: {
        "long_name": "explosion edge",
        "units": "1",
        "meaning": "rate at which runs diverge, geometric mean",
    },
    "edge_low": {"long_name": "largest rate without divergence for every seed", "units": "1"},
    "edge_high": {"long_name": "smallest rate with divergence for every seed", "units": "1"},
    "slope": {"long_name": "exponent of the width, or change per factor e of it", "units": "1"},
    "depth_slope": {"long_name": "exponent of the depth, or change per factor e of it", "units": "1"},
    "curve": {"long_name": "trend from the smallest rung on", "units": "1"},
    "at_target": {"long_name": "value predicted at the target size", "units": "1"},
    "measured_at_target": {"long_name": "value measured at the target size, mean over seeds", "units": "1"},
    "is_supported": {"long_name": "whether the ladder supports the value at the target"},
}


def rule_of(name: str) -> tuple[str, tuple[float, float]]:
    """Scale and bounds of a quantity."""
    return {**SPECTRAL, **FLOW}.get(name, ("log", (0.0, math.inf)))
