"""Progress of long computations in terminals and notebooks, and the number of available cores."""

from __future__ import annotations

import contextvars
import html
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, Self

from workbench.formatting import counted, duration

#: Seconds before progress is shown, and between two updates: in a notebook or terminal, in a log file.
_DELAY, _EVERY, _EVERY_IN_FILE = 1.0, 0.5, 5.0
_LINE = "font-family:var(--jp-ui-font-family,sans-serif);font-size:var(--jp-ui-font-size1,13px);line-height:1.5"


class Progress:
    """Display of the progress of a computation while its ``with`` block runs.

    In a terminal it is a bar on standard error that disappears at the end; in a notebook, where only the main thread
    shows progress, a display that ends as a line such as "profiled 30 layers in 12 s". Nothing is shown for work that
    ends within a second. ``progress`` may be a function that receives each text instead and may raise to end the work,
    ``done`` is a participle, ``unit`` "%" for parts of unequal length (see `begin`), and ``total`` is None if unknown.
    """

    def __init__(
        self, progress: bool | Callable[[str], None], done: str, *, unit: str, total: float | None = None
    ) -> None:
        self.n: float = 0
        self.total, self.heading = total, ""
        self._done, self._unit = done, unit
        self._report = progress if callable(progress) else None
        self._screen = _screen() if progress is True else None
        self._words, self._part, self._part_begun, self._part_length = "", "", 0.0, 0.0
        self._begun = self._first_begun = time.monotonic()
        self._is_shown, self._is_over = False, threading.Event()
        run = contextvars.copy_context().run  # where a kernel keeps the cell to which a display belongs
        self._thread = threading.Thread(target=run, args=(self._keep_showing,), name=f"Progress: {done}", daemon=True)

    def __enter__(self) -> Self:
        if self._screen is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._screen is None:
            return
        self._is_over.set()
        self._thread.join()
        if self._is_shown:
            self._screen.end(self._summary if kind is None else self._stopped, has_failed=kind is not None)

    def update(self) -> None:
        """Count one more completed unit."""
        self.n += 1
        if self._report is not None:
            self._report(self._count)

    def describe(self, words: str) -> None:
        """Describe the current work; until the first unit is completed, this restarts its measured duration."""
        self._words = self.heading + words
        if not self.n:
            self._first_begun = time.monotonic()
        if self._report is not None:
            self._report(self._words)

    def begin(self, part: str, length: float) -> None:
        """End the current part and begin the next one."""
        self._part_begun += self._part_length
        self.n, self._part, self._part_length = self._part_begun, part, length
        self.describe(part)

    def step(self, words: str, fraction: float = 0.0) -> None:
        """Describe the current work within a part, and set the completed fraction of the part."""
        self.n = self._part_begun + fraction * self._part_length
        self.describe(f"{self._part}: {words}")

    @property
    def fraction(self) -> float | None:
        """Fraction of completed units, at most 1; None if unknown."""
        return min(1.0, self.n / self.total) if self.total else None

    def __str__(self) -> str:
        now, fraction = time.monotonic(), self.fraction
        times = duration(now - self._begun)
        if fraction:
            times += f", about {duration(max(1, (now - self._first_begun) * (1 - fraction) / fraction))} left"
        separator = ": " if self._unit == "%" else " "
        return " · ".join(filter(None, [f"{self._done}{separator}{self._count}", self._words, times]))

    @property
    def _count(self) -> str:
        if self._unit == "%":
            return f"{100 * (self.fraction or 0):.0f} %"
        if self.total is None:
            return counted(int(self.n), self._unit)
        return f"{self.n:,} of {counted(int(self.total), self._unit)}"

    @property
    def _summary(self) -> str:
        what = "" if self._unit == "%" else f" {counted(int(self.n), self._unit)}"
        return f"{self._done}{what} in {duration(time.monotonic() - self._begun)}"

    @property
    def _stopped(self) -> str:
        return f"stopped {'at' if self._unit == '%' else 'after'} {self._count}"

    def _keep_showing(self) -> None:
        assert self._screen is not None
        wait = _DELAY
        while not self._is_over.wait(wait):
            self._is_shown, wait = True, self._screen.every
            self._screen.show(self)


class _Screen(Protocol):
    """Display on which progress is shown."""

    every: float

    def show(self, progress: Progress) -> None: ...

    def end(self, words: str, *, has_failed: bool) -> None: ...


class _Terminal:
    """Bar on standard error; only the message that work was stopped remains."""

    def __init__(self) -> None:
        self.every = _EVERY if sys.stderr.isatty() else _EVERY_IN_FILE
        self._bar: Any = None

    def show(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=1, leave=False, dynamic_ncols=True, bar_format="{bar:20} {desc}")
        self._bar.n = progress.fraction or 0
        self._bar.set_description_str(str(progress))

    def end(self, words: str, *, has_failed: bool) -> None:
        self._bar.close()
        if has_failed:
            print(words, file=sys.stderr)


class _Notebook:
    """Display in the output of a cell, whose content is replaced."""

    every = _EVERY

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display, self._shown = display, None

    def show(self, progress: Progress) -> None:
        text, fraction = f"{progress} · interrupt (■) to stop", progress.fraction
        value = "" if fraction is None else f'value="{fraction:.3f}"'
        style = "width:160px;vertical-align:middle;accent-color:var(--jp-brand-color1,#1976d2)"
        bar = f'<progress aria-label="progress" {value} style="{style}"></progress>'
        self._replace(text, f"{bar} {html.escape(text)}", "var(--jp-ui-font-color1,#222)")

    def end(self, words: str, *, has_failed: bool) -> None:
        self._replace(words, html.escape(words), "var(--jp-ui-font-color2,#666)")

    def _replace(self, text: str, markup: str, color: str) -> None:
        content = {"text/plain": text, "text/html": f'<div role="status" style="{_LINE};color:{color}">{markup}</div>'}
        if self._shown is None:
            self._shown = self._display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)


def _screen() -> _Screen | None:
    """Return the display for progress; None if there is none. IPython is never imported here."""
    ipython = sys.modules.get("IPython")
    if not hasattr(getattr(ipython, "get_ipython", lambda: None)(), "kernel"):
        return _Terminal()
    is_main = threading.current_thread() is threading.main_thread()
    return _Notebook(sys.modules["IPython.display"].display) if is_main else None


def n_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
