"""Lines of values over steps: fewer points for the same look, and the band of healthy runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.errors import OptionError

#: Beyond every step.
_FAR = 2**31 - 1


def decimate(
    step: np.ndarray, value: np.ndarray, n: int, start: float | None = None, stop: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the points of a line without changing its look: keep the extremes of each bucket of rows, and both ends.

    Every spike is kept, however short. Buckets have equally many rows, a power of two counted from the first row, so
    that they stay the same while the view moves, and the line does not flicker.

    Args:
        step: Rising steps, shape (row,).
        value: Values, shape (row,); those that are NaN or infinite are left out.
        n: Approximate number of buckets, such as the pixels of the figure: from 0.7 to 1.4 times as many.
        start: First step in view; the last row before it is kept, so that the line enters the view. None: all.
        stop: Last step in view; likewise.

    Returns:
        Steps and values, rows of the input in their order; all rows in view if there are at most ``2 * n``.

    Raises:
        OptionError: If ``n`` is below 1.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> value = np.zeros(1000)
        >>> value[500] = 9.0
        >>> step, value = wb.signals.decimate(np.arange(1000), value, n=10)
        >>> len(step) < 50, float(value.max())
        (True, 9.0)
    """
    if n < 1:
        raise OptionError(f"n is {n}, expected at least 1 bucket.")
    is_finite = np.isfinite(value)
    if not is_finite.all():
        step, value = step[is_finite], value[is_finite]
    first, last = _rows_in_view(step, start, stop)
    if last - first <= 2 * n:
        return step[first:last], value[first:last]
    size = 1 << int(np.round(np.log2((last - first) / n)))
    begin = min(-(-first // size) * size, last)
    end = max(last - last % size, begin)
    whole = value[begin:end].reshape(-1, size)
    offset = np.arange(begin, end, size)
    extremes = np.sort([whole.argmin(1) + offset, whole.argmax(1) + offset], axis=0).T.ravel()
    # The visible parts of the buckets at the ends of the view are separate buckets.
    kept = np.concatenate([[first], _extremes(value, first, begin), extremes, _extremes(value, end, last), [last - 1]])
    kept = kept[np.append(True, kept[1:] > kept[:-1])].astype(np.intp)
    return step[kept], value[kept]


@dataclass(frozen=True)
class SignalBand:
    """The range of a signal in healthy runs.

    Attributes:
        step: Middle of each stretch of steps, shape (stretch,).
        lower: Lower quantile there.
        upper: Upper quantile there.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> band = wb.signals.healthy_band([(np.arange(100), np.ones(100))], n=2)
        >>> band.step.shape, band.lower, band.upper
        ((2,), array([1., 1.]), array([1., 1.]))
    """

    step: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def healthy_band(
    lines: Sequence[tuple[np.ndarray, np.ndarray]], *, quantiles: tuple[float, float] = (0.05, 0.95), n: int = 100
) -> SignalBand:
    """Compute running quantiles over healthy runs, of all values in each stretch of steps and its neighbours.

    Args:
        lines: Steps and values of each run; values that are not finite are ignored.
        quantiles: Lower and upper quantile.
        n: Number of equally long stretches; fewer where there are fewer than five values for each.

    Returns:
        The band; empty if there are no values.

    Raises:
        OptionError: If the quantiles are not two rising numbers from 0 to 1.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> lines = [(np.arange(100), np.full(100, level)) for level in (1.0, 2.0, 3.0)]
        >>> band = wb.signals.healthy_band(lines, quantiles=(0.0, 1.0), n=1)
        >>> band.lower, band.upper
        (array([1.]), array([3.]))
    """
    quantiles = checked_quantiles(quantiles)
    finite = [np.isfinite(value) for _, value in lines]
    step = np.concatenate([np.zeros(0), *(line[0][is_there] for line, is_there in zip(lines, finite, strict=True))])
    value = np.concatenate([np.zeros(0), *(line[1][is_there] for line, is_there in zip(lines, finite, strict=True))])
    if not len(step):
        return SignalBand(np.zeros(0), np.zeros(0), np.zeros(0))
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    n = int(np.clip(len(step) // 5, 1, n))
    edges = np.linspace(step[0], step[-1], n + 1)
    bounds = np.append(np.searchsorted(step, edges[:-1]), len(step))
    middle, found = [], []
    for stretch in range(n):
        nearby = value[bounds[max(stretch - 1, 0)] : bounds[min(stretch + 2, n)]]
        if len(nearby):
            middle.append((edges[stretch] + edges[stretch + 1]) / 2)
            found.append(np.quantile(nearby, quantiles))
    lower, upper = np.array(found).T
    middle[0], middle[-1] = edges[0], edges[-1]
    return SignalBand(np.array(middle), lower, upper)


def checked_quantiles(quantiles: tuple[float, float]) -> tuple[float, float]:
    """Check two quantiles and return them.

    Raises:
        OptionError: If they are not two rising numbers from 0 to 1.
    """
    pair = tuple(quantiles) if isinstance(quantiles, Sequence) and not isinstance(quantiles, str) else ()
    if len(pair) != 2 or not 0 <= pair[0] < pair[1] <= 1:
        raise OptionError(f"The band is {quantiles!r}, expected two rising quantiles, such as (0.05, 0.95).")
    return float(pair[0]), float(pair[1])


def _extremes(value: np.ndarray, first: int, last: int) -> list[int]:
    part = value[first:last]
    return sorted([first + int(part.argmin()), first + int(part.argmax())]) if len(part) else []


def _rows_in_view(step: np.ndarray, start: float | None, stop: float | None) -> tuple[int, int]:
    """First row, and the row after the last: those in view, and one more on either side."""
    if step.dtype.kind == "i":  # bounds of another type would have NumPy convert all steps first
        start, stop = (None if end is None else np.clip(end, -_FAR, _FAR) for end in (start, stop))
        start = None if start is None else step.dtype.type(np.ceil(start))
        stop = None if stop is None else step.dtype.type(np.floor(stop))
    first = 0 if start is None else max(int(np.searchsorted(step, start)) - 1, 0)
    last = len(step) if stop is None else min(int(np.searchsorted(step, stop, side="right")) + 1, len(step))
    return first, max(first, last)
