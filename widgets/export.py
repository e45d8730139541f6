"""Buttons that write what a widget shows: figures as PNG, SVG or HTML, data as netCDF; nothing is replaced unasked."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import OptionError, StoreError
from workbench.formatting import file_size
from workbench.io.store import export_netcdf

if TYPE_CHECKING:
    import xarray as xr

    from workbench.widgets.base import WorkbenchWidget

#: Kind -> ending, label and tip of its button.
KINDS = {
    "png": (".png", "PNG", "The figure as a picture of 200 dots per inch"),
    "svg": (".svg", "SVG", "The figure as vectors, for print"),
    "html": (".html", "HTML", "The figure as a page of its own: zoom and hover work, without a network"),
    "netcdf": (".nc", "netCDF", "Everything recorded of the models shown, all steps; a group for each"),
}


class ExportBar(ipywidgets.VBox):
    """A path, a button for each kind of file, and a line that says what was written.

    Args:
        owner: The widget; it shows the errors.
        export: Called with kind, path and overwrite when a button is clicked; returns the path of the file.
        kinds: Kind -> ending, label and tip of its button.

    Attributes:
        path: The text field; without an ending.
        buttons: Buttons by kind.
        overwrite: The checkbox.
        note: Note on the last file written.
    """

    def __init__(
        self,
        owner: WorkbenchWidget,
        export: Callable[[str, str, bool], Path],
        *,
        kinds: Mapping[str, tuple[str, str, str]] = KINDS,
    ) -> None:
        self._suggested = ""
        self._kinds = kinds
        self.path = ipywidgets.Text(
            description="save as",
            style={"description_width": "64px"},
            layout={"width": "300px", "max_width": "98%"},
            continuous_update=False,
        )
        self.overwrite = ipywidgets.Checkbox(
            description="overwrite", tooltip="Replace a file that is already there", indent=False
        )
        self.overwrite.layout.width = "auto"
        self.buttons = {
            kind: ipywidgets.Button(description=label, tooltip=tip, layout={"width": "88px"})
            for kind, (_, label, tip) in kinds.items()
        }
        self.note = ipywidgets.HTML()
        row = ipywidgets.HBox(
            [self.path, *self.buttons.values(), self.overwrite],
            layout={"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px"},
        )
        super().__init__([row, self.note])

        def click(kind: str) -> None:
            self.say("")
            self.say_written(export(kind, self.path.value, self.overwrite.value))

        for kind, button in self.buttons.items():
            owner.on_click(button, partial(_ignoring, click, kind))

    def suggest(self, path: str) -> None:
        """Put a path into the field, unless the user has written another one there."""
        if self.path.value == self._suggested:
            self.path.value = path
        self._suggested = path

    def offer(self, kinds: Mapping[str, str]) -> None:
        """Enable every button but these; the sentences say why not."""
        for kind, button in self.buttons.items():
            button.disabled = kind in kinds
            button.tooltip = kinds.get(kind) or self._kinds[kind][2]

    def say(self, sentence: str) -> None:
        """Show a line under the buttons."""
        style = "color:var(--jp-ui-font-color2);margin-left:70px;line-height:1.4"
        self.note.value = f'<div role="status" style="{style}">{html.escape(sentence)}</div>' if sentence else ""

    def say_written(self, path: Path) -> None:
        """Show where a file was written, and how large it is."""
        self.say(f"Wrote {path.resolve()} ({file_size(path.stat().st_size)}).")


def export_path(kind: str, path: str | os.PathLike[str], *, kinds: Mapping[str, tuple[str, str, str]] = KINDS) -> Path:
    """The path with the ending of its kind, one of those that `ExportBar` has.

    Raises:
        OptionError: If there is no such kind.
        StoreError: If the path is empty.
    """
    if kind not in kinds:
        raise OptionError(f"The kind of file is '{kind}', expected one of {', '.join(kinds)}.")
    ending = kinds[kind][0]
    path = Path(str(path).strip()).expanduser()
    if not path.name:
        raise StoreError("There is no file name; write one, such as exports/figure.")
    return path if path.suffix.lower() == ending else path.with_name(path.name + ending)


def make_folder(path: Path) -> None:
    """Make the folder that a file will be in.

    Raises:
        StoreError: If that is not possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder {path.parent} cannot be made ({error.strerror}); choose another.") from error


def export_runs(runs: Mapping[str, xr.DataTree], path: Path, *, overwrite: bool = False) -> Path:
    """Write several runs into one netCDF file, a group for each with its parts as groups in it.

    ``wb.open_run(path)[name]`` is the run again. A slash in a name, which would make one more group, becomes a bar.

    Raises:
        StoreError: If the path is taken, or the disk is full.
    """
    import xarray as xr

    groups = {name.replace("/", "|"): run for name, run in runs.items()}
    if len(groups) < len(runs):
        raise StoreError("Two runs have the same name once their slashes are replaced; rename one of them.")
    return export_netcdf(xr.DataTree(children=groups), path, overwrite=overwrite)


def _ignoring(act: Callable[[str], None], kind: str, _: Any) -> None:
    """Perform the action of a click, ignoring its event."""
    act(kind)
