"""When did it begin? The most likely step of change in a signal, from what is known by now."""

from __future__ import annotations

import numpy as np

#: Fewer measurements than this on either side are no level.
_LEAST = 3


def onset(step: np.ndarray, value: np.ndarray) -> int | None:
    """The step at which a signal's level most likely changed: one break, by least squares (ruptures).

    Args:
        step: Of the measurements, shape (measurement,); rising.
        value: Of the signal, on a scale on which differences mean the same everywhere, such as `Watched.badness`; NaN
            is left out.

    Returns:
        The last step before the change; None where there are fewer than six measurements.
    """
    import ruptures

    known = np.isfinite(value)
    step, value = np.asarray(step)[known], np.asarray(value, dtype=np.float64)[known]
    if len(value) < 2 * _LEAST:
        return None
    breaks = ruptures.Binseg(model="l2", min_size=_LEAST, jump=1).fit(value[:, None]).predict(n_bkps=1)
    return int(step[breaks[0] - 1])
