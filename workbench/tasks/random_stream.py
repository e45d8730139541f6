"""Private random streams: code that runs inside one neither reads nor changes the global random states."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


class RandomStream:
    """Private states of the global generators of Python, NumPy and torch (CPU and optionally CUDA).

    Two training runs that alternate in one process draw the same numbers as each does alone.
    """

    def __init__(self, seed: int, *, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self._cuda = device if device.type == "cuda" else None
        #: Is made the global one of NumPy within `active`, as copying its state takes longer.
        self._generator = np.random.MT19937()
        self._state: dict[str, Any] = {
            "python": random.Random(seed).getstate(),
            "numpy": np.random.RandomState(seed % 2**32).get_state(legacy=False),
            "torch": torch.Generator().manual_seed(seed).get_state(),
            "cuda": None,
        }
        self._generator.state = self._state["numpy"]
        if self._cuda is not None:
            before = torch.cuda.get_rng_state(self._cuda)
            with torch.cuda.device(self._cuda):
                torch.cuda.manual_seed(seed)
            self._state["cuda"] = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(before, self._cuda)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw all random numbers within the ``with`` block from this stream; restore the global states afterwards."""
        outside, generator, before = self._get(), get_bit_generator(), self._memory()
        self._set(self._state, self._generator)
        try:
            yield
        finally:
            kept = self._state["numpy"]
            is_used = kept["has_gauss"] or self._memory() != before
            self._state = self._get(None if is_used else kept)
            self._set(outside, generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream, in types that ``torch.load(weights_only=True)`` reads."""
        version, internal, gauss = self._state["python"]
        of_numpy = self._state["numpy"]
        keys, position = torch.from_numpy(of_numpy["state"]["key"].astype(np.int64)), of_numpy["state"]["pos"]
        return {
            "python": [version, list(internal), gauss],
            "numpy": ["MT19937", keys, position, of_numpy["has_gauss"], of_numpy["gauss"]],
            "torch": self._state["torch"],
            "cuda": self._state["cuda"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another stream."""
        version, internal, gauss = state["python"]
        name, keys, position, has_gauss, normal = state["numpy"]
        own = {"key": keys.numpy().astype(np.uint32), "pos": position}
        self._state = {
            "python": (version, tuple(internal), gauss),
            "numpy": {"bit_generator": name, "state": own, "has_gauss": has_gauss, "gauss": normal},
            "torch": state["torch"],
            "cuda": state["cuda"] if self._cuda is not None else None,
        }
        self._generator.state = self._state["numpy"]

    def _memory(self) -> bytes:
        """Return the memory of the generator of NumPy, a hundred times as fast as its state."""
        return ctypes.string_at(self._generator.ctypes.state_address, 625 * 4)  # 624 words and the position

    def _get(self, of_numpy: Any = None) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": of_numpy or np.random.get_state(legacy=False),  # noqa: NPY002
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None,
        }

    def _set(self, state: dict[str, Any], generator: np.random.BitGenerator) -> None:
        random.setstate(state["python"])
        set_bit_generator(generator)
        if state["numpy"]["has_gauss"]:  # a second normal number, which it does not hold
            np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self._cuda is not None:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)
