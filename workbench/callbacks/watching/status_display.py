"""Display of the status of a run: below a notebook cell, as one line in a terminal, or in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm
    from workbench.callbacks.watching.run_status import RunStatus

#: Minimum number of seconds between two updates of the display.
_PAUSE = 0.5


class StatusDisplay:
    """Display of a status, updated at most twice per second, and immediately at an alarm.

    Args:
        status: Status to show.
    """

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._shown_at = -float("inf")
        self._handle: Any = None
        self._is_off = False
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if _in_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML(status.as_html()), display_id=True)

    def update(self, new_alarms: Sequence[Alarm]) -> None:
        """Update the display.

        Args:
            new_alarms: Alarms since the last call.
        """
        now = time.monotonic()
        if not self._is_off and (new_alarms or now - self._shown_at >= _PAUSE):
            self._shown_at = now
            self._try_to(lambda: self._show(new_alarms))

    def close(self) -> None:
        """Show the final status."""
        if not self._is_off:
            self._try_to(lambda: self._show((), end="\n"))

    def _try_to(self, show: Callable[[], None]) -> None:
        """Call a function; if it fails, as in a closed terminal, the display is switched off and training continues."""
        try:
            show()
        except Exception:  # noqa: BLE001  (the display must never stop a training)
            self._is_off = True

    def _show(self, new_alarms: Sequence[Alarm], *, end: str = "") -> None:
        if self._handle is None:
            for alarm in new_alarms:
                self._clear()
                print(f"step {alarm.step:,}: {alarm.message}", file=sys.stderr, flush=True)
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._status.as_html()))
        elif self._is_terminal:
            self._clear()
            print(self._status.as_text(), end=end, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr)


def _in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
