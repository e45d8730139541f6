"""Detection of labels that are no longer the tokens of their inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Number of batches with full agreement after which agreement is taken as a rule of the task.
_LEAST = 20


class LabelAgreement:
    """Detector of labels that differ from the tokens of their inputs, after those of all earlier batches agreed.

    In language modeling every label is the next token, without exception. Other tasks have no such rule, and nothing is
    reported for them.

    Attributes:
        n_before: Number of batches with full agreement before the first one without it.
    """

    def __init__(self) -> None:
        self.n_before = 0
        self._is_rule = True

    def update(self, values: Mapping[str, Any]) -> bool:
        """Process the metrics of an update, of which ``label_agreement`` is used.

        Returns:
            Whether labels differ although the labels of all earlier batches agreed.
        """
        agreement = float(np.asarray(values.get("label_agreement", math.nan)))
        if not math.isfinite(agreement) or not self._is_rule:
            return False
        if agreement >= 1:
            self.n_before += 1
            return False
        self._is_rule = self.n_before >= _LEAST
        return self._is_rule
