"""A task from a later batch on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.tasks.task import Inputs, Task


@dataclass(frozen=True)
class LaterBatches:
    """A task whose stream begins at a later batch.

    Args:
        task: The task.
        first: Number of its batch that comes first.

    Example:
        >>> from workbench import tasks
        >>> from workbench.tasks.later_batches import LaterBatches
        >>> task = tasks.random_tokens(length=4, batch_size=2)
        >>> bool((next(LaterBatches(task, 3).stream())[0] == task.batch(3)[0]).all())
        True
    """

    task: Task
    first: int

    def stream(self, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Its batches, counted from the first."""
        return self.task.stream(self.first + start)

    def probe(self, n_tokens: int) -> Inputs:
        """The task's."""
        return self.task.probe(n_tokens)

    def describe(self) -> dict[str, Any]:
        """The task's, and the number of the batch that comes first."""
        return {**self.task.describe(), "from_batch": self.first}
