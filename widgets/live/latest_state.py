"""A widget that shows the latest state of something that changes faster than a page can draw."""

from __future__ import annotations

import contextvars
import threading
import time
from pathlib import Path
from typing import Any

import anywidget

#: Seconds without an answer after which the next state is sent all the same: a kernel at work cannot read answers.
_BLIND_EVERY = 1.0
#: Seconds without an answer after which a page is only asked whether it is still there.
_BLIND_FOR = 600.0
#: Seconds between two such questions; doubled each time.
_PATIENCE = 5.0
_LONGEST_PATIENCE = 60.0


def script(*names: str) -> str:
    """Scripts or styles of this folder as one text."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


class LatestState(anywidget.AnyWidget):
    """Sends its page the latest state, one at a time: the next one leaves when the page has painted the last.

    So nothing queues up, however fast the state changes and however slow the page is; states in between are left out.
    Nothing is sent before a page has asked, and a page that was closed or reloaded, or a second view, asks again.

    JupyterLab sends what the page says to a thread of its own in the kernel, and goes on doing so where answers leave
    in the same context (`context`): so pages are heard while a cell runs. Where they are not, as in other front ends,
    states leave once a second without an answer, for ten minutes.

    Attributes:
        n_sent: States sent.
        n_painted: States that a page has said to have painted.
        context: Of the latest message of a page; what is sent in it is answered in the same thread.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.n_sent = self.n_painted = 0
        self._sending = threading.Lock()
        self._is_stale = self._is_new_page = True
        self._has_page = self._is_in_flight = False
        self._sent_at = self._heard_at = 0.0
        self._patience = _PATIENCE
        self.context = contextvars.copy_context()
        super().__init__(**kwargs)
        self.on_msg(self._receive)

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """The present content: a small JSON value and binary buffers. Called in any thread."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Show the state as it is now, or a later one; from any thread, and without waiting for the page."""
        self._is_stale = True
        self._send_if_due()

    def say_alive(self) -> None:
        """Let the page know that the kernel is there, though nothing has changed."""
        if self._has_page:
            self._tell({"is_alive": True})

    def _send_if_due(self) -> None:
        with self._sending:
            if not self._has_page or not self._is_stale:
                return
            now = time.monotonic()
            silent = now - self._heard_at
            if self._is_in_flight and silent > _BLIND_FOR:
                if now - self._sent_at > self._patience:  # a few bytes, as no page may be reading
                    self._sent_at, self._patience = now, min(2 * self._patience, _LONGEST_PATIENCE)
                    self._tell({"are_you_there": True})
                return
            if self._is_in_flight and now - self._sent_at < _BLIND_EVERY:
                return
            self._is_stale = False
            content, buffers = self.state()
            self.n_sent += 1
            self._is_in_flight, self._sent_at, self._is_new_page = True, now, False
            self._tell({**content, "number": self.n_sent}, buffers)

    def _tell(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.context.copy().run(self.send, content, buffers)

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        """A page that is new has nothing to show; one that has painted may have the next."""
        self.context = contextvars.copy_context()
        if "painted" not in content:
            return
        painted = content["painted"]
        with self._sending:
            self._has_page, self._patience = True, _PATIENCE
            self._heard_at = time.monotonic()
            # What was sent without an answer is still on its way.
            self._is_in_flight = 0 < painted < self.n_sent and not content.get("again", False)
            self._is_stale |= painted < self.n_sent or painted == 0
            self._is_new_page |= painted == 0
            self.n_painted += bool(painted) and not content.get("again", False)
        self._send_if_due()
