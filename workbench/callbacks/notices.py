"""Notices of a run: its alarms and its end, as messages to a webhook or a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from workbench.callbacks.mirrors import RaisedAlarm, Service
from workbench.errors import OptionError
from workbench.formatting import counted
from workbench.schema.statuses import RunState

#: Seconds between two notices of alarms, and until a server must have answered; alarms that a notice describes.
_REST, _TIMEOUT, _N_DESCRIBED = 60.0, 5.0, 5
_EXPECTED = "the URL of a webhook, the name of an environment variable after a $, a function of a text, or a list"


class Notice(Service):
    """Messages about one run; alarms that come while it rests are described and counted in one message."""

    takes_rows, pause = False, 0.0

    def __init__(self, send: Callable[[str, dict[str, Any]], object], title: str, path: Path | None) -> None:
        self._send, self.title, self.rest = send, title, _REST
        self._name = "watched" if path is None else path.name
        self._waiting: list[RaisedAlarm] = []
        self._n_alarms = 0

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        """Whether alarms wait that could not be sent."""
        return bool(self._waiting)

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        """Send one message about all alarms since the last one."""
        self._waiting += alarms
        self._n_alarms += len(alarms)
        n, first = len(self._waiting), self._waiting[0][0]
        what = f"{n} alarms from step {first.step} on" if n > 1 else f"alarm at step {first.step}"
        lines = [f"step {alarm.step}, {alarm.signal}: {text}" for alarm, text in self._waiting[:_N_DESCRIBED]]
        more = [f"and {n - _N_DESCRIBED} more"] if n > _N_DESCRIBED else []
        self._post("alarm", first.step, n, "\n".join([f"Run {self._name}: {what}", *lines, *more]))
        self._waiting = []

    def close(self, state: str, n_updates: int) -> None:
        """Send a message about the end of the run."""
        how = {RunState.FINISHED: "finished", RunState.STOPPED: "was stopped by an error"}.get(RunState(state), state)
        text = f"Run {self._name} {how} after {n_updates} updates, with {counted(self._n_alarms, 'alarm')}"
        self._post(str(state), n_updates, self._n_alarms, text)

    def _post(self, kind: str, step: int, n_alarms: int, text: str) -> None:
        self._send(text, {"run": self._name, "kind": kind, "step": step, "n_alarms": n_alarms, "text": text})


def notices_of(notify: Any) -> list[Callable[[Path | None], Notice]]:
    """Return a function of the path of the store for each URL, name of a variable, or function."""
    given = notify if isinstance(notify, list | tuple) else [] if notify is None else [notify]
    return [_notice_of(each) for each in given]


def _notice_of(to: Any) -> Callable[[Path | None], Notice]:
    if callable(to):
        return partial(Notice, lambda text, data: to(text), "The function of notify=")
    if not isinstance(to, str):
        raise OptionError.of("notify", to, _EXPECTED)
    is_named = to.startswith("$")
    url = os.environ.get(to[1:], "") if is_named else to
    host: str = ""
    with suppress(ValueError):
        parts = urlsplit(url)
        host = (parts.hostname or "") if parts.scheme in ("http", "https") and "@" not in parts.netloc else ""
    if not host:  # a URL is a secret, and the message does not contain it
        raise OptionError(
            f"{f'the environment variable {to[1:]}' if is_named else 'notify'} must be a URL that begins with https:// "
            "and names no user; copy it from the settings of the webhook, or pass a function that sends the text."
        )
    # Closures, as the representation of a partial function shows its arguments.
    return lambda path: Notice(lambda text, data: _post(url, host, text, data), f"The webhook at {host}", path)


def _post(url: str, host: str, text: str, data: dict[str, Any]) -> None:
    """Post a message in the form that the host expects."""
    body: dict[str, Any] = data
    if host == "hooks.slack.com":
        body = {"text": escape(text, quote=False)}
    elif host.removeprefix("www.") in ("discord.com", "discordapp.com"):
        body = {"content": text[:2000], "allowed_mentions": {"parse": []}}
    headers = {"Content-Type": "application/json", "User-Agent": "stability-workbench"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=_TIMEOUT):
        pass
