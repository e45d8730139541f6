"""Per-layer measures against depth, several models in one panel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.formatting import capitalized
from workbench.option_checks import NonNegativeInt, PositiveInt, checked, one_of
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import given_name, named_spectra, require_choices
from workbench.plots.primitives import Primitives, decades, padded
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

DEFAULT_MEASURES = ("near_unit_mass", "spectral_radius", "eigenvector_condition", "nonlinearity_ratio")
#: Size of a panel in pixels.
_SIZE = (300, 175)
LOGARITHMIC = frozenset({"eigenvector_condition", "kreiss_constant", "covariance_condition"})
#: Measure -> the value that separates decay from growth.
REFERENCE = {"spectral_radius": 1.0, "energy_gain": 1.0, "kreiss_constant": 1.0}


@checked
@redrawable
def layer_profile(
    spectra: xr.Dataset | xr.DataTree | Mapping[str, xr.Dataset | xr.DataTree],
    *,
    step: int | str | None = None,
    measures: Sequence[str] = DEFAULT_MEASURES,
    depth: Annotated[str, one_of(("index", "fraction"))] | None = None,
    columns: PositiveInt = 2,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw each measure against depth: one panel per measure, one line per model.

    Layers whose update is too small for a spectrum have hollow markers. Values that are not finite are omitted; the
    second line of the panel lists them.

    Args:
        spectra: One spectra dataset or run, or several by name; dims ``layer``, ``mode``, and ``step`` if ``step`` is
            given.
        step: Step to show: ``"first"``, ``"last"``, or a number (the latest recorded step up to it). The legend states
            the step. None if the data hold no steps.
        measures: Names of per-layer variables of the schema.
        depth: ``"index"`` (layer number) or ``"fraction"`` (0 for the first layer, 1 for the last). None selects the
            fraction only if the models differ in depth.
        columns: Panels per row.
        places: Style number (color, marker, dash) of each model, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If a dataset is not a spectra dataset, holds several steps and ``step`` is None, or a measure is
            not in the schema.
        OptionError: If the backend, the step or the kind of depth does not exist, or a model has no style number.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> figure = wb.plots.layer_profile({"Pre-LN": spectra}, measures=["near_unit_mass", "spectral_radius"])
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.profile`: Measures the spectra.
        `workbench.plots.eigenvalue_map`: Draws the eigenvalues.
    """
    models = named_spectra(spectra, step=step)
    measures = [measures] if isinstance(measures, str) else list(measures)
    known = [name for name, variable in SPECTRA.items() if variable.dims == ("layer",) and variable.kind != "b"]
    require_choices("measures", measures, known)
    if depth is None:
        depth = "index" if len({data.sizes["layer"] for data in models.values()}) == 1 else "fraction"
    names = models if step is None else [given_name(label, data) for label, data in models.items()]
    order = dict(zip(models, style.model_places(names, places), strict=True))
    with style.drawing(backend) as hv:
        legend_at = min(columns, len(measures)) - 1 if len(models) > 1 or step is not None else -1
        n_rows = -(-len(measures) // columns)
        panels = [
            _panel(
                hv,
                backend,
                models,
                measure,
                order=order,
                depth=depth,
                has_legend=index == legend_at,
                at=(index % columns * (_SIZE[0] + 75), (n_rows - 1 - index // columns) * (_SIZE[1] + 110)),
            )
            for index, measure in enumerate(measures)
        ]
        return style.laid_out(hv, panels, backend, n_columns=columns)


def measure_columns(spectra: xr.Dataset, measure: str, *, depth: str = "index") -> dict[str, np.ndarray]:
    """Return one measure as columns: ``depth``, the measure (NaN where not finite), ``layer`` and ``fill`` opacity."""
    layer = spectra["layer"].values
    value = spectra[measure].values.astype(float)
    return {
        "depth": layer.astype(float) if depth == "index" else np.linspace(0, 1, len(layer)),
        measure: np.where(np.isfinite(value), value, np.nan),
        "layer": layer,
        "fill": np.where(spectra["is_informative"].values, 1.0, 0.0),
    }


def remark(models: Mapping[str, xr.Dataset], measure: str) -> str:
    """Return a note on layers whose measure is not finite and therefore not drawn; empty if there are none."""
    remarks = []
    for name, data in models.items():
        value = data[measure].values.astype(float)
        for word, missing in (("infinite", np.isinf(value)), ("undefined", np.isnan(value))):
            layers = data["layer"].values[missing]
            if len(layers):
                shown = ", ".join(map(str, layers[:4])) + ("…" if len(layers) > 4 else "")
                owner = f"{name} " if len(models) > 1 else ""
                remarks.append(f"{owner}{word} in layer {shown}")
    return "; ".join(remarks)


def _panel(
    hv: Any,
    backend: str,
    models: Mapping[str, xr.Dataset],
    measure: str,
    *,
    order: Mapping[str, int],
    depth: str,
    has_legend: bool,
    at: tuple[int, int],
) -> Any:
    title = SPECTRA[measure].long_name
    x = hv.Dimension("depth", label="layer" if depth == "index" else "depth (0: first layer, 1: last layer)")
    draw = Primitives(hv, backend, x, hv.Dimension(measure, label=title))
    drawn = [measure_columns(data, measure, depth=depth) for data in models.values()]
    if measure in REFERENCE:
        draw.rule(REFERENCE[measure])
    for name, columns in zip(models, drawn, strict=True):
        look, place = style.model_style(order[name]), (columns["depth"], columns[measure])
        tips = [("", name), ("layer", "@layer"), (title, f"@{measure}")]
        draw.line(*place, color=look["color"], dash=look["dash"], width=1.8, label=name)
        draw.dots(
            *place,
            color=look["color"],
            marker=look["marker"],
            is_hollow=columns["fill"] == 0,
            columns={"layer": columns["layer"]},
            tips=tips,
            label=name,
        )
    depths, values = (np.concatenate([columns[key] for columns in drawn]) for key in ("depth", measure))
    values = np.append(values[np.isfinite(values)], [REFERENCE[measure]] if measure in REFERENCE else [])
    values = values if len(values) else np.array([0.0, 1.0])
    is_log = _is_logarithmic(models, measure)
    view = (
        padded(depths.min(), depths.max()),
        padded(values.min(), values.max(), is_logarithmic=is_log, margin=0.08),
    )
    n_layers = len(np.unique(depths))
    return draw.panel(
        title=capitalized(title),
        note=remark(models, measure).split("; "),
        view=view,
        size=_SIZE,
        names=(x.label, ""),
        ticks=(
            np.unique(depths)[:: -(-n_layers // 9)].tolist() if depth == "index" else None,
            (decades(*view[1], n_most=5) or None) if is_log else None,
        ),
        is_log=(False, is_log),
        legend=has_legend,
        at=at,
    )


def _is_logarithmic(models: Mapping[str, xr.Dataset], measure: str) -> bool:
    values = np.concatenate([data[measure].values.astype(float) for data in models.values()])
    values = values[np.isfinite(values)]
    return measure in LOGARITHMIC and len(values) > 0 and bool((values > 0).all())
