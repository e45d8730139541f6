"""Messages between the kernel and the training process: pickles, one after the other, through two pipes."""

from __future__ import annotations

import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import cloudpickle

from workbench.callbacks.observers import Observers
from workbench.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class _Pickler(cloudpickle.Pickler):
    """Pickles what a notebook defines by value; locks arrive open, and observers stay in the kernel."""

    def reducer_override(self, obj: Any) -> Any:
        """How to make the object again."""
        if type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        if type(obj) is Observers:
            return Observers, ()
        return super().reducer_override(obj)


def packed(parts: Mapping[str, Any]) -> bytes:
    """The parts of a job as one pickle, in which an object that several of them hold is one object.

    Args:
        parts: By names that people understand, such as ``"the task"``.

    Raises:
        OptionError: If a part cannot be pickled; the sentence names it.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(dict(parts))
    except Exception as error:  # pickling runs code of models and data, which may raise anything
        for name, part in parts.items():
            _check(name, part)
        raise OptionError(f"The runs cannot be sent to the training process ({error}).") from error
    return stream.getvalue()


def send(message: tuple[Any, ...], stream: Any) -> None:
    """Write one message of plain values and objects of the workbench."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: Any) -> tuple[Any, ...] | None:
    """Read the next message; None: the other process has ended or closed its end."""
    try:
        return pickle.load(stream)
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # also in the middle of a message
        return None


def _check(name: str, part: Any) -> None:
    try:
        _Pickler(io.BytesIO()).dump(part)
    except Exception as error:
        raise OptionError(
            f"Training runs in a process of its own, and {name} cannot be sent there ({error}); leave out what holds "
            "open files, connections or generators, and pass data that can be read again."
        ) from error
