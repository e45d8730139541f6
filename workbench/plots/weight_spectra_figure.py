"""Weight spectra: a measure of every matrix against depth, and the eigenvalue density of one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import capitalized, clipped, counted, three_digits
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import require_choices
from workbench.plots.primitives import Primitives, decades
from workbench.schema.runs import WEIGHT_CHANGES, WEIGHTS, validate_weights

if TYPE_CHECKING:
    import xarray as xr

_WIDTH, _HEIGHT, _BETWEEN = 560, 240, 104
#: Values that span more than this factor are drawn on a logarithmic axis.
_LOGARITHMIC_SPAN = 10.0
#: Eigenvalues below this fraction of the largest are omitted from the density; its note states their number.
_LOWEST = 1e-5
_BINS_A_DECADE = 12
_MOST_NAMED = 4
_TAIL, _EDGE = "#d55e00", "#0f8f66"


@redrawable
def weight_spectra(
    spectra: xr.Dataset, *, measure: str = "alpha", matrix: str | None = None, backend: str = "bokeh"
) -> Any:
    """Draw a measure of every weight matrix against depth, and the eigenvalue density of one matrix.

    The upper panel has one line per role; several matrices of a role in one layer, such as experts, are dots around
    their mean. The small line lists matrices without a layer, such as embeddings, and counts undefined values. The
    lower panel shows the density of the eigenvalues of W'W / N on logarithmic axes, with the power law fitted to its
    tail and the edge of the bulk of a random matrix. Eigenvalues beyond the edge (spikes) are also drawn as dots.

    Args:
        spectra: Dataset from `workbench.weights.weight_spectra`.
        measure: Variable of the matrices to draw, such as ``"alpha"``, ``"stable_rank"`` or ``"n_spikes"``.
        matrix: Name of the matrix in the lower panel; None selects the smallest alpha among the matrices in layers.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If the dataset holds no weight spectra or several steps, the measure or the matrix does not exist,
            or the matrix is zero.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> spectra = wb.weights.weight_spectra(wb.samples.load("pre_ln"), progress=False)
        >>> figure = wb.plots.weight_spectra(spectra, measure="stable_rank")
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.weights.weight_spectra`: Computes the spectra.
        `workbench.weights.power_law_tail`: Fits the tail.
    """
    spectra = validate_weights(spectra)
    if spectra["alpha"].dims != ("matrix",):
        dims = tuple(map(str, spectra["alpha"].dims))
        raise SchemaError(f"The weight spectra have dimensions {', '.join(dims)}, expected matrix; select one step.")
    rules = WEIGHTS | WEIGHT_CHANGES
    known = [name for name in rules if name in spectra and rules[name].dims == ("matrix",)]
    require_choices("measure", [measure], known)
    density = density_of(spectra, matrix)
    with style.drawing(backend) as hv:
        panels = [_depth_panel(hv, backend, spectra, measure), _density_panel(hv, backend, density)]
        return style.laid_out(hv, panels, backend)


def depth_columns(spectra: xr.Dataset, measure: str) -> dict[str, dict[str, np.ndarray]]:
    """Return by role the columns ``layer``, the measure, ``alpha_error`` and ``matrix`` of its matrices in layers."""
    found = {}
    is_drawn = (spectra["layer"].values >= 0) & np.isfinite(spectra[measure].values)
    for role in dict.fromkeys(spectra["role"].values.tolist()):
        chosen = is_drawn & (spectra["role"].values == role)
        if chosen.any():
            names = ("layer", measure, "alpha_error", "matrix")
            found[role or "other"] = {name: spectra[name].values[chosen] for name in names}
    return found


def density_of(spectra: xr.Dataset, matrix: str | None = None) -> dict[str, Any]:
    """Return the eigenvalue density of one matrix, as `weight_spectra` draws it.

    ``spikes`` are eigenvalues beyond the bulk's edge, ``n_below`` counts those too small to be drawn, and ``tail`` is
    the fitted power law; with the variables of the matrix.
    """
    names = spectra["matrix"].values.tolist()
    if matrix is None:
        alphas = spectra["alpha"].values
        in_layers = np.where(spectra["layer"].values >= 0, alphas, np.nan)
        alphas = in_layers if np.isfinite(in_layers).any() else alphas
        matrix = names[int(np.nanargmin(alphas))] if np.isfinite(alphas).any() else names[0]
    if matrix not in names:
        raise SchemaError(f"There is no matrix '{matrix}'; choose one in spectra['matrix'], such as '{names[0]}'.")
    of_matrix = spectra.isel(matrix=names.index(matrix))
    values = {name: float(of_matrix[name]) for name in WEIGHTS if of_matrix[name].ndim == 0}
    size = max(int(of_matrix["n_rows"]), int(of_matrix["n_columns"]))
    eigenvalues = of_matrix["singular_value"].dropna("value").values ** 2 / size
    if not eigenvalues.any():
        raise SchemaError(f"The matrix '{matrix}' is zero and has no eigenvalue density; choose another one.")
    largest = eigenvalues.max()
    shown = eigenvalues[eigenvalues >= _LOWEST * largest]
    low, high = np.log10([shown.min(), largest])
    n_bins = max(int(min(_BINS_A_DECADE * (high - low), 2 * np.sqrt(len(shown)))), 4)
    edges = np.logspace(low - 1e-9, high + 1e-9, n_bins + 1)
    density = np.histogram(shown, edges)[0] / np.diff(edges) / len(eigenvalues)
    start, alpha = values["tail_start"], values["alpha"]
    x = np.geomspace(start, largest, 50)
    tail = values["n_tail"] / len(eigenvalues) * (alpha - 1) / start * (x / start) ** -alpha
    return {
        **values, "matrix": matrix, "edges": edges, "density": density, "tail": (x, tail),
        "n_below": len(eigenvalues) - len(shown), "spikes": eigenvalues[eigenvalues > values["bulk_edge"]],
    }  # fmt: skip


def _depth_panel(hv: Any, backend: str, spectra: xr.Dataset, measure: str) -> Any:
    label = (WEIGHTS | WEIGHT_CHANGES)[measure].long_name
    roles = depth_columns(spectra, measure)
    draw = Primitives(hv, backend, "layer", measure)
    for place, (role, columns) in enumerate(roles.items()):
        styling, layers = style.model_style(place), np.unique(columns["layer"])
        mean = [columns[measure][columns["layer"] == layer].mean() for layer in layers]
        draw.line(layers, mean, color=styling["color"], dash=styling["dash"], width=1.3, label=role)
        tips = [("", "@matrix"), (label, f"@{measure}")] + [("standard error", "@alpha_error")] * (measure == "alpha")
        draw.dots(
            columns["layer"], columns[measure], color=styling["color"], marker=styling["marker"], size=6,
            columns=columns, tips=tips, label=role,
        )  # fmt: skip
    if not roles:
        draw.words(0, 1, "undefined for every matrix in a layer", align="center")
    everything = np.concatenate([columns[measure] for columns in roles.values()] or [np.ones(1)])
    lowest, highest = float(everything.min()), float(everything.max())
    is_log = lowest > 0 and highest > _LOGARITHMIC_SPAN * lowest
    last = max((int(columns["layer"].max()) for columns in roles.values()), default=0)
    return draw.panel(
        title=f"{capitalized(label)} of each weight matrix",
        note=_depth_note(spectra, measure),
        view=((-0.4, last + 0.4), (lowest / 1.15, highest * 1.15) if is_log else _padded(lowest, highest)),
        size=(_WIDTH, _HEIGHT),
        names=("layer", label),
        ticks=(list(range(0, last + 1, max(1, last // 10))), decades(lowest, highest) if is_log else None),
        is_log=(False, is_log),
        legend=True,
        at=(0, _HEIGHT + _BETWEEN),
    )


def _depth_note(spectra: xr.Dataset, measure: str) -> list[str]:
    values, is_outside = spectra[measure].values, spectra["layer"].values < 0
    outside = [
        f"{role or clipped(str(name), 24)} {three_digits(value)}"
        for role, name, value in zip(
            spectra["role"].values[is_outside], spectra["matrix"].values[is_outside], values[is_outside], strict=True
        )
        if np.isfinite(value)
    ]
    if len(outside) > _MOST_NAMED:
        outside = [*outside[:_MOST_NAMED], f"{len(outside) - _MOST_NAMED} more outside of layers"]
    if measure == "alpha" and np.isfinite(values).any():
        outside.append(f"median standard error {three_digits(np.nanmedian(spectra['alpha_error'].values))}")
    if n_undefined := int((~np.isfinite(values)).sum()):
        outside.append(f"undefined for {n_undefined} of {len(values)} matrices")
    return outside


def _density_panel(hv: Any, backend: str, density: dict[str, Any]) -> Any:
    edges, height = density["edges"], density["density"]
    is_seen = height > 0
    lowest, highest = height[is_seen].min() / 3, height[is_seen].max() * 2
    right = edges[-1] * 1.3
    draw = Primitives(hv, backend, "eigenvalue", "density")
    draw.boxes(edges[:-1][is_seen], lowest, edges[1:][is_seen], height[is_seen], colors=style.NEUTRAL, alpha=0.45)
    if np.isfinite(density["bulk_edge"]) and density["bulk_edge"] > edges[0]:
        edge, spikes = density["bulk_edge"], density["spikes"]
        right = max(right, edge * 1.3)
        draw.line([edge, edge], [lowest, highest], color=_EDGE, dash="dashed", label="edge of the bulk")
        if len(spikes):
            label = f"{len(spikes)} spike{'s' * (len(spikes) > 1)}"
            draw.dots(spikes, np.full(len(spikes), lowest * 1.35), color=_EDGE, size=5, label=label)
    note = [f"{counted(density['n_below'], 'smaller eigenvalue')} not shown" * bool(density["n_below"])]
    if np.isfinite(density["alpha"]):
        draw.line(*density["tail"], color=_TAIL, width=2.4, label="fitted power law")
        note.insert(
            0, f"alpha {density['alpha']:.2f} ± {density['alpha_error']:.2f}, "
            f"KS distance {density['ks_distance']:.3f}, {density['n_tail']:.0f} eigenvalues in the tail",
        )  # fmt: skip
    return draw.panel(
        title=f"Eigenvalues of {clipped(density['matrix'], 52)}",
        note=note,
        view=((edges[0] / 1.15, right), (lowest, highest)),
        size=(_WIDTH, _HEIGHT),
        names=("eigenvalue of W'W / N", "density"),
        ticks=(decades(edges[0], right), decades(lowest, highest)),
        is_log=(True, True),
        legend=True,
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - pad, high + pad
