"""Progress of a measurement in the background: what is done, what goes on, and the time that is left."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING

from workbench.formatting import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Seconds between two changes of the text within a part.
_EVERY = 0.2
_COUNT = re.compile(r"\b([\d,]+) of ([\d,]+)\b")
_STYLE = "line-height:1.5;white-space:normal;color:var(--jp-ui-font-color1,#222)"


class MeasuringProgress:
    """What has been measured, what is being measured, and how long it takes.

    Args:
        title: Title of the job.
        on_change: Called with the text as HTML, in the thread that calls `tell`.
        shares: Part -> share of the time that it usually takes, in any unit, in the order of the parts; without, or in
            a part that is not in it, the time that is left is not known.
    """

    def __init__(self, title: str, on_change: Callable[[str], None], shares: Mapping[str, float] | None = None) -> None:
        self.title = title
        self._on_change = on_change
        self._shares = shares or {}
        self._begun, self._said = time.monotonic(), 0.0
        self._parts: list[tuple[str, float]] = []
        self._step, self._fraction = "", 0.0

    def tell(self, words: str) -> None:
        """Begin with a part, and the one before is done; or, with ``"part: step"``, with a step of a part.

        A count in the words, such as "12 of 400 updates", says how much of the part is done.
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
        """The parts that are over, with the seconds that each took."""
        starts = [start for _, start in self._parts]
        return [(part, end - start) for (part, start), end in zip(self._parts, starts[1:], strict=False)]

    @property
    def current(self) -> str:
        """The part that goes on, with its step; empty before the first."""
        return ": ".join(filter(None, [self._parts[-1][0], self._step])) if self._parts else ""

    @property
    def share(self) -> float | None:
        """Share of the job that is done; None: not known."""
        part, names = self._parts[-1][0] if self._parts else "", list(self._shares)
        if part not in names:
            return None
        before = sum(self._shares[name] for name in names[: names.index(part)])
        return (before + self._fraction * self._shares[part]) / sum(self._shares.values())

    def html(self) -> str:
        """A bar, what goes on, the time so far and the time left; below, the parts that are done."""
        share, elapsed = self.share, time.monotonic() - self._begun
        times = duration(elapsed)
        if share:
            times += f", about {duration(max(1.0, elapsed * (1 - share) / share))} left"
        goes_on = f": {html.escape(self.current)}" if self.current else ""
        value = "" if share is None else f' value="{share:.3f}"'
        look = "vertical-align:middle;width:140px;accent-color:var(--jp-brand-color1,#1976d2)"
        done = " · ".join(f"✓ {html.escape(part)} ({duration(seconds)})" for part, seconds in self.done)
        return (
            f'<div style="{_STYLE}"><progress aria-label="{html.escape(self.title)}"{value} style="{look}"></progress> '
            f"<b>{html.escape(self.title)}</b>{goes_on} … · {times}{f'<div>{done}</div>' if done else ''}</div>"
        )


def said(sentence: str) -> str:
    """A sentence in the place of the progress."""
    return f'<div role="status" style="{_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
