"""Observers: functions that are called when something changes, in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Observers:
    """Functions that are called in the order in which they were added; a function may remove itself while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[Callable[..., None]] = []

    def add(self, function: Callable[..., None]) -> Callable[[], None]:
        """Add a function.

        Returns:
            A function that removes it again.
        """
        with self._lock:
            self._functions.append(function)

        def remove() -> None:
            with self._lock:
                if function in self._functions:
                    self._functions.remove(function)

        return remove

    def call(self, *arguments: Any) -> None:
        """Call all functions in this thread; their exceptions are raised here."""
        with self._lock:
            functions = list(self._functions)
        for function in functions:
            function(*arguments)
