"""Whether labels that were the tokens of their inputs are so no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Batches whose labels all agree, after which it is a rule of the task.
_LEAST = 20


class LabelAgreement:
    """Reports labels that differ from the tokens of their inputs, once those of all batches so far agreed.

    In language modelling every label is the next token, without exception; other tasks have no such rule, and nothing
    is reported there.

    Attributes:
        n_before: Batches without a label that differs, before the first that has one.
    """

    def __init__(self) -> None:
        self.n_before = 0
        self._is_rule = True

    def update(self, values: Mapping[str, Any]) -> bool:
        """Process the numbers of an update, of which ``label_agreement`` is used.

        Returns:
            Whether labels differ that should not.
        """
        agreement = float(np.asarray(values.get("label_agreement", math.nan)))
        if not math.isfinite(agreement) or not self._is_rule:
            return False
        if agreement >= 1:
            self.n_before += 1
            return False
        self._is_rule = self.n_before >= _LEAST
        return self._is_rule
