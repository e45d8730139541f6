"""The interface of tasks, and the base class of tasks that are generated during training."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import count
from numbers import Integral
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from workbench.errors import OptionError

#: Inputs of a model: a tensor, or a mapping of keyword arguments.
Inputs: TypeAlias = Tensor | Mapping[str, Tensor]

SPLITS = ("train", "validation")
#: Token states that one image is counted as, since its patches depend on the model.
STATES_PER_IMAGE = 16


@runtime_checkable
class Task(Protocol):
    """Something to learn: a stream of batches, held-out inputs to measure the model with, and a description.

    Tasks of token ids also have ``vocab_size``, tasks of classes ``n_classes``, where it is known.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.random_tokens()
        >>> isinstance(task, wb.tasks.Task), isinstance([1, 2], wb.tasks.Task)
        (True, False)
    """

    def stream(self, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches (inputs, targets) from number ``start`` on, without end unless the data can be read only once.

        Targets of -100 are to be ignored by the loss.
        """

    def probe(self, n_tokens: int) -> Inputs:
        """Inputs with at least ``n_tokens`` token states (or all that there are), the same at any time of training."""

    def describe(self) -> dict[str, str | int | float | bool]:
        """The settings of the task, with its name as ``"task"``: equal descriptions, equal batches."""


class SeededTask(ABC):
    """Base of the tasks that are made on the fly: every batch is a function of the seed and its number.

    A child is a frozen dataclass with the fields ``batch_size`` and ``seed``, and ``split`` where it has splits.
    """

    name: ClassVar[str]
    batch_size: int
    seed: int

    @abstractmethod
    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number ``index`` of the stream; the numbers below 0 are for `probe` and never trained on."""

    @property
    @abstractmethod
    def states_per_row(self) -> int:
        """Token states of one row of the inputs."""

    @property
    def n_held_out(self) -> int | None:
        """Different rows that can be held out; None: without limit."""
        return None

    def stream(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from number ``start`` on, without end.

        Raises:
            OptionError: If ``start`` is negative.
        """
        require_whole(0, start=start)
        return (self.batch(index) for index in count(start))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        return self.stream()

    def probe(self, n_tokens: int) -> Tensor:
        """Held-out inputs; see `held_out`."""
        return self.held_out(n_tokens)[0]

    def held_out(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Held-out inputs and targets: of the validation split where there is one, else never trained on.

        They do not depend on ``batch_size``.

        Args:
            n_tokens: Token states wanted; where fewer can be held out, all of them are given.

        Raises:
            OptionError: If ``n_tokens`` is below 1.
        """
        require_whole(1, n_tokens=n_tokens)
        n_rows = -(-n_tokens // self.states_per_row)
        changes: dict[str, Any] = {"split": "validation"} if hasattr(self, "split") else {}
        task: Any = self  # every child is a dataclass
        return replace(task, batch_size=min(n_rows, self.n_held_out or n_rows), **changes).batch(-1)

    def describe(self) -> dict[str, str | int | float | bool]:
        """The task's name and fields."""
        task: Any = self
        values = asdict(task).items()
        return {"task": self.name} | {
            name: int(value) if isinstance(value, Integral) else value for name, value in values
        }


class SequenceTask(SeededTask):
    """Base of those whose rows are sequences of ``length`` tokens, a field of the child."""

    length: int

    @property
    def states_per_row(self) -> int:
        """Tokens in a sequence."""
        return self.length


def batch_generator(seed: int, index: int) -> torch.Generator:
    """Randomness of batch number ``index``. Recorded data depend on this formula."""
    return torch.Generator().manual_seed(int(seed) * 1_000_003 + index)


def mixed_seed(*key: str | int) -> int:
    """A seed in [0, 2^63) that differs from key to key and says nothing about its neighbours."""
    text = repr([part if isinstance(part, str) else int(part) for part in key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def shuffled_rows(n_rows: int, *, batch_size: int, index: int, key: tuple[str | int, ...]) -> Tensor:
    """Which rows batch number ``index`` holds when every epoch goes once through all rows, in an order of its own.

    A batch at the end of an epoch is filled up from the next one, so that all batches have the same size.

    Args:
        n_rows: Rows in an epoch.
        batch_size: Rows in a batch.
        index: Number of the batch.
        key: Names the sequence of orders, such as the task, its split and its seed.

    Returns:
        Row numbers as int64, shape (batch,).
    """
    position = torch.arange(index * batch_size, (index + 1) * batch_size)
    epoch = position.div(n_rows, rounding_mode="floor")
    rows = torch.empty_like(position)
    for e in range(int(epoch[0]), int(epoch[-1]) + 1):
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(mixed_seed(*key, e)))
        rows[epoch == e] = order[position[epoch == e] % n_rows]
    return rows


def require_whole(lowest: int, **options: int) -> None:
    """Refuse options that are not whole numbers of at least ``lowest``.

    Raises:
        OptionError: That names the option.
    """
    for name, value in options.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise OptionError(f"{name} is {value!r}, expected a whole number.")
        if value < lowest:
            raise OptionError(f"{name} is {value}, expected at least {lowest}.")


def require_split(split: str) -> None:
    """Refuse the name of a split that does not exist.

    Raises:
        OptionError: That names those that do.
    """
    if split not in SPLITS:
        raise OptionError(f"split is '{split}', expected 'train' or 'validation'.")


def require_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take.

    Raises:
        OptionError: That gives the range.
    """
    require_whole(-(2**32), seed=seed)
    if seed > 2**32:
        raise OptionError(f"seed is {seed}, expected at most {2**32}.")
