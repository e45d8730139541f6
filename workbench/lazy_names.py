"""Lazy loading of public names, listed in the stub ``__init__.pyi`` that type checkers also read."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.option_checks import published


def attach_stub(
    package: str, file: str, *, optional: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the module functions (PEP 562) that load the names in the stub of a package when they are first used.

    Only the standard library is needed. Names of ``optional``, a subpackage that needs further packages, load likewise
    but are not listed.
    """
    # Name -> its module, and its name there; None for the module itself.
    places: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                places[name] = (f".{alias.name}", None) if node.module is None else (f".{node.module}", alias.name)
    names = sorted(name for name, (path, _) in places.items() if not optional or path != f".{optional}")

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in places:
            known = {each.lower(): each for each in ([] if name.startswith("_") else places)}
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {package.replace('workbench', 'wb', 1)}.{known[near[0]]}?" if near else ""
            raise AttributeError(f"No {package} attribute {name}{hint}", name=name)
        path, inner = places[name]
        module = importlib.import_module(path, package)
        value = module if inner is None else published(getattr(module, inner))
        setattr(sys.modules[package], name, value)  # later look-ups do not call this function
        return value

    return __getattr__, lambda: list(names), names
