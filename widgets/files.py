"""Files of what widgets show: their kinds and paths, and several runs in one file; nothing is replaced unasked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import StoreError
from workbench.io.store import export_netcdf

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    import xarray as xr

#: Ending -> label and tip of the button that writes such a file.
KINDS = {
    ".png": ("PNG", "The figure as a picture of 200 dots per inch"),
    ".svg": ("SVG", "The figure as vectors, for print"),
    ".html": ("HTML", "A page of its own that stays interactive, without a kernel and without a network"),
    ".nc": ("netCDF", "Everything recorded of the models shown, all steps; a group for each"),
}


def with_ending(path: str, ending: str) -> Path:
    """A path with its ending, which may be left out.

    Raises:
        StoreError: If the path is empty.
    """
    given = Path(path.strip()).expanduser()
    if not given.name:
        raise StoreError("There is no file name; write one, such as exports/figure.")
    return given if given.suffix.lower() == ending else given.with_name(given.name + ending)


def ending_of(path: str | os.PathLike[str], kinds: Iterable[str]) -> str:
    """The ending of a path, which decides what is written.

    Raises:
        StoreError: If no such file can be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in kinds:
        raise StoreError(f"'{Path(path).name}' ends in '{ending}', expected one of {', '.join(kinds)}.")
    return ending


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
