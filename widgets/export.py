"""Buttons that write the content of a widget to files."""

from __future__ import annotations

import html
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.formatting import file_size
from workbench.widgets.files import with_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from workbench.widgets.base import WorkbenchWidget


class ExportBar(ipywidgets.VBox):
    """A path, a button for each kind of file, and a line with the last file written."""

    def __init__(self, owner: WorkbenchWidget, kinds: Mapping[str, tuple[str, str]]) -> None:
        self._suggested = ""
        self._kinds = kinds
        self.path = ipywidgets.Text(
            description="Save as",
            style={"description_width": "64px"},
            layout={"width": "300px", "max_width": "98%"},
            continuous_update=False,
        )
        self.overwrite = ipywidgets.Checkbox(description="Overwrite", tooltip="Replace an existing file", indent=False)
        self.overwrite.layout.width = "auto"
        self.buttons = {
            ending: ipywidgets.Button(description=label, tooltip=tip, layout={"width": "88px"})
            for ending, (label, tip) in kinds.items()
        }
        self.note = ipywidgets.HTML()
        row = ipywidgets.HBox(
            [self.path, *self.buttons.values(), self.overwrite],
            layout={"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px"},
        )
        super().__init__([row, self.note])

        def click(ending: str) -> None:
            self.say("")
            self.say_written(owner.save(with_ending(self.path.value, ending), overwrite=self.overwrite.value))

        for ending, button in self.buttons.items():
            owner._on_click(button, partial(_ignoring, click, ending))

    def suggest(self, path: str) -> None:
        """Put a path into the text field unless the user has entered another one."""
        if self.path.value == self._suggested:
            self.path.value = path
        self._suggested = path

    def offer(self, kinds: Mapping[str, str]) -> None:
        """Disable the buttons of these suffixes, with the reason as tooltip, and enable all others."""
        for ending, button in self.buttons.items():
            button.disabled = ending in kinds
            button.tooltip = kinds.get(ending) or self._kinds[ending][1]

    def say(self, sentence: str) -> None:
        """Show a line under the buttons."""
        style = "color:var(--jp-ui-font-color2);margin-left:70px;line-height:1.4"
        self.note.value = f'<div role="status" style="{style}">{html.escape(sentence)}</div>' if sentence else ""

    def say_written(self, path: Path) -> None:
        """Show the path and size of a written file."""
        self.say(f"Saved {path.resolve()} ({file_size(path.stat().st_size)}).")


def _ignoring(act: Callable[[str], None], ending: str, _: Any) -> None:
    """Call the action of a click without its event."""
    act(ending)
