"""Functions that are called when something changes, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Observers:
    """Functions to call, in the order in which they were added; one may remove itself while it is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[Callable[..., None]] = []

    def add(self, function: Callable[..., None]) -> Callable[[], None]:
        """Call a function from now on.

        Returns:
            A function that removes it.
        """
        with self._lock:
            self._functions.append(function)

        def stop() -> None:
            with self._lock:
                if function in self._functions:
                    self._functions.remove(function)

        return stop

    def call(self, *arguments: Any) -> None:
        """Call all of them, in this thread; exceptions are passed on."""
        with self._lock:
            functions = list(self._functions)
        for function in functions:
            function(*arguments)
