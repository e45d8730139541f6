"""Checks of options: each raises `OptionError` with the name, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from workbench.errors import OptionError


def require_choice(allowed: Sequence[str], **options: str) -> None:
    """Raise `OptionError` if an option is not one of the allowed values."""
    for name, value in options.items():
        if value not in allowed:
            raise OptionError.of(name, value, tuple(allowed))


def require_bool(**options: bool) -> None:
    """Raise `OptionError` if an option is not True or False; a text such as "False" would count as true."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise OptionError.of(name, value, "True or False")


def require_whole(lowest: int, **options: int) -> None:
    """Raise if options are not integers of at least ``lowest``.

    Raises:
        OptionError: Names the option.
    """
    for name, value in options.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise OptionError.of(name, value, "an integer")
        if value < lowest:
            raise OptionError.of(name, value, f"at least {lowest}")


def require_number(lowest: float, **options: float) -> None:
    """Raise `OptionError` if an option is not a finite number of at least ``lowest``."""
    for name, value in options.items():
        if not (isinstance(value, Real) and lowest <= value < math.inf):
            raise OptionError.of(name, value, f"a finite number of at least {lowest:g}")


def require_positive(**options: float) -> None:
    """Raise `OptionError` if an option is not a positive, finite number."""
    for name, value in options.items():
        if not (isinstance(value, Real) and 0 < value < math.inf):
            raise OptionError.of(name, value, "a positive, finite number")


def require_fraction(**options: float) -> None:
    """Raise `OptionError` if an option is not a number above 0 and at most 1."""
    for name, value in options.items():
        if not (isinstance(value, Real) and 0 < value <= 1):
            raise OptionError.of(name, value, "above 0 and at most 1")
