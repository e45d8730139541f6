"""Panels of `LiveTraining` beside the figure: switches of KSS and faults, and the list of alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.callbacks.faults import Fault
from workbench.callbacks.kss import KSS
from workbench.plots.timeline_events import TimelineEvent
from workbench.widgets.live.latest_state import LatestState, script

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
