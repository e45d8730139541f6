"""Parts of `LiveTraining`: a state that changes faster than the page can draw it, switches, and the list of alarms."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget

from workbench.callbacks.faults import Fault
from workbench.callbacks.kss import KSS
from workbench.plots import plane_view
from workbench.plots.timeline_events import TimelineEvent

#: Seconds without an answer after which the next state is sent anyway, because a busy kernel cannot read answers.
_BLIND_EVERY = 1.0
#: Seconds without an answer after which the page is only asked whether it is still open.
_BLIND_FOR = 600.0
#: Seconds between two such questions; doubled each time.
_PATIENCE = 5.0
_LONGEST_PATIENCE = 60.0


def script(*names: str) -> str:
    """Return scripts or styles of this folder as one text; the script of planes has the constants of `plane_view`."""
    numbers = {name: getattr(plane_view, name) for name in ("KNEE", "PER_DECADE", "FARTHEST", "NEAR")}
    numbers["MANY"] = plane_view.DENSE
    constants = "".join(f"const {name} = {value};\n" for name, value in numbers.items())
    texts = (Path(__file__).with_name(name).read_text() for name in names)
    return (constants if "plane.js" in names else "") + "\n".join(texts)


class LatestState(anywidget.AnyWidget):
    """Base class of widgets that send the page their latest state, the next one after the page has painted the last.

    No queue builds up, however fast the state changes and however slow the page is; intermediate states are skipped.
    Nothing is sent before a page requests it. A page that was closed or reloaded, and a second view, request it again.

    JupyterLab delivers messages of the page in a separate kernel thread, and continues to do so if answers are sent in
    the context of its latest message (`context`), so pages are answered while a cell runs. Other front ends do not: a
    state is then sent every second without an answer, for ten minutes.
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
        """Return the current state as a small JSON value and binary buffers; called in any thread."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Schedule sending the current state or a later one; callable from any thread, without waiting for the page."""
        self._is_stale = True
        self._send_if_due()

    def say_alive(self) -> None:
        """Let the page know that the kernel is running although nothing has changed."""
        if self._has_page:
            self._tell({"is_alive": True})

    def _send_if_due(self) -> None:
        with self._sending:
            if not self._has_page or not self._is_stale:
                return
            now = time.monotonic()
            silent = now - self._heard_at
            if self._is_in_flight and silent > _BLIND_FOR:
                if now - self._sent_at > self._patience:  # a short message, because the page may be closed
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
        """Handle a message of a page: a new page needs a state, and one that has painted can receive the next."""
        self.context = contextvars.copy_context()
        if "painted" not in content:
            return
        painted = content["painted"]
        with self._sending:
            self._has_page, self._patience = True, _PATIENCE
            self._heard_at = time.monotonic()
            # A state that was sent but not confirmed is still in transit.
            self._is_in_flight = 0 < painted < self.n_sent and not content.get("again", False)
            self._is_stale |= painted < self.n_sent or painted == 0
            self._is_new_page |= painted == 0
            self.n_painted += bool(painted) and not content.get("again", False)
        self._send_if_due()


#: Kinds of events that are listed, and those of which the first event of each run stays visible.
_KINDS, _LASTING = ("alarm", "attribution", "action"), ("alarm", "attribution")
_N_LINES = 6


class SwitchPanel(LatestState):
    """Switches of KSS and of each fault. The page sends only actions and shows the kernel's state."""

    _esm = script("latest_state.js", "switch_panel.js")
    _css = script("switch_panel.css")

    def __init__(
        self, kss: KSS, faults: Sequence[Fault], guarded: Callable[[Callable[..., None]], Callable[..., None]]
    ) -> None:
        self.kss, self.faults = kss, {fault.name: fault for fault in faults}
        self._act = guarded(self._act_as_asked)
        super().__init__()
        switches: tuple[KSS | Fault, ...] = (kss, *faults)
        self._undo = [each.observe(lambda name, before, after: self.refresh()) for each in switches]

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the state of all switches."""
        control = self.kss.control
        kss = {"enabled": control.enabled, "strength": control.strength, "interval": control.interval}
        faults = [
            {"name": fault.name, "effect": fault.effect, "enabled": fault.enabled} for fault in self.faults.values()
        ]
        return {"kss": kss, "faults": faults}, []

    def close(self) -> None:
        """Remove the panel; KSS and faults stay unchanged."""
        while getattr(self, "_undo", None):
            self._undo.pop()()
        super().close()

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        if "painted" not in content:
            self._act(content)
        super()._receive(_, content, buffers)

    def _act_as_asked(self, asked: dict[str, dict[str, Any]]) -> None:
        try:
            if "kss" in asked:
                self.kss.set(**asked["kss"])
            for name, is_on in asked.get("faults", {}).items():
                self.faults[name].enabled = is_on
        finally:  # the page must also drop a rejected value
            self.refresh()


class AlarmList(LatestState):
    """The first alarm of each run with its likely cause, and the newest alarms with their actions."""

    _esm = script("latest_state.js", "alarm_list.js")
    _css = script("alarm_list.css")

    def __init__(self) -> None:
        self._n_said = 0  # unique, so that a page can find new lines
        self.clear()
        super().__init__()

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the lines without repeating first alarms that are among the newest."""
        lines, first = self.lines, self.first
        kept = {line["number"] for line in first}
        return {"first": first, "lines": [line for line in lines if line["number"] not in kept]}, []

    def clear(self) -> None:
        """Remove all lines; call `refresh` afterwards."""
        self.lines: list[dict[str, Any]] = []
        self.first: list[dict[str, Any]] = []
        self._causes: dict[str, str] = {}

    def hear(self, run: str, events: Iterable[TimelineEvent]) -> None:
        """Add the events of a run; an attribution only when its cause changes."""
        n_said = self._n_said
        for event in events:
            if event.kind not in _KINDS or (event.kind == "attribution" and self._causes.get(run) == event.source):
                continue
            if event.kind == "attribution":
                self._causes[run] = event.source
            self._n_said += 1
            line = {
                "number": self._n_said, "step": event.step, "run": run, "kind": event.kind, "text": event.message,
            }  # fmt: skip
            # New lists are created, because a page may be reading the old ones.
            self.lines = [line, *self.lines][:_N_LINES]
            is_first = not any((each["run"], each["kind"]) == (run, event.kind) for each in self.first)
            if event.kind in _LASTING and is_first:
                self.first = [*self.first, line]
        if self._n_said > n_said:
            self.refresh()
