"""Files that widgets write: formats, paths, and several runs in one file. Files are replaced only on request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import StoreError
from workbench.io.store import export_netcdf

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    import xarray as xr

#: Suffix -> label and tooltip of the button that writes such a file.
KINDS = {
    ".png": ("PNG", "The figure as a bitmap with 200 dots per inch"),
    ".svg": ("SVG", "The figure as vector graphics, for print"),
    ".html": ("HTML", "A single page that stays interactive without a kernel and without a network"),
    ".nc": ("netCDF", "All recorded data of the models shown, at all steps, one group per model"),
}


def with_ending(path: str, ending: str) -> Path:
    """Return a path with its suffix, which may be missing."""
    given = Path(path.strip()).expanduser()
    if not given.name:
        raise StoreError("The file name is empty; enter one, such as exports/figure.")
    return given if given.suffix.lower() == ending else given.with_name(given.name + ending)


def ending_of(path: str | os.PathLike[str], kinds: Iterable[str]) -> str:
    """Return the suffix of a path, which selects the format."""
    ending = Path(path).suffix.lower()
    if ending not in kinds:
        raise StoreError(f"'{Path(path).name}' has the suffix '{ending}', expected one of {', '.join(kinds)}.")
    return ending


def make_folder(path: Path) -> None:
    """Create the folder of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The folder {path.parent} cannot be created ({error.strerror}); choose another one."
        ) from error


def export_runs(runs: Mapping[str, xr.DataTree], path: Path, *, overwrite: bool = False) -> Path:
    """Write several runs to one netCDF file, with one group per run and one subgroup per part of the run.

    ``wb.open_run(path)[name]`` returns a run. A slash in a name would add another group, and is replaced by "|".
    """
    import xarray as xr

    groups = {name.replace("/", "|"): run for name, run in runs.items()}
    if len(groups) < len(runs):
        raise StoreError("Two runs have the same name after their slashes are replaced; rename one of them.")
    return export_netcdf(xr.DataTree(children=groups), path, overwrite=overwrite)
