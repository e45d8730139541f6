"""Report of a tree as one HTML page, Markdown or a notebook."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from workbench.errors import SchemaError, StoreError, require_lab
from workbench.io.atomic import check_free, replacing
from workbench.reports.assessment_document import assessment_document
from workbench.reports.comparison_document import comparison_document
from workbench.reports.diagnosis_document import diagnosis_document
from workbench.reports.document import Document, Picture

if TYPE_CHECKING:
    import xarray as xr

SUFFIXES = (".html", ".md", ".ipynb")
_DOCUMENTS = {"assessment": assessment_document, "diagnosis": diagnosis_document, "comparison": comparison_document}


def report(tree: xr.DataTree, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a report of an assessment, a diagnosis or a comparison: observations, causes, measurements, decisions.

    Every statement links to its supporting number. Nothing is computed: if the tree lacks a number, an exception is
    raised and no file is written.

    Args:
        tree: Tree from ``wb.assess``, ``wb.diagnose`` or ``wb.compare_designs``, or opened by ``wb.open_run``; or one
            design of a comparison, such as ``comparison["gpt2"]``.
        path: File to write. The suffix selects the format. ``.html``: one page that needs no network and no other
            file. ``.md``: Markdown with its pictures in the folder ``NAME_pictures`` next to it. ``.ipynb``: a notebook
            with the same text, whose cells redraw the pictures from ``NAME.nc`` next to it, the tree as a netCDF file.
        overwrite: Whether to replace existing files.

    Returns:
        The path.

    Raises:
        SchemaError: If the tree is of another kind, or lacks a number that its report cites.
        StoreError: If the suffix is unknown, a file exists already, or the folder cannot be written.
        MissingPackageError: If the packages that draw the pictures are not installed.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("architecture"))
        >>> wb.report(tree, "report.md").name
        'report.md'

    See Also:
        `workbench.assess`: Assesses a design before training.
        `workbench.diagnose`: Diagnoses a failed run.
        `workbench.compare_designs`: Compares designs.
    """
    path = Path(path)
    companion = check_target(path, overwrite=overwrite)
    tree = detached(tree)
    document = document_of(tree)
    if path.suffix.lower() == ".html":
        _write_html(document, tree, path)
    elif companion is not None:
        write = _write_markdown if path.suffix.lower() == ".md" else _write_notebook
        write(document, tree, path, companion)
    return path


def check_target(path: Path, *, overwrite: bool = False) -> Path | None:
    """Return the second file or folder that `report` would write, after checking that it can write both.

    Raises:
        StoreError: If the suffix is unknown, or a file exists already.
        MissingPackageError: If the packages that draw the pictures are not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise StoreError(f"'{path.name}' has the suffix '{path.suffix}', expected one of {', '.join(SUFFIXES)}.")
    require_lab("The pictures of a report", "holoviews", "matplotlib", "PIL")
    companion = {".md": path.with_name(f"{path.stem}_pictures"), ".ipynb": path.with_suffix(".nc")}.get(
        path.suffix.lower()
    )
    for place in filter(None, (path, companion)):
        check_free(place, overwrite=overwrite)
    return companion


def detached(tree: xr.DataTree) -> xr.DataTree:
    """Return the tree itself, or a separate tree with the same data if it is part of a comparison."""
    return tree if getattr(tree, "parent", None) is None else tree.copy()


def document_of(tree: xr.DataTree) -> Document:
    """Return the content of the report of a tree.

    Raises:
        SchemaError: If the tree is of an unknown kind, or lacks a number that its report cites.
    """
    import xarray as xr

    if not isinstance(tree, xr.DataTree):
        raise SchemaError.of("tree", tree, "a DataTree", remedy="create one with wb.assess()")
    kind = tree.attrs.get("kind")
    if kind not in _DOCUMENTS:
        raise SchemaError(
            f"The kind of the tree is {kind!r}, expected one of {', '.join(_DOCUMENTS)}; create it with wb.assess(), "
            "wb.diagnose() or wb.compare_designs()."
        )
    return _DOCUMENTS[kind](tree)


def _write_html(document: Document, tree: xr.DataTree, path: Path) -> None:
    from workbench.reports.html import html

    content = html(document, tree)
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")


def _write_markdown(document: Document, tree: xr.DataTree, path: Path, companion: Path) -> None:
    from workbench.reports.markdown import markdown
    from workbench.reports.pictures import image

    contents: dict[str, bytes] = {}

    def show(picture: Picture) -> str:
        mime, content = image(picture, tree)
        words = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-")
        name = f"{len(contents) + 1:02d}-{words}.{'png' if mime == 'image/png' else 'svg'}"
        contents[name] = content
        return f"![{picture.alternative}]({quote(f'{companion.name}/{name}')})"

    text = markdown(document, show)
    with replacing(companion) as partial:
        partial.mkdir()
        for name, content in contents.items():
            (partial / name).write_bytes(content)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _write_notebook(document: Document, tree: xr.DataTree, path: Path, companion: Path) -> None:
    import nbformat

    from workbench.io.store import export_netcdf
    from workbench.reports.notebook import notebook

    content = nbformat.writes(notebook(document, tree, companion.name))
    export_netcdf(tree, companion, overwrite=True)
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")
