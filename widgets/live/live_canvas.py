"""The live figure: an eigenvalue map for each run, and the traces of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.plots.style import BROKEN, depth_colors, model_style
from workbench.widgets.live.history import pack
from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.widgets.live.history import RunHistory


class LiveCanvas(LatestState):
    """Draws the latest state of some runs with plain canvases, in the colours of JupyterLab's theme.

    Modulus 1 is drawn true to scale, and all up to 1.25; beyond, the radius is logarithmic, so that modes of modulus
    1e5 stay on the map.

    Args:
        status: Gives one line that says what is going on.
        note: Gives a few words on a run that is not over, by its name.

    Attributes:
        n_steps: Steps that the runs can have.
        histories: Histories that are drawn, by the name of the run; replace it to draw others.
    """

    _esm = script("latest_state.js", "plane.js", "traces.js", "canvas.js")
    _css = script("canvas.css")

    def __init__(self, status: Callable[[], str], note: Callable[[str], str]) -> None:
        self.histories: dict[str, RunHistory] = {}
        self.n_steps = 1
        self._status, self._note = status, note
        super().__init__()

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Everything that is drawn, as it is now."""
        histories = dict(self.histories)
        runs, buffers = pack(histories)
        for index, run in enumerate(runs):
            run["color"] = model_style(index)["color"]
            run["dash"] = [[], [5, 3]][index % 2]
            run["note"] = run["verdict"] or self._note(run["name"])
            run["depth_colors"] = depth_colors(run["n_layers"])
        return {"status": self._status(), "n_steps": self.n_steps, "broken": BROKEN, "runs": runs}, buffers
