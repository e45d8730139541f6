"""Detection of data loaders that repeat themselves: batches all of whose examples occurred before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Examples after which batches are evaluated: four times as many as the recorder remembers, so that a small data set
#: has already started again by then.
_N_EXAMPLES = 4096
#: Probability of a sequence of repeated batches, given the fraction of such batches so far, below which it is reported.
_PROBABILITY = 1e-7
#: Fraction of repeated examples from which on repetition is common.
_COMMON = 0.5
#: Batches after which a batch that equals one of the last eight is reported at once, more than such a small data set
#: has, and smallest size of a batch that no shuffled data set repeats by chance.
_N_BATCHES, _LEAST_SIZE = 16, 4


class RepeatedBatches:
    """Detector of sequences of repeated batches, that is, of batches all of whose examples occurred before.

    A batch of four or more examples that equals one of the last eight batches, in the same order, is reported at once,
    unless it does so from the start, as if there are only a few batches. Otherwise, the probability of a repeated batch
    is estimated as (number of repeated batches + 1) / (number of batches + 2), so that after 400 batches without a
    repeated one, three in a row are reported.

    A sequence must also be more than twice as long as any before, since a loop may use each batch several times.
    Nothing is reported if half of all examples repeat, because the data set is small. Counting restarts when the batch
    size changes. A loader that repeats more batches than the recorder remembers (1,024 examples) is not detected.
    """

    def __init__(self) -> None:
        self._begin(math.nan)

    def _begin(self, size: float) -> None:
        self._size, self._n_examples, self._sum = size, 0.0, 0.0
        self._n_batches = self._n_repeated = self._longest = self._n_same = 0
        #: Number of consecutive repeated batches, up to the latest one.
        self.n_in_a_row = 0
        self._may_report = False

    def update(self, values: Mapping[str, Any]) -> bool | None:
        """Process the metrics of an update.

        Args:
            values: Metrics of the part ``monitors``, of which ``repeated_examples`` and ``batch_size`` are used.

        Returns:
            Whether the loader repeats itself; None if unknown.
        """
        names = ("repeated_examples", "batch_size", "repeated_batch")
        fraction, size, same = (float(np.asarray(values.get(name, math.nan))) for name in names)
        if not (math.isfinite(fraction) and math.isfinite(size)):
            return None
        if size != self._size:  # smaller batches are more often fully repeated by chance
            self._begin(size)
        is_repeated = fraction >= 1
        is_evaluated = self._n_examples >= _N_EXAMPLES
        self._n_examples += size
        self._n_batches += 1
        self._sum += fraction
        if not is_repeated:
            self._longest = max(self._longest, self.n_in_a_row)
            self.n_in_a_row = self._n_same = 0
            return False
        if not self.n_in_a_row:
            self._may_report = is_evaluated
        self.n_in_a_row += 1
        self._n_repeated += 1
        n_before = self._n_batches - self.n_in_a_row
        usual = (self._n_repeated - self.n_in_a_row + 1) / (n_before + 2)
        is_common = self._sum - self.n_in_a_row >= _COMMON * n_before
        self._n_same = self._n_same + 1 if same >= 1 else 0
        is_known = self._n_same == self.n_in_a_row and size >= _LEAST_SIZE and n_before >= _N_BATCHES
        if is_known and not is_common and self.n_in_a_row > 2 * self._longest:
            return True
        if not self._may_report or is_common or self.n_in_a_row <= 2 * self._longest:
            return False
        return self.n_in_a_row * math.log(usual) <= math.log(_PROBABILITY)
