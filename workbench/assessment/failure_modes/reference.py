"""Healthy bands, derived from recorded healthy models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from workbench.assessment.failure_modes.criterion import EDGE_OF_SHARE, SCALES, HealthyBand

#: A band extends beyond the healthy values by this fraction of their range on either side. It was chosen so that a
#: healthy model of a held-out architecture rarely falls outside (``false_alarms`` in the shipped reference).
MARGIN = 0.25
#: The smallest range that healthy values are assumed to have, on their scale.
_NARROWEST = 0.2


def _shipped() -> Mapping[str, Any]:
    return json.loads((files("workbench.assessment") / "shipped" / "healthy.json").read_text())


def healthy_bands() -> Mapping[str, HealthyBand]:
    """Return criterion -> band, from the recorded healthy models (``data/make_assessed_designs.py``)."""
    return {name: HealthyBand(**band) for name, band in _shipped()["bands"].items()}


def band_of(values: Sequence[float], *, scale: str, margin: float = MARGIN) -> HealthyBand:
    """Return the band around healthy values.

    Args:
        values: One value per healthy model, in the criterion's unit; values that are not finite (or not positive, on
            the scale "log") are ignored.
        scale: Scale of the margin: "linear", "log" or "share".
        margin: Fraction of the range of the values that is added at either end. A value is failing if its distance from
            the band exceeds the width of the band.

    Returns:
        The band with its number of models; an open band of zero models if no value remains.
    """
    x = np.asarray(values, dtype=float)
    x = x[np.isfinite(x) & ((x > 0) | (scale != "log"))]
    if not len(x):
        return HealthyBand()
    there, back = SCALES[scale]
    x = there(x)
    width = max(float(np.ptp(x)), _NARROWEST)
    low, high = float(x.min()) - margin * width, float(x.max()) + margin * width
    ends = (low, high, low - (high - low), high + (high - low))
    low, high, failing_low, failing_high = (float(back(np.array(end))) for end in ends)
    if scale == "share":  # a side at which the band reaches 0 or 1 is open
        low, failing_low = (limit if limit > EDGE_OF_SHARE else -math.inf for limit in (low, failing_low))
        high, failing_high = (limit if limit < 1 - EDGE_OF_SHARE else math.inf for limit in (high, failing_high))
    return HealthyBand(low, high, failing_low, failing_high, len(x), "healthy recorded models")
