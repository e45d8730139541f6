"""Buttons of `LiveTraining`: start, pause, stop, and restart from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import ipywidgets

from workbench.widgets.live.live_runs import ENDED, PAUSED, PAUSING, STOPPING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from workbench.widgets.live.branches import SavedStep


class Owner(Protocol):
    """The widget that the buttons control."""

    _on_click: Callable[..., None]

    def start(self) -> None:
        """Train from the beginning."""

    def pause(self) -> None:
        """Pause after the current step."""

    def resume(self) -> None:
        """Continue after a pause."""

    def stop(self) -> None:
        """End the runs after the current step."""

    def restart(self, checkpoint: SavedStep | None = None) -> None:
        """Continue from a checkpoint."""


class Buttons:
    """A row of buttons and the list of checkpoints."""

    def __init__(self, owner: Owner) -> None:
        def button(text: str, tip: str, act: Callable[[], None]) -> ipywidgets.Button:
            made = ipywidgets.Button(description=text, tooltip=tip, layout={"width": "max-content", "min_width": "8em"})
            owner._on_click(made, lambda _: act())
            return made

        self.start = button("Start", "Train from the beginning with the settings above", owner.start)
        self.pause = button("Pause", "Pause after the current step, or resume", self._pause_or_resume)
        self.stop = button("Stop", "End the runs and close their records; press again to end immediately", owner.stop)
        self.restart = button(
            "Restart",
            "Continue from the checkpoint on the right in a new branch",
            lambda: owner.restart(self.choice.value),
        )
        self.start.button_style = "primary"
        self.choice = ipywidgets.Dropdown(
            options=[],
            description="from",
            style={"description_width": "initial"},
            layout={"width": "max-content", "min_width": "16em", "max_width": "98%"},
        )
        self.controls = [self.start, self.pause, self.stop, self.restart, self.choice]
        self.box = ipywidgets.HBox(
            self.controls,
            layout={"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 6px", "margin": "4px 0"},
        )
        self.box.add_class("workbench-live-setup")
        self._owner = owner
        self._best: SavedStep | None = None

    def offer(
        self, state: str, saved: Sequence[SavedStep], best: SavedStep | None, remarks: Mapping[SavedStep, str]
    ) -> None:
        """Enable the buttons that apply to a state, and list the checkpoints."""
        is_running = state not in ("ready", ENDED)
        ordered = [*remarks, *(each for each in saved if each not in remarks)]
        options = [(f"{each}: {remarks[each]}" if each in remarks else str(each), each) for each in ordered]
        chosen = self.choice.value
        if list(self.choice.options) != options:
            keeps = chosen in saved and chosen != self._best  # a choice of the user is kept, the default follows `best`
            self.choice.options = options
            self.choice.value = chosen if keeps else best
        elif chosen == self._best:
            self.choice.value = best
        self._best = best
        self.choice.disabled = self.restart.disabled = not saved
        self.start.disabled = is_running
        self.pause.disabled = not is_running or state == STOPPING
        self.stop.disabled = not is_running
        self.pause.description = "Resume" if state in (PAUSING, PAUSED) else "Pause"
        self.stop.description = "Stop now" if state == STOPPING else "Stop"

    def _pause_or_resume(self) -> None:
        if self.pause.description == "Resume":
            self._owner.resume()
        else:
            self._owner.pause()
