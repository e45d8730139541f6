"""Placeholders for objects that a pickle holds in addition to weights, such as options of a training script.

torch reads a pickle without running code by rejecting every class and function that it does not know. Training scripts,
however, store an ``argparse.Namespace``, a dataclass or a path along with the weights, and torch rejects their files
too. Here torch's restricted reader receives a placeholder for each unknown class, so that the name in the file is never
looked up or imported. A pickle that calls a function, which is how code is hidden in one, is still rejected.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Classes of the standard library that only hold the values with which they are called.
_HARMLESS = ("pathlib.", "datetime.", "types.SimpleNamespace", "uuid.UUID", "decimal.Decimal", "fractions.Fraction")
#: Modules of the standard library, by their current names and by those of Python 2, which torch.save writes.
_OF_PYTHON = {*sys.stdlib_module_names, *IMPORT_MAPPING}
_OF_NUMPY = ("scalar", "_reconstruct", "_frombuffer", "dtype", "ndarray")


class _Kind(type):
    """Metaclass of placeholders; a pickle that calls a function calls one of these classes."""

    full_name: str

    def __call__(cls: Any, *_: Any, **__: Any) -> Any:
        if not _only_holds_values(cls.full_name):
            raise pickle.UnpicklingError(f"it calls {cls.full_name}")
        return Placeholder.__new__(cls)


class Placeholder(metaclass=_Kind):
    """Empty object in place of one whose class is not imported."""

    full_name = "an object"

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Create the placeholder; the arguments are ignored."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Discard the state of the object."""


def placeholders(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return placeholders for the names in a pickle that torch does not know, in the form for ``safe_globals``.

    Args:
        path: A file written by ``torch.save``. In other files, and in those of torch before 1.6, nothing is replaced.
    """
    try:
        if not zipfile.is_zipfile(path):
            return []
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001 damaged bytes can cause any exception, and torch.load will raise it
        return []
    return [(_new_dict if name == "collections.defaultdict" else _placeholder(name), name) for name in names]


def _placeholder(name: str) -> type:
    """Create a separate class for each name, so that a call can be identified by the name."""
    return _Kind("Placeholder", (Placeholder,), {"full_name": name})


def _new_dict(*_: Any) -> dict[Any, Any]:
    """Create a dict in place of a defaultdict, which the reader of torch would not fill."""
    return {}


def _only_holds_values(name: str) -> bool:
    """Return whether calling this name only creates an object from values.

    In third-party packages other than numpy this is assumed of every class, and of nothing else.
    """
    module, _, last = name.rpartition(".")
    if module.partition(".")[0] == "numpy":
        return last in _OF_NUMPY
    is_of_python = {module.partition(".")[0], module} & _OF_PYTHON
    is_class = last.lstrip("_")[:1].isupper() and not is_of_python
    return is_class or any(name == known or (known[-1] == "." and name.startswith(known)) for known in _HARMLESS)
