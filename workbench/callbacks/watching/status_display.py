"""Where the status of a run is shown: under the cell of a notebook, as one line of a terminal, or in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm
    from workbench.callbacks.watching.run_status import RunStatus

#: Seconds between two updates.
_PAUSE = 0.5


class StatusDisplay:
    """Shows a status as it changes, at most twice a second; alarms at once.

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

    def update(self, fresh: Sequence[Alarm]) -> None:
        """Show what is new.

        Args:
            fresh: Alarms since the last call.
        """
        now = time.monotonic()
        if not self._is_off and (fresh or now - self._shown_at >= _PAUSE):
            self._shown_at = now
            self._guarded(lambda: self._show(fresh))

    def close(self) -> None:
        """Show the last state."""
        if not self._is_off:
            self._guarded(lambda: self._show((), end="\n"))

    def _guarded(self, show: Callable[[], None]) -> None:
        """Run it; where it fails, as in a terminal that was closed, nothing is shown any more and training goes on."""
        try:
            show()
        except Exception:  # noqa: BLE001  (what is shown never stops a training)
            self._is_off = True

    def _show(self, fresh: Sequence[Alarm], *, end: str = "") -> None:
        if self._handle is None:
            for alarm in fresh:
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
    """Whether a Jupyter kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
