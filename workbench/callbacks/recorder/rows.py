"""Rows of a recorder whose values are still on the device: they are copied together, and completed later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from workbench.callbacks.recorder.options import Change
from workbench.models.readable_weights import Measurement, finish, send_arrays


@dataclass
class Started:
    """A measurement that has computed its tensors on the device and waits for their values."""

    measurement: Measurement[Any]
    tensors: Sequence[Tensor]


@dataclass
class Row:
    """The metrics of an update, and the measurements after it that wait for their values."""

    step: int
    numbers: dict[str, float | Tensor]
    changes: list[Change]
    is_checked: bool
    has_batch: bool
    measured: Mapping[str, Started]


class Flight:
    """One copy of values from the device, and the rows that it completes.

    Without ranks, measurements of a late copy are completed by another thread: eigenvalues of small matrices take the
    host longer than a step.
    """

    def __init__(self, rows: list[Row], *, is_late: bool, workers: ThreadPoolExecutor | None) -> None:
        self.rows, self.seconds = rows, dict[str, float]()
        numbers = [value for row in rows for value in row.numbers.values() if isinstance(value, Tensor)]
        tensors = [tensor for row in rows for each in row.measured.values() for tensor in each.tensors]
        read = send_arrays([*numbers, *tensors], waits=not is_late)
        is_long = workers is not None and bool(tensors)
        self._work: Future[Any] | Callable[[], Any] = partial(self._complete, read)
        if is_long and workers is not None:
            self._work = workers.submit(self._work)

    def results(self) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        """Return the metrics of each row, and its measurements: values, or exceptions."""
        return self._work.result() if isinstance(self._work, Future) else self._work()

    def _complete(self, read: Callable[[], list[np.ndarray]]) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        values = iter(read())
        numbers = [
            {name: next(values).item() if isinstance(of, Tensor) else float(of) for name, of in row.numbers.items()}
            for row in self.rows
        ]
        return numbers, [self._of_row(row.measured, values) for row in self.rows]

    def _of_row(self, measured: Mapping[str, Started], values: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, each in measured.items():
            own, start = [next(values) for _ in each.tensors], time.thread_time()
            try:
                found[part] = finish(each.measurement, own)
            except Exception as error:  # noqa: BLE001  (it is reported where the row is published)
                found[part] = error
            self.seconds[part] = time.thread_time() - start
        return found
