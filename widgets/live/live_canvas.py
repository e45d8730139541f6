"""The live figure: an eigenvalue map for each run, the traces of all runs, and the displayed step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots.style import BROKEN, depth_colors, model_style
from workbench.widgets.live.history import pack, pack_traces
from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.widgets.live.history import LiveModes, RunHistory

#: Seconds between two states that include the traces during training.
_TRACES_EVERY = 0.3
#: Maximum number of earlier runs, which are drawn pale.
_N_EARLIER = 6


class LiveCanvas(LatestState):
    """Draws the latest state of some runs with HTML canvases, in the colors of JupyterLab's theme.

    The radial scale of the eigenvalue maps is linear up to a modulus of 1.25 and logarithmic beyond, so that modes of
    modulus 1e5 stay on the map.

    Attributes:
        n_steps: Maximum number of steps of the runs.
        histories: Displayed histories by run; use `show` to change them.
        earlier: Histories of earlier runs by name and number of the start, drawn as pale lines.
        is_active: Whether runs are active, so that a page without messages can tell that the kernel has ended.
        step: Step whose modes are shown; None for the latest.
    """

    _esm = script("latest_state.js", "plane.js", "traces.js", "legend.js", "hover.js", "scrubber.js", "canvas.js")
    _css = script("canvas.css")

    def __init__(
        self,
        status: Callable[[], str],
        note: Callable[[str], str],
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
        moved: Callable[[], None],
    ) -> None:
        self.histories: dict[str, RunHistory] = {}
        self.earlier: dict[tuple[str, int], RunHistory] = {}
        self.n_steps = 1
        self.is_active = False
        self.step: int | None = None
        self._shown: dict[str, LiveModes | None] = {}
        self._status, self._note, self._moved = status, note, moved
        self._go = guarded(self._go_as_asked)
        self._traces_at = -_TRACES_EVERY
        super().__init__()

    def show(self, histories: dict[str, RunHistory], earlier: dict[tuple[str, int], RunHistory], n_steps: int) -> None:
        """Show other runs at their latest step."""
        self.step, self._shown, self.n_steps = None, {}, n_steps
        self.earlier = dict(list(earlier.items())[-_N_EARLIER:])
        self.histories = histories
        self._traces_at = -_TRACES_EVERY

    @property
    def recorded_steps(self) -> np.ndarray:
        """Steps with recorded spectra of any run, in increasing order."""
        steps = [history.recorded_steps for history in list(self.histories.values())]
        return np.unique(np.concatenate(steps)) if steps else np.zeros(0, int)

    def go_to(self, step: int | None) -> None:
        """Show the modes of the latest recorded step up to a step; None follows the latest step."""
        recorded = self.recorded_steps
        if step is None or not len(recorded):
            self.step, self._shown = None, {}
        else:
            place = int(np.searchsorted(recorded, step, side="right")) - 1
            at = int(recorded[max(place, 0)])
            self._shown = {name: history.modes_at(at) for name, history in list(self.histories.items())}
            self.step = at
        self._moved()
        self.refresh()

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return all data to draw."""
        histories, step, shown = dict(self.histories), self.step, self._shown
        now = time.monotonic()
        has_traces = self._is_new_page or not self.is_active or now - self._traces_at >= _TRACES_EVERY
        if has_traces:
            self._traces_at = now
        modes = {name: history.modes if step is None else shown.get(name) for name, history in histories.items()}
        runs, buffers = pack(histories, modes, has_traces=has_traces)
        for index, run in enumerate(runs):
            run |= {**_look(index), "depth_colors": depth_colors(run["n_layers"])}
            run["note"] = run["verdict"] or self._note(run["name"])
        recorded = self.recorded_steps
        content: dict[str, Any] = {
            "status": self._status(),
            "is_active": self.is_active,
            "n_steps": self.n_steps,
            "broken": BROKEN,
            "runs": runs,
            "has_traces": has_traces,
            "step": step,
            "place": None if step is None else int(np.searchsorted(recorded, step)),
            "n_recorded": len(recorded),
            "newest": int(recorded[-1]) if len(recorded) else None,
        }
        if step is not None:
            content["values"] = {name: _plain(history.values_at(step)) for name, history in histories.items()}
        if has_traces:
            content["earlier"] = [
                {**_look(_place(name, list(histories))), "name": f"{name} (start {start})", "verdict": history.verdict}
                for (name, start), history in self.earlier.items()
            ]
            for history in self.earlier.values():
                buffers += pack_traces(history)
        return content, buffers

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        super()._receive(_, content, buffers)
        if "go" in content:
            self._go(content["go"])

    def _go_as_asked(self, where: dict[str, int] | None) -> None:
        """Go to a recorded step by index, to a step, or to the latest step."""
        recorded = self.recorded_steps
        if where is None or not len(recorded):
            self.go_to(None)
        elif "place" in where:
            self.go_to(int(recorded[min(max(where["place"], 0), len(recorded) - 1)]))
        else:
            self.go_to(where["step"])


def _look(index: int) -> dict[str, Any]:
    """Return color and dash of a run."""
    return {"color": model_style(index)["color"], "dash": [[], [5, 3]][index % 2]}


def _place(name: str, names: list[str]) -> int:
    """Return the index of an earlier run's name among the current ones, so that it has the same color."""
    return names.index(name) if name in names else len(names)


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    """Return numbers for JSON; None for those that are not finite."""
    return {name: value if np.isfinite(value) else None for name, value in values.items()}
