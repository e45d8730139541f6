"""The view "table": numbers of every run, with the published ones."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets
import numpy as np

from workbench.errors import OptionError
from workbench.formatting import compact
from workbench.io.atomic import check_free, replacing
from workbench.studies.comparison import compare_checked
from workbench.widgets.comparison.scene import ComparisonView, Scene
from workbench.widgets.export import make_folder
from workbench.widgets.tables import NAME, TABLE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import xarray as xr

_HEAD = "padding:2px 0 2px 9px;text-align:right;vertical-align:bottom;line-height:1.25;font-weight:600"
_CELL = "padding:1px 0 1px 9px;text-align:right;white-space:nowrap"
_MUTED = "color:var(--jp-ui-font-color2,GrayText)"
_LINE = "border-top:1px solid var(--jp-border-color2,#8884)"
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Stability Workbench</title>
<style>:root {{ color-scheme: light dark; font: 14px system-ui, sans-serif; }} body {{ margin: 24px; }}</style></head>
<body>{}</body></html>
"""
#: Columns of the table, in order; those without any value are left out.
_MEASURES = (
    "near_unit_mass",
    "expansive_mass",
    "contractive_mass",
    "spectral_radius",
    "eigenvector_condition",
    "nonlinearity_ratio",
    "kreiss_constant",
    "reliable_fraction",
    "rank",
    "final_loss",
    "best_accuracy",
    "divergence_step",
)


class TableView(ComparisonView):
    """Numbers of every run, the published ones below ours."""

    tip = "Means over the layers, with what is published below"
    refused_kinds = dict.fromkeys(("png", "svg"), "The table is text; choose HTML or netCDF, or another view.")

    def __init__(self, lock: AbstractContextManager) -> None:
        super().__init__(lock)
        self.table = ipywidgets.HTML()
        self.box.children = [self.table]

    def draw(self, scene: Scene) -> None:
        """Write the table of this step."""
        self.table.value = comparison_table(scene)

    def save(self, scene: Scene, kind: str, path: Path, *, overwrite: bool) -> Path:
        """Write the table as a page of its own."""
        page = _PAGE.format(comparison_table(scene))
        make_folder(path)
        check_free(path, overwrite=overwrite)
        with replacing(path) as partial:
            partial.write_text(page, encoding="utf-8")
        return path


def comparison_of(scene: Scene) -> xr.Dataset:
    """The runs shown at this step and in these layers, as `workbench.compare` aligns them.

    Raises:
        OptionError: If none of them has spectra of these layers yet, or they were measured with different
            thresholds.
    """
    spectra = {name: scene.layers_of(name) for name in scene.shown}
    spectra = {name: data for name, data in spectra.items() if data.sizes["layer"]}
    if not spectra:
        raise OptionError(f"None of the models shown has spectra of these layers at step {scene.step}; move a slider.")
    runs = {name: scene.runs[name].tree for name in spectra}  # checked when they came in
    return compare_checked(runs, spectra, published=scene.published_of(spectra))


def comparison_table(scene: Scene) -> str:
    """The comparison as HTML: a row a run, a second one for what is published about it, a column a measure."""
    comparison = comparison_of(scene)
    ours = {name: _of(comparison[name], "ours") for name in _MEASURES}
    published = {name: _of(comparison[name], "published") for name in _MEASURES}
    measures = [name for name in _MEASURES if not (np.isnan(ours[name]).all() and np.isnan(published[name]).all())]
    # What is the same for every run is said in the note.
    measures = [name for name in measures if name not in ("rank", "kreiss_constant") or len(set(ours[name])) > 1]
    heads = "".join(
        f'<th style="{_HEAD}" title="{html.escape(comparison[name].attrs["meaning"])}">'
        f"{html.escape(comparison[name].attrs['long_name']).replace('-', '&#8209;')}</th>"
        for name in measures
    )
    rows = ""
    for index, model in enumerate(comparison["architecture"].values.tolist()):
        rows += _row(html.escape(model), [compact(ours[name][index]) for name in measures], f"{_LINE};font-weight:500")
        theirs = [published[name][index] for name in measures]
        if not np.isnan(theirs).all():
            rows += _row("published", ["" if np.isnan(value) else f"{value:g}" for value in theirs], _MUTED)
    note = html.escape(_note(scene, comparison))
    table = f'<table style="{TABLE};font-size:12px"><tr><td></td>{heads}</tr>{rows}</table>'
    return (
        f'<div style="overflow-x:auto">{table}</div>'
        f'<div style="{_MUTED};line-height:1.5;margin-top:4px;max-width:780px;white-space:normal">{note}</div>'
    )


def _of(values: xr.DataArray, source: str) -> np.ndarray:
    """One number a run; NaN where this source has none."""
    if "source" in values.dims:
        return values.sel(source=source).values
    return values.values if source == "ours" else np.full(values.shape, np.nan)


def _row(name: str, cells: list[str], style: str) -> str:
    body = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    return f'<tr style="{style}"><th scope="row" style="{NAME};font-weight:inherit">{name}</th>{body}</tr>'


def _note(scene: Scene, comparison: xr.Dataset) -> str:
    layers = "all layers" if scene.is_every_layer else f"layers {scene.layers[0]} to {scene.layers[1]}"
    late = [
        f"{name}: {scene.runs[name].remark(scene.step)}" for name in scene.shown if scene.runs[name].remark(scene.step)
    ]
    lines = [f"Spectra of step {scene.step}, mean over {layers} whose update says anything"]
    lines += [", ".join(late)] if late else []
    if np.isinf(comparison["kreiss_constant"].sel(source="ours")).all():
        lines.append("Every Kreiss constant is infinite")
    ranks = set(comparison["rank"].values)
    lines.append(f"All at rank {ranks.pop():g}" if len(ranks) == 1 else "Compare M at equal rank only")
    if any(comparison["published_as"].values):
        lines.append(f"Published: at initialization, {comparison.attrs['source']}")
    return ". ".join(lines) + "."
