"""Random numbers of data sources that repeat in every stream and do not affect the rest of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from workbench.tasks.random_stream import RandomStream

#: Attributes of loaders, samplers and datasets whose values may have generators too.
_PARTS = ("dataset", "datasets", "sampler", "batch_sampler", "data_source", "transform", "transforms", "collate_fn")
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerators:
    """Random generators that a source keeps as attributes, and their initial states.

    Args:
        source: A DataLoader or another iterable; its attributes are searched, and those of its dataset, samplers,
            transforms and collate function.
    """

    def __init__(self, source: Any) -> None:
        self._generators = _find_generators(source)
        self.initial_states = self.states()

    def states(self) -> list[Any]:
        """Return the state of each generator."""
        return [_get_state(generator) for generator in self._generators]

    def restore(self, states: list[Any]) -> None:
        """Restore the state of each generator."""
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, state)


class PrivateDraws:
    """Random numbers of one stream over a source, from the global generators and those of the source.

    The generators of the source begin in their initial states; the global ones are seeded in each epoch. Outside the
    blocks of `active`, all of them have the states of the rest of the process.

    Args:
        own: Generators of the source.
    """

    def __init__(self, own: OwnGenerators) -> None:
        self._own = own
        self._states = own.initial_states
        self._globals = RandomStream(0)

    def begin_epoch(self, seed: int) -> None:
        """Seed the global generators as seen by the source."""
        self._globals = RandomStream(seed)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw all random numbers within the ``with`` block from this stream."""
        outside = self._own.states()
        self._own.restore(self._states)
        try:
            with self._globals.active():
                yield
        finally:
            self._states = self._own.states()
            self._own.restore(outside)


def _find_generators(source: Any) -> list[Any]:
    found: dict[int, Any] = {}
    seen: set[int] = set()
    parts = [source]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif name in _PARTS:
                parts.extend(value if isinstance(value, list | tuple) else [value])
    return list(found.values())


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
