"""Progress of a measurement in the background, part by part."""

from __future__ import annotations

import html
import time
from collections.abc import Callable

_QUIET = "color:var(--jp-ui-font-color1,#222)"


class MeasuringProgress:
    """What has been measured, how long it took, and what is being measured.

    Args:
        title: Title of the running job.
        on_change: Function called with the text as HTML, in the thread that calls `tell`.
    """

    def __init__(self, title: str, on_change: Callable[[str], None]) -> None:
        self.title = title
        self._on_change = on_change
        self._parts: list[tuple[str, float]] = []
        self._step = ""

    def tell(self, words: str) -> None:
        """Begin with a part, and the one before is done; or, with ``"part: step"``, with a step of a part."""
        part, _, self._step = words.partition(": ")
        if not self._parts or part != self._parts[-1][0]:
            self._parts.append((part, time.monotonic()))
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

    def html(self) -> str:
        """The HTML: an indeterminate progress bar, as the duration of a part is unknown, and the parts."""
        goes_on = f": {html.escape(self.current)} …" if self.current else " …"
        done = " · ".join(f"✓ {html.escape(part)} ({seconds:.0f} s)" for part, seconds in self.done)
        return (
            f'<div role="status" style="{_QUIET};line-height:1.5;white-space:normal">'
            f'<progress aria-label="measuring" style="vertical-align:middle;width:90px"></progress> '
            f"<b>{html.escape(self.title)}</b>{goes_on}<div>{done}</div></div>"
        )


def said(sentence: str) -> str:
    """A sentence in the place of the progress."""
    return f'<div role="status" style="{_QUIET};line-height:28px">{html.escape(sentence)}</div>' if sentence else ""
