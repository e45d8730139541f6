"""Objects beside the weights of a pickle, such as options of a training script: read as placeholders that do nothing.

torch reads a pickle without running code by refusing every class and function that it does not know. Training scripts
keep an ``argparse.Namespace``, a dataclass or a path beside the weights, though, so that their files would be refused
too. Here torch's own restricted reader is told that each unknown class *is* a placeholder: the name in the file is
never looked up or imported. A function that the pickle calls, which is how code is hidden in one, is still refused.
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

#: Functions and classes of the standard library and of numpy that only hold values, called with these values.
_HARMLESS = ("pathlib.", "datetime.", "types.SimpleNamespace", "uuid.UUID", "decimal.Decimal", "fractions.Fraction")
#: Modules of Python by the names of today and, as torch.save has pickle write them, of Python 2.
_OF_PYTHON = {*sys.stdlib_module_names, *IMPORT_MAPPING}
_OF_NUMPY = ("scalar", "_reconstruct", "_frombuffer", "dtype", "ndarray")


class _Kind(type):
    """Class of placeholders; calling one of them is how a pickle calls a function."""

    full_name: str

    def __call__(cls: Any, *_: Any, **__: Any) -> Any:
        if not _only_holds_values(cls.full_name):
            raise pickle.UnpicklingError(f"it calls {cls.full_name}")
        return Placeholder.__new__(cls)


class Placeholder(metaclass=_Kind):
    """Stands for an object of a class that was not imported, and holds nothing of it."""

    full_name = "an object"

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """The placeholder, whatever the arguments."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Leave what the object held aside."""


def placeholders(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Placeholders for the names in a pickle that torch does not know, as torch's ``safe_globals`` takes them.

    Args:
        path: A file that ``torch.save`` wrote; of other files, and of those from before torch 1.6, nothing is replaced.
    """
    try:
        if not zipfile.is_zipfile(path):
            return []
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001 noise makes the reader fail in any way, and torch.load says so again
        return []
    return [(_new_dict if name == "collections.defaultdict" else _placeholder(name), name) for name in names]


def _placeholder(name: str) -> type:
    """A class of its own for each name, so that what is called is known by its name."""
    return _Kind("Placeholder", (Placeholder,), {"full_name": name})


def _new_dict(*_: Any) -> dict[Any, Any]:
    """Takes the place of a defaultdict, which torch's reader would not fill."""
    return {}


def _only_holds_values(name: str) -> bool:
    """Whether calling what has this name makes an object out of values; elsewhere that is so of classes alone."""
    module, _, last = name.rpartition(".")
    if module.partition(".")[0] == "numpy":
        return last in _OF_NUMPY
    is_of_python = {module.partition(".")[0], module} & _OF_PYTHON
    is_class = last.lstrip("_")[:1].isupper() and not is_of_python
    return is_class or any(name == known or (known[-1] == "." and name.startswith(known)) for known in _HARMLESS)
