"""Lines of values over steps: reduction of their points without visible change, and the band of healthy runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from workbench.option_checks import PositiveInt, Range, checked

#: Two quantiles of a band.
Quantiles = Annotated[tuple[float, float], Range("that increase from 0 to 1", lambda pair: 0 <= pair[0] < pair[1] <= 1)]

#: A number larger than every step.
_FAR = 2**31 - 1


@checked
def decimate(
    step: np.ndarray, value: np.ndarray, n: PositiveInt, start: float | None = None, stop: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the points of a line without visible change: keep both ends and the extremes of each bucket of rows.

    Every spike is kept, however short. Every bucket has the same number of rows, a power of two, and buckets are
    counted from the first row. They therefore do not change while the view moves, and the line does not flicker.

    Args:
        step: Steps in increasing order, shape (row,).
        value: Values, shape (row,); values that are NaN or infinite are omitted.
        n: Approximate number of buckets, such as the width of the figure in pixels; the actual number is 0.7 to 1.4
            times as large.
        start: First step in view; the last row before it is kept, so that the line enters the view. None for no limit.
        stop: Last step in view; the first row after it is kept. None for no limit.

    Returns:
        Steps and values of the kept rows in their order; all rows in view if there are at most ``2 * n``.

    Raises:
        OptionError: If ``n`` is below 1.
    """
    is_finite = np.isfinite(value)
    if not is_finite.all():
        step, value = step[is_finite], value[is_finite]
    first, last = _rows_in_view(step, start, stop)
    if last - first <= 2 * n:
        return step[first:last], value[first:last]
    size = 1 << int(np.round(np.log2((last - first) / n)))
    begin = min(-(-first // size) * size, last)
    end = max(last - last % size, begin)
    buckets = value[begin:end].reshape(-1, size)
    offset = np.arange(begin, end, size)
    extremes = np.sort([buckets.argmin(1) + offset, buckets.argmax(1) + offset], axis=0).T.ravel()
    # The visible parts of the buckets at the ends of the view are separate buckets.
    kept = np.concatenate([[first], _extremes(value, first, begin), extremes, _extremes(value, end, last), [last - 1]])
    kept = kept[np.append(True, kept[1:] > kept[:-1])].astype(np.intp)
    return step[kept], value[kept]


@dataclass(frozen=True)
class SignalBand:
    """The range of a signal in healthy runs.

    Attributes:
        step: Center of each interval of steps, shape (interval,).
        lower: Lower quantile in each interval, shape (interval,).
        upper: Upper quantile in each interval, shape (interval,).
    """

    step: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


@checked
def healthy_band(
    lines: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    quantiles: Quantiles = (0.05, 0.95),
    n: PositiveInt = 100,
) -> SignalBand:
    """Compute running quantiles over healthy runs, from all values in each interval of steps and its neighbors.

    Args:
        lines: Steps and values of each run; values that are not finite are ignored.
        quantiles: Lower and upper quantile.
        n: Number of intervals of equal length; fewer if there are fewer than five values per interval.

    Returns:
        The band; empty if there are no values.

    Raises:
        OptionError: If the quantiles are not two increasing numbers from 0 to 1.
    """
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
    centers, found = [], []
    for i in range(n):
        nearby = value[bounds[max(i - 1, 0)] : bounds[min(i + 2, n)]]
        if len(nearby):
            centers.append((edges[i] + edges[i + 1]) / 2)
            found.append(np.quantile(nearby, quantiles))
    lower, upper = np.array(found).T
    centers[0], centers[-1] = edges[0], edges[-1]
    return SignalBand(np.array(centers), lower, upper)


def _extremes(value: np.ndarray, first: int, last: int) -> list[int]:
    part = value[first:last]
    return sorted([first + int(part.argmin()), first + int(part.argmax())]) if len(part) else []


def _rows_in_view(step: np.ndarray, start: float | None, stop: float | None) -> tuple[int, int]:
    """Return the first row and the row after the last one, with one row beyond the view on either side."""
    if step.dtype.kind == "i":  # for bounds of another type NumPy would convert all steps first
        start, stop = (None if end is None else np.clip(end, -_FAR, _FAR) for end in (start, stop))
        start = None if start is None else step.dtype.type(np.ceil(start))
        stop = None if stop is None else step.dtype.type(np.floor(stop))
    first = 0 if start is None else max(int(np.searchsorted(step, start)) - 1, 0)
    last = len(step) if stop is None else min(int(np.searchsorted(step, stop, side="right")) + 1, len(step))
    return first, max(first, last)
