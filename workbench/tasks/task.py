"""The interface of tasks, the base class of tasks that are generated from a seed, and what every task has."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from numbers import Integral
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveInt, one_of

#: Inputs of a model: a tensor, or a mapping of keyword arguments.
Inputs: TypeAlias = Tensor | Mapping[str, Tensor]

Split = Annotated[str, one_of(("train", "validation"))]
#: Number of token states that are counted for an image, whose number of patches depends on the model.
STATES_PER_IMAGE = 16


@runtime_checkable
class Task(Protocol):
    """Interface of tasks: a stream of batches, inputs for measurements, and a description.

    Any object with these methods is a task. Tasks of token ids also have ``vocab_size``, and tasks of classes
    ``n_classes``, where it is known.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> class Zeros:
        ...     def stream(self, start=0):
        ...         while True:
        ...             yield torch.zeros(2, 8).long(), torch.zeros(2, 8).long()
        ...     def probe(self, n_tokens):
        ...         return torch.zeros(-(-n_tokens // 8), 8).long()
        ...     def describe(self):
        ...         return {"task": "zeros"}
        >>> isinstance(Zeros(), wb.tasks.Task)
        True

    See Also:
        `workbench.tasks.as_task`: Creates a task from data.
        `workbench.train`: Trains a model on a task.
    """

    def stream(self, start: NonNegativeInt = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Return the batches (inputs, targets) from number ``start`` on, endless unless the data can be read only once.

        The loss must ignore targets of -100.

        Args:
            start: Number of the first batch.
        """

    def probe(self, n_tokens: PositiveInt) -> Inputs:
        """Return inputs with at least ``n_tokens`` token states (or all available ones), always the same.

        Args:
            n_tokens: Number of token states.
        """

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return the settings of the task, with its name as ``"task"``; they determine its batches."""


class SeededTask(ABC):
    """Base class of generated tasks, frozen dataclasses in which a batch is a function of ``seed`` and number."""

    name: ClassVar[str]
    batch_size: int
    seed: int

    @abstractmethod
    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch ``index``, inputs and targets; negative numbers are for `probe`, never for training."""

    @property
    @abstractmethod
    def states_per_row(self) -> int:
        """Number of token states of one example of the inputs."""

    @property
    def n_held_out(self) -> int | None:
        """Number of different examples that can be held out; None if unlimited."""
        return None

    @checked
    def stream(self, start: NonNegativeInt = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless iterator over the batches from number ``start`` on."""
        return (self.batch(index) for index in count(start))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless iterator over the batches."""
        return self.stream()

    @checked
    def probe(self, n_tokens: PositiveInt) -> Tensor:
        """Return held-out inputs; see `held_out`."""
        return self.held_out(n_tokens)[0]

    def held_out(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return held-out inputs and targets, never used in training and independent of ``batch_size``."""
        n_rows = -(-n_tokens // self.states_per_row)
        changes: dict[str, Any] = {"split": "validation"} if hasattr(self, "split") else {}
        task: Any = self  # every subclass is a dataclass
        return replace(task, batch_size=min(n_rows, self.n_held_out or n_rows), **changes).batch(-1)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return the name of the task and its fields."""
        task: Any = self
        values = asdict(task).items()
        return {"task": self.name} | {
            name: int(value) if isinstance(value, Integral) else value for name, value in values
        }


class SequenceTask(SeededTask):
    """Base class of tasks whose examples are sequences of ``length`` tokens, a field of the subclass."""

    length: int

    @property
    def states_per_row(self) -> int:
        """Tokens in a sequence."""
        return self.length


def batch_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator of batch number ``index``. Recorded data depend on this formula."""
    return torch.Generator().manual_seed(int(seed) * 1_000_003 + index)


def mixed_seed(*key: str | int) -> int:
    """Compute a seed in [0, 2^63) by hashing a key, so that seeds of similar keys are unrelated."""
    text = repr([part if isinstance(part, str) else int(part) for part in key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def shuffled_rows(n_rows: int, *, batch_size: int, index: int, key: tuple[str | int, ...]) -> Tensor:
    """Return the rows of batch ``index`` in epochs of shuffled rows, whose last batch borrows from the next."""
    position = torch.arange(index * batch_size, (index + 1) * batch_size)
    epoch = position.div(n_rows, rounding_mode="floor")
    rows = torch.empty_like(position)
    for e in range(int(epoch[0]), int(epoch[-1]) + 1):
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(mixed_seed(*key, e)))
        rows[epoch == e] = order[position[epoch == e] % n_rows]
    return rows


@dataclass(frozen=True)
class LaterBatches:
    """Task whose stream begins at a later batch of another task."""

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


#: Number of batches in which targets are counted.
_N_COUNTED = 100


def frequency_loss(task: Task, targets: Tensor) -> float:
    """Compute the mean cross entropy, in nats, of the predictor that knows only the frequencies of the classes."""
    known = torch.cat([seen.flatten() for _, seen in islice(task.stream(0), _N_COUNTED)])
    known, targets = known[known >= 0], targets[targets >= 0]
    n_classes = int(max(known.max(), targets.max())) + 1
    counts = known.bincount(minlength=n_classes) + 1.0
    return float(-(counts / counts.sum()).log()[targets].mean())
