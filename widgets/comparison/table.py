"""The view "table": metrics of every run, with published values."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets
import numpy as np

from workbench.errors import OptionError
from workbench.formatting import compact
from workbench.studies.comparison import compare_checked
from workbench.widgets.comparison.scene import ComparisonView, Scene
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tables import NAME, SCROLLING, TABLE
from workbench.widgets.text_picture import text_picture

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import xarray as xr

_HEAD = "padding:2px 0 2px 9px;text-align:right;vertical-align:bottom;line-height:1.25;font-weight:600"
_CELL = "padding:1px 0 1px 9px;text-align:right;white-space:nowrap"
_MUTED = "color:var(--jp-ui-font-color2,GrayText)"
_LINE = "border-top:1px solid var(--jp-border-color2,#8884)"
#: Label of the row below a run.
_PUBLISHED = "published"
#: Columns of the table, in order; columns without values are omitted.
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
    """Metrics of every run, with published values below."""

    tip = "Means over layers, with published values below"
    refused_kinds = dict.fromkeys(
        (".png", ".svg"), "The table is not a figure; choose HTML or netCDF, or another view."
    )

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.table = ipywidgets.HTML(layout=SCROLLING)
        self.box.children = [self.table]

    def draw(self, scene: Scene) -> None:
        """Update the table."""
        self.table.value = comparison_table(scene)

    def picture(self, scene: Scene) -> bytes:
        """Return the table as PNG."""
        rows, note = comparison_rows(scene)
        return text_picture("Comparison of architectures", [note], rows)

    def saved(self) -> SavedView:
        """Return a view that is only text."""
        return SavedView("table", None, below=self.table.value)


def comparison_of(scene: Scene) -> xr.Dataset:
    """Return the comparison of the displayed runs at this step and in these layers, as `workbench.compare` does."""
    spectra = {name: scene.layers_of(name) for name in scene.shown}
    spectra = {name: data for name, data in spectra.items() if data.sizes["layer"]}
    if not spectra:
        raise OptionError(
            f"None of the models shown has spectra of these layers at step {scene.step}; choose other layers or a "
            "later step."
        )
    runs = {name: scene.runs[name].tree for name in spectra}  # checked by the constructor
    return compare_checked(runs, spectra, published=scene.published_of(spectra))


def comparison_rows(scene: Scene) -> tuple[list[list[str]], str]:
    """Return the comparison as text: a header, one row per run, followed by its published values; and a note."""
    comparison = comparison_of(scene)
    ours = {name: _of(comparison[name], "ours") for name in _MEASURES}
    published = {name: _of(comparison[name], "published") for name in _MEASURES}
    measures = [name for name in _MEASURES if not (np.isnan(ours[name]).all() and np.isnan(published[name]).all())]
    # Values that are equal for all runs are in the note.
    measures = [name for name in measures if name not in ("rank", "kreiss_constant") or len(set(ours[name])) > 1]
    rows = [["", *(comparison[name].attrs["long_name"] for name in measures)]]
    for index, model in enumerate(comparison["architecture"].values.tolist()):
        rows.append([model, *(compact(ours[name][index]) for name in measures)])
        theirs = [published[name][index] for name in measures]
        if not np.isnan(theirs).all():
            rows.append([_PUBLISHED, *("" if np.isnan(value) else f"{value:g}" for value in theirs)])
    return rows, _note(scene, comparison)


def comparison_table(scene: Scene) -> str:
    """Return the comparison as an HTML table."""
    (heads, *rows), note = comparison_rows(scene)
    head = "".join(f'<th style="{_HEAD}">{html.escape(name).replace("-", "&#8209;")}</th>' for name in heads[1:])
    body = "".join(
        _row(html.escape(name), cells, _MUTED if name == _PUBLISHED else f"{_LINE};font-weight:500")
        for name, *cells in rows
    )
    table = f'<table style="{TABLE};font-size:12px"><tr><td></td>{head}</tr>{body}</table>'
    look = f"{_MUTED};line-height:1.5;margin-top:4px;max-width:780px;white-space:normal"
    return f'{table}<div style="{look}">{html.escape(note)}</div>'


def _of(values: xr.DataArray, source: str) -> np.ndarray:
    """Return one number per run; NaN if this source has none."""
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
    lines = [f"Spectra at step {scene.step}, mean over {layers} with a nonzero update"]
    lines += [", ".join(late)] if late else []
    if np.isinf(comparison["kreiss_constant"].sel(source="ours")).all():
        lines.append("All Kreiss constants are infinite")
    ranks = set(comparison["rank"].values)
    lines.append(f"All at rank {ranks.pop():g}" if len(ranks) == 1 else "M is comparable only at equal rank")
    if any(comparison["published_as"].values):
        lines.append(f"Published values: at initialization, {comparison.attrs['source']}")
    return ". ".join(lines) + "."
