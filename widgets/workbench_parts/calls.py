"""Calls of the library as values: each can be computed, is computed only once, and is shown as Python.

The widget computes what it shows from these calls, so the lines of Python beside it cannot differ from what it did.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

#: Prefix of functions in the code -> module.
_MODULES = {"wb": "workbench", "xr": "xarray"}
#: Functions that report their progress.
_REPORTING = frozenset({"wb.profile"})


@dataclass(frozen=True)
class LibraryCall:
    """A call of a function."""

    function: str
    args: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    variable: str = field(default="found", compare=False)
    topic: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values that the call depends on."""
        return (*self.args, *(value for _, value in self.options))

    def code(self, written: list[str]) -> str:
        """Return the code, given that of the parts."""
        n = len(self.args)
        named = [f"{name}={text}" for (name, _), text in zip(self.options, written[n:], strict=True)]
        return f"{self.function}({', '.join([*written[:n], *named])})"

    def run(self, values: list[Any], tell: Callable[[str], None]) -> Any:
        """Compute the result, given the values of the parts."""
        module, _, name = self.function.partition(".")
        if name:
            function = attrgetter(name)(importlib.import_module(_MODULES[module]))
        else:
            function = getattr(importlib.import_module("workbench.widgets"), module)
        n = len(self.args)
        options = dict(zip((name for name, _ in self.options), values[n:], strict=True))
        if self.function in _REPORTING:
            options["progress"] = tell
        return function(*values[:n], **options)


@dataclass(frozen=True)
class Derived:
    """A value that is taken from the result of a call, such as ``call["Pre-LN"]``."""

    base: LibraryCall | Derived
    suffix: str
    take: Callable[[Any], Any] = field(compare=False)
    variable: str = field(default="found", compare=False)
    topic: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values that this one depends on."""
        return (self.base,)

    def code(self, written: list[str]) -> str:
        """Return the code, given that of the parts."""
        return written[0] + self.suffix

    def run(self, values: list[Any], tell: Callable[[str], None]) -> Any:
        """Compute the value, given those of the parts."""
        return self.take(values[0])


@dataclass(frozen=True)
class Named:
    """A dict of calls or values by name."""

    items: tuple[tuple[str, Any], ...]
    variable: str = field(default="found", compare=False)
    topic: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values of the dict."""
        return tuple(value for _, value in self.items)

    def code(self, written: list[str]) -> str:
        """Return the code, given that of the parts."""
        entries = [f"{quoted(name)}: {text}" for (name, _), text in zip(self.items, written, strict=True)]
        line = f"{{{', '.join(entries)}}}"
        return line if len(line) < 72 else "{\n" + "".join(f"    {entry},\n" for entry in entries) + "}"

    def run(self, values: list[Any], tell: Callable[[str], None]) -> Any:
        """Return the dict, given its values."""
        return {name: value for (name, _), value in zip(self.items, values, strict=True)}


Node = LibraryCall | Derived | Named


class Missing(Exception):  # noqa: N818  (not an error)
    """A value that has not been computed yet."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node


class Results:
    """Results of calls; each call is computed once, and the error of a failed call is kept like a result."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._failed: dict[Hashable, Exception] = {}

    def forget_failures(self) -> None:
        """Let failed calls be computed again."""
        self._failed.clear()

    def forget(self, value: Any) -> None:
        """Let a call, and those that depend on it, be computed again."""
        for found in [found for found in self._found if _depends(found, value)]:
            del self._found[found]

    def has(self, value: Any) -> bool:
        """Return whether a value is available: computed, failed, or not a call."""
        return not isinstance(value, Node) or value in self._found or value in self._failed

    def known(self, value: Any) -> Any:
        """Return the result of a call, or the value itself if it is not a call."""
        if not isinstance(value, Node):
            return value
        if value in self._failed:
            raise self._failed[value]
        if value not in self._found:
            raise Missing(value)
        return self._found[value]

    def compute(self, value: Any, tell: Callable[[str], None]) -> None:
        """Compute a call and those that it depends on, unless their results are available."""
        if self.has(value):
            return
        for part in value.parts:
            self.compute(part, tell)
        stopped: list[BaseException] = []

        def report(words: str) -> None:
            try:
                tell(f"{value.topic}: {words}")
            except BaseException as error:
                stopped.append(error)
                raise

        if value.topic:
            tell(f"{value.topic}: starting")
        try:
            self._found[value] = value.run([self.known(part) for part in value.parts], report)
        except Exception as error:  # noqa: BLE001  (shown where the result is needed)
            if stopped:
                raise stopped[0] from None
            self._failed[value] = error


def _depends(node: Any, value: Any) -> bool:
    """Return whether a call is or depends on another one."""
    return node == value or (isinstance(node, Node) and any(_depends(part, value) for part in node.parts))


def quoted(text: str) -> str:
    """Return the code of a string, in double quotes where possible."""
    return repr(text) if '"' in text or "\\" in text or not text.isprintable() else f'"{text}"'


def as_code(value: Any) -> str:
    """Return the code of a plain value."""
    return quoted(value) if isinstance(value, str) else repr(value)


def statements(node: Node, names: dict[Any, str], lines: list[str], counts: dict[Any, int]) -> str:
    """Append the statements that a value needs, and return the code of the value."""
    if not isinstance(node, Node):
        return as_code(node)
    if node in names:
        return names[node]
    text = node.code([statements(part, names, lines, counts) for part in node.parts])
    if counts.get(node, 0) < 2 and not isinstance(node, Named):
        return text
    names[node] = name = unused(node.variable, names.values())
    lines.append(f"{name} = {text}")
    return name


def count_uses(node: Any, counts: dict[Any, int]) -> None:
    """Add to the counts how often a value and those that it depends on are used."""
    if not isinstance(node, Node):
        return
    counts[node] = counts.get(node, 0) + 1
    if counts[node] == 1:
        for part in node.parts:
            count_uses(part, counts)


def unused(name: str, used: Any) -> str:
    """Return a name of a variable that is not in use, from any text."""
    plain = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name).strip("_").lower()
    plain = plain if plain and not plain[0].isdigit() else f"run_{plain}"
    number, found = 2, plain
    while found in used:
        found, number = f"{plain}_{number}", number + 1
    return found
