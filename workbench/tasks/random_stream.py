"""Private random streams: code that runs inside one neither reads nor changes the global random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomStream:
    """Private states of Python's, NumPy's and torch's global generators, so that alternating runs draw as alone."""

    def __init__(self, seed: int, *, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self._cuda = device if device.type == "cuda" else None
        before = self._get()
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (the legacy state is the global one)
        torch.random.default_generator.manual_seed(seed)
        if self._cuda is not None:
            with torch.cuda.device(self._cuda):
                torch.cuda.manual_seed(seed)
        self._state = self._get()
        self._set(before)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw all random numbers within the ``with`` block from this stream; restore the global states afterwards."""
        outside = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._get()
            self._set(outside)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream, in types that ``torch.load(weights_only=True)`` reads."""
        version, internal, gauss = self._state["python"]
        name, keys, *rest = self._state["numpy"]
        return {
            "python": [version, list(internal), gauss],
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
            "torch": self._state["torch"],
            "cuda": self._state["cuda"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another stream."""
        version, internal, gauss = state["python"]
        name, keys, *rest = state["numpy"]
        self._state = {
            "python": (version, tuple(internal), gauss),
            "numpy": (name, keys.numpy().astype(np.uint32), *rest),
            "torch": state["torch"],
            "cuda": state["cuda"] if self._cuda is not None else None,
        }

    def _get(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None,
        }

    def _set(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self._cuda is not None:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)
