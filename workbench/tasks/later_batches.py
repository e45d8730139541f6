"""A task whose stream begins at a later batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.tasks.task import Inputs, Task


@dataclass(frozen=True)
class LaterBatches:
    """Task whose stream begins at a later batch of another task.

    Args:
        task: The other task.
        first: Number of its batch with which the stream begins.
    """

    task: Task
    first: int

    def stream(self, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Return the batches, counted from the first one."""
        return self.task.stream(self.first + start)

    def probe(self, n_tokens: int) -> Inputs:
        """Return the probe of the task."""
        return self.task.probe(n_tokens)

    def describe(self) -> dict[str, Any]:
        """Return the description of the task, with the number of its first batch."""
        return {**self.task.describe(), "from_batch": self.first}
