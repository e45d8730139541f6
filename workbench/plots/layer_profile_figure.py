"""Per-layer measures against depth, several models in one panel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.formatting import capitalized
from workbench.option_checks import NonNegativeInt, PositiveInt, checked, one_of
from workbench.plots import style
from workbench.plots.dataset_columns import require_choices
from workbench.plots.figure_files import redrawable
from workbench.plots.spectra_inputs import given_name, named_spectra
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

DEFAULT_MEASURES = ("near_unit_mass", "spectral_radius", "eigenvector_condition", "nonlinearity_ratio")
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
        panels = [
            _panel(
                hv, models, measure, measures, order=order, depth=depth, has_legend=index == legend_at, backend=backend
            )
            for index, measure in enumerate(measures)
        ]
        return style.laid_out(hv, panels, backend, n_columns=columns, tight=True, hspace=0.3, vspace=0.75)


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
    models: Mapping[str, xr.Dataset],
    measure: str,
    measures: Sequence[str],
    *,
    order: Mapping[str, int],
    depth: str,
    has_legend: bool,
    backend: str,
) -> Any:
    x = hv.Dimension("depth", label="layer" if depth == "index" else "depth (0: first layer, 1: last layer)")
    y = hv.Dimension(measure, label=SPECTRA[measure].long_name)
    elements = []
    is_bokeh = backend == "bokeh"
    if measure in REFERENCE:
        rule = hv.HLine(REFERENCE[measure])
        width = {"line_width": 1} if is_bokeh else {"linewidth": 0.8}
        elements.append(rule.opts(color=style.NEUTRAL, **width, backend=backend))
    for name, data in models.items():
        styling = style.model_style(order[name])
        columns = measure_columns(data, measure, depth=depth)
        line = hv.Curve(columns, x, y, label=name)
        if is_bokeh:
            elements.append(
                line.opts(color=styling["color"], line_dash=styling["dash"], line_width=1.8, backend=backend)
            )
            elements.append(
                hv.Scatter(columns, x, [y, "layer", "fill"], label=name).opts(
                    color=styling["color"],
                    marker=styling["marker"],
                    fill_alpha=hv.dim("fill"),
                    size=8,
                    line_width=1.4,
                    tools=["hover"],
                    hover_tooltips=[("", name), ("layer", "@layer"), (SPECTRA[measure].long_name, f"@{measure}")],
                    backend=backend,
                )
            )
        else:
            elements.append(
                line.opts(color=styling["color"], linestyle=styling["dash"], linewidth=1.5, backend=backend)
            )
            marker = style.MATPLOTLIB_MARKERS[styling["marker"]]
            for inside, chosen in ((styling["color"], columns["fill"] > 0), ("none", columns["fill"] == 0)):
                part = {key: np.asarray(column)[chosen] for key, column in columns.items()}
                dots = hv.Scatter(part, x, [y, "layer", "fill"], label=name)
                edge = {"edgecolors": styling["color"], "linewidth": 1.1}
                elements.append(dots.opts(color=inside, marker=marker, s=26, **edge, backend=backend))
    note = remark(models, measure)
    has_notes = any(remark(models, other) for other in measures)
    view = {"logy": _is_logarithmic(models, measure), "xlabel": x.label, "ylabel": "", "padding": 0.08}
    if is_bokeh:
        hooks = [style.dress_bokeh, _layer_ticks_bokeh] if depth == "index" else [style.dress_bokeh]
        if has_notes:
            hooks.append(style.note_bokeh(note or " "))
        view |= {"show_legend": has_legend}
        if has_legend:
            view |= {"legend_position": "right"}
        return hv.Overlay(elements).opts(
            **view,
            title=capitalized(SPECTRA[measure].long_name),
            frame_width=300,
            frame_height=175,
            show_grid=True,
            default_tools=[],
            tools=["pan", "wheel_zoom", "box_zoom", "reset", "save"],
            active_tools=[],
            hooks=hooks,
            backend=backend,
        )
    hooks = [style.dress_matplotlib, style.title_matplotlib(capitalized(SPECTRA[measure].long_name), note=note)]
    if depth == "index":
        hooks.append(_layer_ticks_matplotlib)
    if view["logy"]:
        hooks.append(style.log_ticks_matplotlib(1.8))
    if has_legend:
        hooks.append(style.legend_matplotlib(order))
    return hv.Overlay(elements).opts(
        **view, show_legend=False, title="", aspect=1.8, fig_inches=(4, 2.3), hooks=hooks, backend=backend
    )


def _is_logarithmic(models: Mapping[str, xr.Dataset], measure: str) -> bool:
    values = np.concatenate([data[measure].values.astype(float) for data in models.values()])
    values = values[np.isfinite(values)]
    return measure in LOGARITHMIC and len(values) > 0 and bool((values > 0).all())


def _layer_ticks_bokeh(plot: Any, element: Any) -> None:
    from bokeh.models import BasicTicker

    for axis in plot.state.xaxis:
        axis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)


def _layer_ticks_matplotlib(plot: Any, element: Any) -> None:
    plot.handles["axis"].xaxis.get_major_locator().set_params(integer=True)
