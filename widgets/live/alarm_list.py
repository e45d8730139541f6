"""A list of alarms and of the actions that they triggered: the first of each run, and the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    import xarray as xr

    from workbench.widgets.live.step_news import StepNews

#: Kinds of events that are listed.
_KINDS = ("alarm", "attribution", "action")
#: Kinds of which the first event of each run stays visible.
_LASTING = ("alarm", "attribution")
_N_LINES = 6


class AlarmList(LatestState):
    """A list of alarms with step, run, signal, layer and head, and their likely causes.

    Only one thread adds to it. Every line is also recorded as an event of the run.
    """

    _esm = script("latest_state.js", "alarm_list.js")
    _css = script("alarm_list.css")

    def __init__(self) -> None:
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
        self._n_said = getattr(self, "_n_said", 0)  # unique, so that a page can find new lines

    def hear(self, run: str, news: StepNews) -> None:
        """Add the news of a step."""
        for alarm in news.alarms:
            self._say(news.step, run, "alarm", alarm.message)
        found = news.attribution
        if found is not None and self._causes.get(run) != found.cause:
            self._causes[run] = found.cause
            self._say(news.step, run, "attribution", found.message)
        for action in news.actions:
            self._say(action.step, run, "action", action.message)
        if news.alarms or news.actions:
            self.refresh()

    def learn(self, run: str, tree: xr.DataTree) -> None:
        """Add the events in the record of a run that is continued."""
        if "events" not in tree.children:
            return
        events = tree.children["events"].to_dataset(inherit=False)
        columns = (events[name].values.tolist() for name in ("step", "kind", "source", "message"))
        for step, kind, source, message in zip(*columns, strict=True):
            if kind in _KINDS:
                self._say(step, run, kind, message)
            if kind == "attribution":
                self._causes[run] = source
        self.refresh()

    def _say(self, step: int, run: str, kind: str, text: str) -> None:
        self._n_said += 1
        line = {"number": self._n_said, "step": step, "run": run, "kind": kind, "text": text}
        # New lists are created, because a page may be reading the old ones.
        self.lines = [line, *self.lines][:_N_LINES]
        if kind in _LASTING and not any((each["run"], each["kind"]) == (run, kind) for each in self.first):
            self.first = [*self.first, line]
