"""A list of the alarms while runs train, and of the actions they triggered: each run's first one, and the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    import xarray as xr

    from workbench.widgets.live.step_news import StepNews

#: Kinds of events that are said.
_KINDS = ("alarm", "attribution", "action")
#: Kinds of which the first one of each run stays in sight.
_LASTING = ("alarm", "attribution")
_N_LINES = 6


class AlarmList(LatestState):
    """The alarms in plain words: step, run, signal, layer and head, and what they point to.

    One thread adds to it; every line is an event of the run, too.

    Attributes:
        lines: The newest ones, newest first: ``number`` (from 1 on), ``step``, ``run``, ``kind`` (``alarm``,
            ``attribution`` or ``action``) and ``text``.
        first: The first alarm of each run and what it pointed to, oldest first; the same entries.
    """

    _esm = script("latest_state.js", "alarm_list.js")
    _css = script("alarm_list.css")

    def __init__(self) -> None:
        self.clear()
        super().__init__()

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """The lines as they are; a first one that is among the newest is not repeated."""
        lines, first = self.lines, self.first
        kept = {line["number"] for line in first}
        return {"first": first, "lines": [line for line in lines if line["number"] not in kept]}, []

    def clear(self) -> None:
        """Forget all; call `refresh` then."""
        self.lines: list[dict[str, Any]] = []
        self.first: list[dict[str, Any]] = []
        self._causes: dict[str, str] = {}
        self._n_said = getattr(self, "_n_said", 0)  # unique, so that a page can find new lines

    def hear(self, run: str, news: StepNews) -> None:
        """Say what is new in a step.

        Args:
            run: Its name.
            news: The step.
        """
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
        """Say what the record of a run holds, for a run that goes on from there."""
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
        # Other lists: a page may be reading these.
        self.lines = [line, *self.lines][:_N_LINES]
        if kind in _LASTING and not any((each["run"], each["kind"]) == (run, kind) for each in self.first):
            self.first = [*self.first, line]
