"""The live figure: an eigenvalue map for each run, the traces of all runs, and the displayed step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workbench import plots
from workbench.errors import OptionError
from workbench.plots import style
from workbench.plots.curve_figures import trace_panels
from workbench.plots.figure_files import redrawable
from workbench.widgets.live.history import TRACES, LiveModes, RunHistory
from workbench.widgets.live.latest_state import LatestState, script

#: Seconds between two states that include the traces during training.
_TRACES_EVERY = 0.3
#: Maximum number of earlier runs, which are drawn pale.
_N_EARLIER = 6


class LiveCanvas(LatestState):
    """Draws the latest state of some runs with HTML canvases, in the colors of JupyterLab's theme.

    The radial scale of the eigenvalue maps is linear up to a modulus of 1.25 and logarithmic beyond, so that modes of
    modulus 1e5 stay on the map. Earlier runs, by name and number of the start, are pale lines. ``step`` is None for the
    latest modes.
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
        """Return all data to draw: a JSON description, and binary buffers of each run."""
        histories, step, shown = dict(self.histories), self.step, self._shown
        now = time.monotonic()
        has_traces = self._is_new_page or not self.is_active or now - self._traces_at >= _TRACES_EVERY
        if has_traces:
            self._traces_at = now
        runs: list[dict[str, Any]] = []
        buffers: list[bytes] = []
        for index, (name, history) in enumerate(histories.items()):
            modes = history.modes if step is None else shown.get(name)
            runs.append(_described(name, history, modes) | _look(index))
            runs[-1]["note"] = history.verdict or self._note(name)
            arrays = [] if modes is None else [modes.points, modes.layer, modes.is_reliable]
            buffers += [array.tobytes() for array in arrays] or [b"", b"", b""]
            buffers += _packed_traces(history) if has_traces else []
        recorded = self.recorded_steps
        content: dict[str, Any] = {
            "status": self._status(),
            "is_active": self.is_active,
            "n_steps": self.n_steps,
            "broken": style.BROKEN,
            "runs": runs,
            "has_traces": has_traces,
            "step": step,
            "place": None if step is None else int(np.searchsorted(recorded, step)),
            "n_recorded": len(recorded),
            "newest": int(recorded[-1]) if len(recorded) else None,
        }
        if step is not None:
            content["values"] = {
                name: {trace: _plain(value) for trace, value in history.values_at(step).items()}
                for name, history in histories.items()
            }
        if has_traces:
            names = list(histories)
            content["earlier"] = [
                # A run of the same name has the same color.
                {**_look(names.index(name) if name in names else len(names)), "name": f"{name} (start {start})"}
                | {"verdict": history.verdict}
                for (name, start), history in self.earlier.items()
            ]
            for history in self.earlier.values():
                buffers += _packed_traces(history)
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


def _described(name: str, history: RunHistory, modes: LiveModes | None) -> dict[str, Any]:
    """Return what the page shows of a run beside its modes and traces."""
    return {
        "name": name,
        "n_done": history.n_done,
        "n_layers": history.n_layers,
        "depth_colors": style.depth_colors(history.n_layers),
        "verdict": history.verdict,
        "is_broken": history.is_broken,
        "kss_spans": history.kss_spans(),
        "fault_spans": history.fault_spans(),
        "is_watched": history.is_watched,
        "account": history.account,
        "has_alarm": history.first_alarm is not None,
        "nearest": history.nearest,
        "sound": history.checked(is_sound=True),
        "broken": history.checked(is_sound=False),
        "modes_step": None if modes is None else modes.step,
        "near_unit_mass": None if modes is None else _plain(modes.near_unit_mass),
        "spectral_radius": None if modes is None else _plain(modes.spectral_radius),
        "near_unit": None if modes is None else modes.near_unit,
    }


def _packed_traces(history: RunHistory) -> list[bytes]:
    """Return steps and values of each trace as float32 buffers."""
    return [array.tobytes() for trace in TRACES for array in history.trace(trace)]


def _look(index: int) -> dict[str, Any]:
    """Return color and dash of a run."""
    return {"color": style.model_style(index)["color"], "dash": [[], [5, 3]][index % 2]}


def _plain(value: float) -> float | None:
    """Return a number for JSON; None if it is not finite."""
    return value if math.isfinite(value) else None


@redrawable
def live_figure(histories: Mapping[str, RunHistory], *, step: int | None = None, backend: str = "bokeh") -> Any:
    """Draw the eigenvalues of each run at a recorded step (None for the latest), and the traces of all runs."""
    found = {name: history.spectra_at(step) for name, history in histories.items()}
    spectra = {name: data for name, data in found.items() if data is not None}
    if not spectra:
        raise OptionError("There are no modes to draw yet; press Start and wait for the first step.")
    runs = {name: history.as_run() for name, history in histories.items() if history.n_done}
    maps = plots.eigenvalue_map(spectra, step="last", columns=2, backend=backend)
    with style.drawing(backend) as hv:
        lines = trace_panels(hv, backend, runs, TRACES[:4], is_placed=False)
        # The traces share a step axis and have their legend at the side, so they are in one column.
        n_columns = max(len(spectra), 2)
        row = [[line, *(hv.Empty() for _ in range(n_columns - 1))] for line in lines]
        blank = [hv.Empty() for _ in range(n_columns - len(spectra))]
        panels = [*maps, *blank, *(panel for panels in row for panel in panels)]
        return style.laid_out(
            hv, panels, backend, n_columns=n_columns, tight=True, hspace=0.3, vspace=0.55, aspect_weight=1.0
        )
