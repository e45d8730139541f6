"""Buttons that write the report and the tree that it is of; nothing is replaced unasked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import ipywidgets

from widgets.export import ExportBar, make_folder
from workbench.atomic import check_free
from workbench.errors import StoreError, ThresholdError
from workbench.reports import report
from workbench.store import export_netcdf

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    import xarray as xr

    from widgets.base import WorkbenchWidget

#: Kind -> ending, label and tip of its button.
KINDS = {
    "html": (".html", "HTML", "One page that needs no network and no other file"),
    "markdown": (".md", "Markdown", "Text, with its pictures in a folder beside it"),
    "notebook": (
        ".ipynb",
        "notebook",
        "The same text, with cells that draw the pictures again from the data beside it",
    ),
    "netcdf": (".nc", "netCDF", "Everything that was measured; wb.open_run() opens it"),
}


class SaveBar(ipywidgets.VBox):
    """A path, a button for each kind of file, and a line that says what was written.

    Args:
        owner: The widget; it shows the errors.
        save: Called with kind, path and overwrite when a button is clicked; returns the path of the file.

    Attributes:
        path: The text field; without an ending.
        buttons: By kind.
        overwrite: The checkbox.
        note: What was written last.
    """

    say, say_written, suggest = ExportBar.say, ExportBar.say_written, ExportBar.suggest

    def __init__(self, owner: WorkbenchWidget, save: Callable[[str, str, bool], Path]) -> None:
        self._suggested = ""
        self.path = ipywidgets.Text(
            description="save as", style={"description_width": "64px"}, layout={"width": "300px", "max_width": "98%"},
            continuous_update=False,
        )  # fmt: skip
        self.overwrite = ipywidgets.Checkbox(
            description="overwrite",
            tooltip="Replace a file that is already there",
            indent=False,
            layout={"width": "auto"},
        )
        self.buttons = {
            kind: ipywidgets.Button(description=label, tooltip=tip, layout={"width": "88px"})
            for kind, (_, label, tip) in KINDS.items()
        }
        self.note = ipywidgets.HTML()
        row = {"align_items": "center", "flex_flow": "row wrap", "grid_gap": "4px"}
        super().__init__([ipywidgets.HBox([self.path, *self.buttons.values(), self.overwrite], layout=row), self.note])

        def click(kind: str) -> None:
            self.say("")
            self.say_written(save(kind, self.path.value, self.overwrite.value))

        for kind, button in self.buttons.items():
            owner.on_click(button, lambda _, kind=kind: click(kind))


def save_tree(tree: xr.DataTree, kind: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the report of a tree, or the tree.

    Returns:
        The path, with the ending of its kind.

    Raises:
        ThresholdError: If there is no such kind.
        StoreError: If the path is empty or taken, or the disk is full.
    """
    if kind not in KINDS:
        raise ThresholdError(f"The kind of file is '{kind}', expected one of {', '.join(KINDS)}.")
    path = with_ending(path, KINDS[kind][0])
    check_free(path, overwrite=overwrite)
    make_folder(path)
    if kind == "netcdf":
        return export_netcdf(tree, path, overwrite=overwrite)
    return report(tree, path, overwrite=overwrite)


def with_ending(path: str | os.PathLike[str], ending: str) -> Path:
    """The path with an ending.

    Raises:
        StoreError: If the path is empty.
    """
    from pathlib import Path

    path = Path(str(path).strip()).expanduser()
    if not path.name:
        raise StoreError("There is no file name; write one, such as reports/my_model.")
    return path if path.suffix.lower() == ending else path.with_name(path.name + ending)


def as_file_name(subject: str) -> str:
    """A subject as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", subject).strip("._") or "report"
