"""Progress of a measurement in the background: completed parts, current part, and remaining time."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING

from workbench.formatting import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Minimum seconds between two updates of the text within a part.
_EVERY = 0.2
_COUNT = re.compile(r"\b([\d,]+) of ([\d,]+)\b")
_STYLE = "line-height:1.5;white-space:normal;color:var(--jp-ui-font-color1,#222)"


class MeasuringProgress:
    """Progress of a job that consists of parts.

    Args:
        title: Title of the job.
        on_change: Called with the progress as HTML, in the thread that calls `tell`.
        shares: Part -> typical duration in any unit, in the order of the parts. Without it, or in a part that it does
            not contain, the remaining time is unknown.
    """

    def __init__(self, title: str, on_change: Callable[[str], None], shares: Mapping[str, float] | None = None) -> None:
        self.title = title
        self._on_change = on_change
        self._shares = shares or {}
        self._begun, self._said = time.monotonic(), 0.0
        self._parts: list[tuple[str, float]] = []
        self._step, self._fraction = "", 0.0

    def tell(self, words: str) -> None:
        """Report the current part as ``"part"`` or ``"part: step"``; a new part completes the previous one.

        A count in the text, such as "12 of 400 updates", sets the completed fraction of the part.
        """
        part, _, self._step = words.partition(": ")
        is_new = not self._parts or part != self._parts[-1][0]
        if is_new:
            self._parts.append((part, time.monotonic()))
            self._fraction = 0.0
        if count := _COUNT.search(self._step):
            done, total = (int(number.replace(",", "")) for number in count.groups())
            self._fraction = min(1.0, done / max(1, total))
        if is_new or time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            self._on_change(self.html())

    @property
    def done(self) -> list[tuple[str, float]]:
        """The completed parts, each with its duration in seconds."""
        starts = [start for _, start in self._parts]
        return [(part, end - start) for (part, start), end in zip(self._parts, starts[1:], strict=False)]

    @property
    def current(self) -> str:
        """The current part with its step; empty before the first."""
        return ": ".join(filter(None, [self._parts[-1][0], self._step])) if self._parts else ""

    @property
    def fraction(self) -> float | None:
        """Completed fraction of the job; None if unknown."""
        part, names = self._parts[-1][0] if self._parts else "", list(self._shares)
        if part not in names:
            return None
        before = sum(self._shares[name] for name in names[: names.index(part)])
        return (before + self._fraction * self._shares[part]) / sum(self._shares.values())

    def html(self) -> str:
        """Return a progress bar, the current part, elapsed and remaining time, and the completed parts."""
        fraction, elapsed = self.fraction, time.monotonic() - self._begun
        times = duration(elapsed)
        if fraction:
            times += f", about {duration(max(1.0, elapsed * (1 - fraction) / fraction))} left"
        current = f": {html.escape(self.current)}" if self.current else ""
        value = "" if fraction is None else f' value="{fraction:.3f}"'
        look = "vertical-align:middle;width:140px;accent-color:var(--jp-brand-color1,#1976d2)"
        done = " · ".join(f"✓ {html.escape(part)} ({duration(seconds)})" for part, seconds in self.done)
        return (
            f'<div style="{_STYLE}"><progress aria-label="{html.escape(self.title)}"{value} style="{look}"></progress> '
            f"<b>{html.escape(self.title)}</b>{current} … · {times}{f'<div>{done}</div>' if done else ''}</div>"
        )


def status_html(sentence: str) -> str:
    """Return HTML of a sentence to show in place of the progress."""
    return f'<div role="status" style="{_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
