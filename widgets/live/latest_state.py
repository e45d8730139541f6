"""A widget that shows the latest state of something that changes faster than a page can draw."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import anywidget

#: Seconds without an answer after which a page is asked whether it is still there; doubled each time.
_PATIENCE = 5.0
_LONGEST_PATIENCE = 60.0


def script(*names: str) -> str:
    """Scripts or styles of this folder as one text."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


class LatestState(anywidget.AnyWidget):
    """Sends its page the latest state, one at a time: the next one leaves when the page has painted the last.

    So nothing queues up, however fast the state changes and however slow the page is; states in between are left out.
    Nothing is sent before a page has asked, and a page that was closed or reloaded, or a second view, asks again.

    Attributes:
        n_sent: States sent.
        n_painted: States that a page has said to have painted.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.n_sent = self.n_painted = 0
        self._sending = threading.Lock()
        self._is_stale = True
        self._has_page = self._is_in_flight = False
        self._sent_at, self._patience = 0.0, _PATIENCE
        super().__init__(**kwargs)
        self.on_msg(self._receive)

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """The present content: a small JSON value and binary buffers. Called in any thread."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Show the state as it is now, or a later one; from any thread, and without waiting for the page."""
        self._is_stale = True
        self._send_if_due()

    def _send_if_due(self) -> None:
        with self._sending:
            if not self._has_page or not self._is_stale:
                return
            now = time.monotonic()
            if self._is_in_flight:
                if now - self._sent_at > self._patience:  # a few bytes, as no page may be reading
                    self._sent_at, self._patience = now, min(2 * self._patience, _LONGEST_PATIENCE)
                    self.send({"are_you_there": True})
                return
            self._is_stale = False
            content, buffers = self.state()
            self.n_sent += 1
            self._is_in_flight, self._sent_at = True, now
            self.send({**content, "number": self.n_sent}, buffers)

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        """A page that is new has nothing to show; one that has painted may have the next."""
        if "painted" not in content:
            return
        painted = content["painted"]
        with self._sending:
            self._has_page, self._is_in_flight, self._patience = True, False, _PATIENCE
            self._is_stale |= painted < self.n_sent or painted == 0
            self.n_painted += bool(painted) and not content.get("again", False)
        self._send_if_due()
