"""Assert what an exception is about.

For example ``pytest.raises(OptionError, check=about("n_steps", 0))``, or ``check=says("no such folder")`` for an error
that is a sentence alone.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.errors import WorkbenchError

_ANYTHING: Any = object()


class about:  # noqa: N801  # reads as a word of the assertion
    """Check for `pytest.raises`: the exception is one of the workbench with these fields.

    An error without fields must have a word of ``name`` or ``value`` in its sentence.

    Args:
        name: The field ``name``.
        value: The field ``value``; not compared if left out.
        expected: The field ``expected``; not compared if left out.
    """

    def __init__(self, name: str, value: Any = _ANYTHING, expected: Any = _ANYTHING) -> None:
        wanted = {"name": name, "value": value, "expected": expected}
        self._fields = {field: each for field, each in wanted.items() if each is not _ANYTHING}
        self._found: Any = {}

    def __call__(self, error: BaseException) -> bool:
        self._found = {field: getattr(error, field, None) for field in self._fields}
        if not _is_sentence(error):
            return False
        if error.name:  # type: ignore[attr-defined]
            return self._found == self._fields
        self._found = str(error)
        words = [word for field in ("name", "value") for word in re.findall(r"\w+", str(self._fields.get(field, "")))]
        parts = [part.removesuffix("s").lower() for word in words for part in (word, *word.split("_"))]
        return any(len(part) > 1 and part in self._found.lower() for part in parts)

    def __repr__(self) -> str:
        return f"about({self._fields}, found {self._found})"


class says:  # noqa: N801  # reads as a word of the assertion
    """Check for `pytest.raises`: the exception is one of the workbench, and its sentence holds these words."""

    def __init__(self, words: str) -> None:
        self._words, self._found = words, ""

    def __call__(self, error: BaseException) -> bool:
        self._found = str(error)
        return _is_sentence(error) and self._words in self._found

    def __repr__(self) -> str:
        return f"says({self._words!r}, found {self._found!r})"


def _is_sentence(error: BaseException) -> bool:
    return isinstance(error, WorkbenchError) and str(error).rstrip().endswith((".", ")", '"', "'"))
