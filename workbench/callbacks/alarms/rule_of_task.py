"""Detection of properties that all earlier batches had and new ones lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class RuleOfTask:
    """Detector of batches without a property that all batches before them had.

    In language modeling, for example, every label is the next token, without exception. Other tasks have no such rule,
    and nothing is reported for them.

    Args:
        variable: Metric of the update that shows the property.
        holds: Whether a value of it shows the property.
        is_broken: Whether a value of it shows that the property is missing; between the two nothing is known.
        n_least: Number of batches with the property after which it is a rule.
        n_broken: Number of batches in a row without it that are reported.

    Attributes:
        n_before: Number of batches with the property before the first one without it.
    """

    def __init__(
        self,
        variable: str,
        holds: Callable[[float], bool],
        is_broken: Callable[[float], bool],
        *,
        n_least: int = 20,
        n_broken: int = 1,
    ) -> None:
        self._variable, self._holds, self._is_broken = variable, holds, is_broken
        self._n_least, self._n_broken = n_least, n_broken
        self.n_before = self._n_in_a_row = 0
        self._is_rule = True

    def update(self, values: Mapping[str, Any]) -> bool:
        """Process the metrics of an update, and return whether the rule is broken."""
        value = float(np.asarray(values.get(self._variable, math.nan)))
        if self._holds(value):
            self.n_before += 1
            self._n_in_a_row = 0
        elif self._is_broken(value):
            self._is_rule &= self._n_in_a_row > 0 or self.n_before >= self._n_least
            self._n_in_a_row += 1
        return self._is_rule and self._n_in_a_row >= self._n_broken
