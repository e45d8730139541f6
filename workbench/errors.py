"""Exceptions of the workbench.

Each message is one sentence: what was wrong, what was expected, and how to correct it. Where one argument, option or
file is wrong, these facts are also attributes of the exception.

Example:
    >>> import workbench as wb
    >>> try:
    ...     wb.zoo.transformer(norm="group", d_model=16, n_layers=1, n_heads=2, vocab_size=8)
    ... except wb.WorkbenchError as error:
    ...     error.name, error.value, "pre_ln" in error.expected
    ('norm', 'group', True)

See Also:
    `workbench.WorkbenchError`: Base class, which describes the attributes.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Self

__all__ = [
    "AnatomyError", "CallError", "CheckpointError", "MissingPackageError", "OptionError", "SchemaError",
    "SnapshotError", "StoreError", "SweepError", "WorkbenchError",
]  # fmt: skip

#: Entries of a collection that an error keeps.
_MAX_ENTRIES = 20


class WorkbenchError(Exception):
    """Base class of all exceptions that the workbench raises deliberately.

    Args:
        message: One sentence: what was wrong, what was expected, and how to correct it.
        name: What was wrong: the name of an argument, option, variable, tensor or file; empty if the sentence alone
            says it.
        value: The value found; None where nothing was found. Objects other than numbers, text, paths and small
            collections of them are replaced by a short description, so that an exception can be pickled and keeps no
            model in memory.
        expected: What was expected: a phrase that completes "must be", or a tuple of the allowed values.

    Attributes:
        name: As above.
        value: As above.
        expected: As above.

    Example:
        >>> import workbench as wb
        >>> try:
        ...     wb.TrainingPlan(n_steps=0, learning_rate=1e-3)
        ... except wb.WorkbenchError as error:
        ...     error.name, error.value
        ('n_steps', 0)

    See Also:
        `workbench.errors.OptionError`: An argument has an invalid value.
        `workbench.errors.StoreError`: A run cannot be read or written.
    """

    name: str
    value: Any
    expected: str | tuple[Any, ...]

    def __init__(
        self, message: str = "", *, name: str = "", value: object = None, expected: str | tuple[Any, ...] = ""
    ) -> None:
        # A name from a file may hold line breaks or invisible characters, and a message is one sentence.
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
        self.name = str(name)
        self.value = as_data(value)
        self.expected = expected if isinstance(expected, str) else as_data(tuple(expected))

    @classmethod
    def of(cls, name: str, value: object, expected: str | tuple[Any, ...], *, remedy: str = "") -> Self:
        """Create an exception with the standard sentence, "NAME must be EXPECTED, got VALUE; REMEDY".

        Args:
            name: Name of the argument or option.
            value: The value found.
            expected: A phrase that completes "must be", or a tuple of the allowed values.
            remedy: What to do, in the imperative and without a period.
        """
        phrase = expected if isinstance(expected, str) else f"one of {', '.join(_text(each) for each in expected)}"
        end = f"; {remedy}." if remedy else "."
        return cls(f"{name} must be {phrase}, got {_text(value)}{end}", name=name, value=value, expected=expected)

    def within(self, place: str) -> Self:
        """Return the same exception with the place where it occurred in front of its sentence.

        Args:
            place: For example the name of a file or of a section of it.
        """
        return type(self)(f"{place}: {self}", name=self.name, value=self.value, expected=self.expected)


class CheckpointError(WorkbenchError):
    """A checkpoint cannot be opened.

    Example:
        >>> import workbench as wb
        >>> try:
        ...     wb.open_checkpoint("no/such/folder/")
        ... except wb.errors.CheckpointError as error:
        ...     print(str(error).partition(";")[0])
        There is no file or folder no/such/folder/

    See Also:
        `workbench.open_checkpoint`: Raises it.
    """


class AnatomyError(WorkbenchError):
    """The blocks or the residual stream of a model cannot be identified with certainty.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> try:
        ...     wb.read_anatomy(torch.nn.Linear(2, 2), torch.ones(1, 2))
        ... except wb.errors.AnatomyError as error:
        ...     "Linear" in str(error)
        True

    See Also:
        `workbench.read_anatomy`: Raises it.
    """


class SnapshotError(WorkbenchError):
    """Snapshots cannot be analyzed: there are too few, or they are constant or not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> try:
        ...     wb.koopman.whitened_dmd(np.full((8, 2), np.nan), np.ones((8, 2)))
        ... except wb.errors.SnapshotError as error:
        ...     "finite" in str(error)
        True

    See Also:
        `workbench.profile`: Raises it.
    """


class OptionError(WorkbenchError, ValueError):
    """An argument or option has an invalid value.

    Example:
        >>> import workbench as wb
        >>> try:
        ...     wb.KSS(strength=-1.0)
        ... except wb.errors.OptionError as error:
        ...     error.name, error.value
        ('strength', -1.0)

    See Also:
        `workbench.WorkbenchError`: Describes the attributes.
    """


class CallError(OptionError, TypeError):
    """A call lacks an argument, or has one that the function does not know.

    Example:
        >>> import workbench as wb
        >>> try:
        ...     wb.KSS(strenght=0.1)
        ... except wb.errors.CallError as error:
        ...     print(error)
        KSS has no argument strenght; use strength.

    See Also:
        `workbench.errors.OptionError`: An argument has an invalid value.
    """


class SchemaError(WorkbenchError):
    """A dataset does not follow the schema.

    Example:
        >>> import xarray as xr
        >>> import workbench as wb
        >>> try:
        ...     wb.signals.read(xr.DataTree(), "loss")
        ... except wb.errors.SchemaError as error:
        ...     "loss" in str(error)
        True

    See Also:
        `workbench.schema`: Describes the data.
    """


class StoreError(WorkbenchError):
    """A run cannot be written to disk, or read from it.

    Example:
        >>> import workbench as wb
        >>> try:
        ...     wb.open_run("no/such/run.zarr")
        ... except wb.errors.StoreError as error:
        ...     error.name, error.value.name
        ('path', 'run.zarr')

    See Also:
        `workbench.open_run`: Raises it.
        `workbench.save`: Raises it.
    """


class SweepError(WorkbenchError):
    """A sweep cannot reach its cluster, or some of its runs failed.

    Example:
        >>> import workbench as wb
        >>> issubclass(wb.errors.SweepError, wb.WorkbenchError)
        True

    See Also:
        `workbench.sweeps.run`: Raises it.
    """


class MissingPackageError(WorkbenchError, ImportError):  # type: ignore[misc]  # the name of an ImportError may be None
    """A function needs an optional package that is not installed.

    Example:
        >>> import workbench as wb
        >>> issubclass(wb.errors.MissingPackageError, ImportError)
        True

    See Also:
        `workbench.plots`: Needs the packages of the extra ``lab``.
    """


def as_data(value: object) -> Any:
    """Return a value that can be pickled and is small: plain data of up to 20 items, or a short description."""
    shape = getattr(value, "shape", None)
    if shape == () and callable(item := getattr(value, "item", None)):
        return as_data(item())
    if isinstance(value, bool | int | float | complex | str | bytes | os.PathLike | None):
        return value
    if isinstance(value, Mapping):
        return {as_data(key): as_data(each) for key, each in list(value.items())[:_MAX_ENTRIES]}
    if isinstance(value, list | tuple | set | frozenset):
        entries = list(value) if isinstance(value, list | tuple) else sorted(value, key=repr)
        return tuple(as_data(each) for each in entries[:_MAX_ENTRIES])
    if isinstance(value, type):
        return value.__name__
    kind = type(value).__name__
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"


def _text(value: object) -> str:
    """Return the value as text for a sentence."""
    data = as_data(value)
    return f"'{data}'" if isinstance(data, str) and isinstance(value, str | os.PathLike) else str(data)


def require_lab(what: str, *packages: str) -> None:
    """Raise MissingPackageError if packages of the extra ``lab`` are missing, for what, such as "Figures"."""
    missing = [name for name in packages if sys.modules.get(name) is None and find_spec(name) is None]
    if missing:
        missing = [{"PIL": "pillow"}.get(name, name) for name in missing]
        raise MissingPackageError(
            f"{what} need packages that are not installed ({', '.join(missing)}); install them with: "
            'pip install "stability-workbench[lab]"',
            name=", ".join(missing),
            expected="installed",
        )


def __dir__() -> list[str]:
    return sorted(__all__)


def held_module(model: Any) -> Any:
    """Return the module that a subject holds as ``model``; anything with ``get_parameter`` is returned unchanged."""
    if isinstance(model, type):
        raise AnatomyError(
            f"The model is the class {model.__name__}; pass an instance of it, such as {model.__name__}(...).",
            name="model",
            value=model,
            expected="a model rather than a class",
        )
    module = model if hasattr(model, "get_parameter") else getattr(model, "model", None)
    if not hasattr(module, "get_parameter"):
        raise AnatomyError(
            f"The model is a {type(model).__name__}, expected an nn.Module or a subject from wb.open_checkpoint().",
            name="model",
            value=model,
            expected="an nn.Module or a subject",
        )
    return module


def require_listed(name: str, chosen: Iterable[Any], listed: Iterable[Any], *, remedy: str = "") -> None:
    """Raise `OptionError` for the first of the chosen values of an argument that is not listed."""
    listed = tuple(listed)
    for each in chosen:
        if not any(isinstance(each, type(known)) and each == known for known in listed):
            raise OptionError.of(name, each, listed, remedy=remedy)


def require_known(owner: str, given: Mapping[Any, Any], known: Iterable[str], *, word: str = "option") -> None:
    """Raise `OptionError` for the first name of given options that their owner does not know."""
    known = tuple(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"use '{near[0]}'" if near else f"its {word}s are {', '.join(known)}"
            raise OptionError(f"{owner} has no {word} '{name}'; {hint}.", name=name, value=given[name], expected=known)
