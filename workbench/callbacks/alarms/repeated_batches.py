"""Whether a data loader repeats itself: batches whose examples have all come before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Examples after which batches are judged: four times as many as the recorder remembers, so that a small data set that
#: starts again has shown it.
_N_EXAMPLES = 4096
#: Chance of as many repeated batches in a row, at the share of such batches so far, below which they are no chance.
_CHANCE = 1e-7
#: Share of repeated examples from which on they are common.
_COMMON = 0.5


class RepeatedBatches:
    """Counts the batches in a row whose examples have all come before, against how often that happened so far.

    The share of such batches is estimated as (their number + 1) / (number of all + 2), so a run without any is
    judged after three of 400 batches. A stretch must also be more than twice as long as any before. Where half of
    all examples repeat, because the data set is small, nothing is reported. Batches of another size are counted
    anew. A loader that repeats more batches than the recorder remembers (1,024 examples) is not seen.
    """

    def __init__(self) -> None:
        self._begin(math.nan)

    def _begin(self, size: float) -> None:
        self._size, self._n_examples, self._sum = size, 0.0, 0.0
        self._n_batches = self._n_repeated = self._longest = 0
        #: Repeated batches in a row, up to the latest.
        self.n_in_a_row = 0
        self._may_report = False

    def update(self, values: Mapping[str, Any]) -> bool | None:
        """Process the numbers of an update.

        Args:
            values: Those of the part ``monitors``, of which ``repeated_examples`` and ``batch_size`` are used.

        Returns:
            Whether the loader repeats itself; None: not known.
        """
        share, size = (float(np.asarray(values.get(name, math.nan))) for name in ("repeated_examples", "batch_size"))
        if not (math.isfinite(share) and math.isfinite(size)):
            return None
        if size != self._size:  # smaller batches repeat wholly by chance more often
            self._begin(size)
        is_repeated = share >= 1
        is_judged = self._n_examples >= _N_EXAMPLES
        self._n_examples += size
        self._n_batches += 1
        self._sum += share
        if not is_repeated:
            self._longest = max(self._longest, self.n_in_a_row)
            self.n_in_a_row = 0
            return False
        if not self.n_in_a_row:
            self._may_report = is_judged
        self.n_in_a_row += 1
        self._n_repeated += 1
        n_before = self._n_batches - self.n_in_a_row
        usual = (self._n_repeated - self.n_in_a_row + 1) / (n_before + 2)
        is_common = self._sum - self.n_in_a_row >= _COMMON * n_before
        if not self._may_report or is_common or self.n_in_a_row <= 2 * self._longest:
            return False
        return self.n_in_a_row * math.log(usual) <= math.log(_CHANCE)
