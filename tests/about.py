"""Assert what an exception is about by its fields, not by its sentence.

For example ``pytest.raises(OptionError, check=about("n_steps", 0))``.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError

_ANYTHING: Any = object()


class about:  # noqa: N801  # reads as a word of the assertion
    """Check for `pytest.raises`: the exception is one of the workbench with these fields.

    Args:
        name: The field ``name``.
        value: The field ``value``; not compared if left out.
        expected: The field ``expected``; not compared if left out.
    """

    def __init__(self, name: str, value: Any = _ANYTHING, expected: Any = _ANYTHING) -> None:
        wanted = {"name": name, "value": value, "expected": expected}
        self._fields = {field: each for field, each in wanted.items() if each is not _ANYTHING}
        self._found: dict[str, Any] = {}

    def __call__(self, error: BaseException) -> bool:
        self._found = {field: getattr(error, field, None) for field in self._fields}
        is_sentence = str(error).rstrip().endswith((".", ")", '"', "'"))
        return isinstance(error, WorkbenchError) and is_sentence and self._found == self._fields

    def __repr__(self) -> str:
        return f"about({self._fields}, found {self._found})"
