"""Files of a report and of the tree that it is of; nothing is replaced unasked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from workbench.io.atomic import check_free
from workbench.io.store import export_netcdf
from workbench.reports.make_report import report
from workbench.widgets.export import export_path, make_folder

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import xarray as xr

#: Kind -> ending, label and tip of its button in `workbench.widgets.export.ExportBar`.
KINDS = {
    "html": (".html", "HTML", "One page that needs no network and no other file"),
    "markdown": (".md", "Markdown", "Text, with its pictures in a folder next to it"),
    "notebook": (
        ".ipynb",
        "notebook",
        "The same text, with cells that draw the pictures again from the data next to it",
    ),
    "netcdf": (".nc", "netCDF", "Everything that was measured; wb.open_run() opens it"),
}


def save_tree(tree: xr.DataTree, kind: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the report of a tree, or the tree.

    Returns:
        The path, with the ending of its kind.

    Raises:
        OptionError: If there is no such kind.
        StoreError: If the path is empty or taken, or the disk is full.
    """
    path = export_path(kind, path, kinds=KINDS)
    check_free(path, overwrite=overwrite)
    make_folder(path)
    if kind == "netcdf":
        return export_netcdf(tree, path, overwrite=overwrite)
    return report(tree, path, overwrite=overwrite)


def as_file_name(subject: str) -> str:
    """A subject as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", subject).strip("._") or "report"
