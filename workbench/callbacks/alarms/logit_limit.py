"""Detection of attention logits beyond the limit at which runs are known to diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: All runs whose logits exceeded this diverged (Wortsman et al. 2023, arXiv:2309.14322, section 3.1). Losses worsen
#: from about a tenth of it on, a value that a healthy model without norms was observed to reach as well.
LIMIT = 10_000.0


@dataclass(frozen=True)
class LargeLogit:
    """The largest attention logit of a measurement that exceeds the limit.

    Attributes:
        value: The logit, unit 1.
        layer: Its layer.
        head: Its head.
    """

    value: float
    layer: int
    head: int


class LogitLimit:
    """Detector of attention logits that grow beyond 10,000.

    `OwnPast` follows a trend and therefore does not report slow growth, so that an absolute limit is needed. A model
    whose logits exceed it from the first measurement on is not reported.
    """

    def __init__(self) -> None:
        self._was_within = False

    def update(self, values: Mapping[str, Any], coords: Mapping[str, Any]) -> LargeLogit | None:
        """Process a measurement of attention, of which ``attention_logit_max`` (layer, head) is used.

        Returns:
            The largest logit if it exceeds the limit after earlier ones did not; else None.
        """
        logits = np.asarray(values.get("attention_logit_max", math.nan), dtype=np.float64)
        if logits.ndim != 2 or not np.isfinite(logits).any():
            return None
        row, head = np.unravel_index(int(np.nanargmax(logits)), logits.shape)
        if logits[row, head] <= LIMIT:
            self._was_within = True
            return None
        layer = int(np.asarray(coords["layer"])[row]) if "layer" in coords else int(row)
        return LargeLogit(float(logits[row, head]), layer, int(head)) if self._was_within else None
