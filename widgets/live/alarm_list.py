"""A list of the alarms while runs train, newest first, and of the actions they triggered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    import xarray as xr

    from workbench.callbacks.actions import Action
    from workbench.callbacks.alarms import Alarms
    from workbench.training.step_record import StepRecord

#: Kinds of events that are said.
_KINDS = ("alarm", "attribution", "action")
_N_LINES = 6


class AlarmList(LatestState):
    """The newest alarms in plain words: step, run, signal, layer and head, and what they point to.

    One thread adds to it; every line is an event of the run, too.

    Attributes:
        lines: Newest first: ``number`` (from 1 on), ``step``, ``run``, ``kind`` (``alarm``, ``attribution`` or
            ``action``) and ``text``.
    """

    _esm = script("latest_state.js", "alarm_list.js")
    _css = script("alarm_list.css")

    def __init__(self) -> None:
        self.clear()
        super().__init__()

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """The lines as they are."""
        return {"lines": self.lines}, []

    def clear(self) -> None:
        """Forget all; call `refresh` then."""
        self.lines: list[dict[str, Any]] = []
        self._causes: dict[str, str] = {}
        self._n_said = getattr(self, "_n_said", 0)  # unique, so that a page can find new lines

    def hear(self, run: str, record: StepRecord, alarms: Alarms | None, actions: list[Action]) -> None:
        """Say what is new in a step.

        Args:
            run: Its name.
            record: Record of the step.
            alarms: Alarms of the run; None: it has none.
            actions: That followed.
        """
        for alarm in record.alarms:
            self._say(record.step, run, "alarm", alarm.message)
        if alarms is not None and record.alarms:
            found = alarms.attribute()
            if self._causes.get(run) != found.cause:
                self._causes[run] = found.cause
                self._say(record.step, run, "attribution", found.message)
        for action in actions:
            self._say(action.step, run, "action", action.message)
        if record.alarms or actions:
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
        self.lines = [line, *self.lines][:_N_LINES]  # another list: a page may be reading this one
