"""Messages between the kernel and the training process: a sequence of pickles through two pipes."""

from __future__ import annotations

import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import cloudpickle

from workbench.callbacks.observation import Observers
from workbench.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class _Pickler(cloudpickle.Pickler):
    """A pickler that pickles definitions of a notebook by value; locks arrive unlocked, observers are not sent."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to reconstruct the object."""
        if type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        if type(obj) is Observers:
            return Observers, ()
        return super().reducer_override(obj)


def packed(parts: Mapping[str, Any]) -> bytes:
    """Return the parts of a job as one pickle, in which shared objects stay shared."""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(dict(parts))
    except Exception as error:  # pickling runs code of models and data, which may raise anything
        for name, part in parts.items():
            _check(name, part)
        raise OptionError(f"The runs cannot be sent to the training process ({error}).") from error
    return stream.getvalue()


def send(message: tuple[Any, ...], stream: Any) -> None:
    """Write one message."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: Any) -> tuple[Any, ...] | None:
    """Read the next message; None if the other process has ended or closed its pipe."""
    try:
        return pickle.load(stream)
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # also in the middle of a message
        return None


def _check(name: str, part: Any) -> None:
    try:
        _Pickler(io.BytesIO()).dump(part)
    except Exception as error:
        raise OptionError(
            f"Training runs in a separate process, and {name} cannot be sent to it ({error}); remove open files, "
            "connections and generators, and pass data that can be read repeatedly."
        ) from error
