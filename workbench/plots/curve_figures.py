"""Curves of several models or runs in one panel: measures against depth, and monitors over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.formatting import capitalized
from workbench.io.store import divergence_step, named_runs, spectra_of
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveInt, one_of
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import given_name, named_spectra, require_choices
from workbench.plots.primitives import Primitives, decades, padded
from workbench.schema.runs import MONITORS, SPECTRA
from workbench.studies.comparison import SPECTRAL

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
    view = (padded(depths.min(), depths.max()), padded(values.min(), values.max(), is_logarithmic=is_log, margin=0.08))
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


STATISTICS = ("mean", "max", "min")
#: Variables that are bounded or read by their shape: always on a linear axis that fits every run.
BOUNDED = frozenset(
    {"accuracy", "learning_rate", "nonlinearity_ratio"} | {name for name in SPECTRA if name.endswith("_mass")}
)
#: Variables on a logarithmic axis if all values are positive.
UNBOUNDED = LOGARITHMIC | {"grad_norm"}
#: Any other variable has a logarithmic axis if its values in runs that converged span more than this factor.
_WIDE = 20
#: Smallest fraction of the axis for the runs that converged.
_LEAST_FRACTION = 0.5
#: Size of a panel and the space between two, in pixels.
_TRACE_SIZE, _BETWEEN = (560, 165), 60


@checked
@redrawable
def traces(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    *,
    variables: str | Sequence[str] = ("loss", "grad_norm"),
    statistic: Annotated[str, one_of(STATISTICS)] = "mean",
    shows_all: bool = False,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw monitors and spectral measures over steps: one panel per variable, one line per run, one axis of steps.

    A cross marks the step at which a run diverged, which the legend states. Gradient norms and condition numbers have a
    logarithmic axis, fractions and learning rates a linear one. The axis of other variables is logarithmic if they are
    positive and span more than a factor of 20 in the runs that converged. The second line of the panel lists values
    that are not finite, above the axis or not recorded.

    Args:
        runs: One run, or several by name.
        variables: Names of monitors over steps, such as ``"loss"``, ``"grad_norm"``, ``"accuracy"``, or of per-layer
            measures of the schema, such as ``"near_unit_mass"``.
        statistic: Reduction of measures over layers: ``"mean"``, ``"max"`` or ``"min"``. Layers whose update is too
            small for a spectrum are excluded, as in `workbench.compare`.
        shows_all: Whether the axes fit all values. By default a run that diverged leaves the view if it would compress
            the others into less than half of the axis.
        places: Style number (color, marker, dash) of each run, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If there is no run, or no run has one of the variables.
        OptionError: If the backend or the statistic does not exist, or a run has no style number.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> figure = wb.plots.traces({"a failed run": run}, variables=["loss", "grad_norm"])
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.plots.timeline`: Draws signals together with events.
        `workbench.open_run`: Opens a recorded run.
    """
    with style.drawing(backend) as hv:
        drawn = trace_panels(hv, backend, runs, variables, statistic=statistic, shows_all=shows_all, places=places)
        return style.laid_out(hv, drawn, backend)


def trace_panels(
    hv: Any,
    backend: str,
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    variables: str | Sequence[str],
    *,
    statistic: str = "mean",
    shows_all: bool = False,
    places: Mapping[str, int] | None = None,
    is_placed: bool = True,
) -> list[Any]:
    """Return the panels of `traces`; unless ``is_placed``, holoviews places them, as in a figure with others."""
    trees = named_runs(runs, needs_spectra=False)
    order = style.model_places(trees, places)
    variables = [variables] if isinstance(variables, str) else list(variables)
    require_choices("variables", variables, _known(trees))
    panels = [
        TracesPanel.of(
            [trace_of(run, variable, owner, statistic=statistic) for owner, run in trees.items()], shows_all=shows_all
        )
        for variable in variables
    ]
    steps = np.concatenate([line.step for panel in panels for line in panel.lines])
    first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    span = padded(first, last, margin=0.02)
    n = len(panels)
    return [
        _trace_panel(hv, backend, panel, order, span, n - 1 - index, n, is_placed=is_placed)
        for index, panel in enumerate(panels)
    ]


@dataclass(frozen=True)
class Trace:
    """Values of one variable of one run, including NaN and infinite ones, by step.

    ``silent`` are steps at which every update was too small for a spectrum, ``diverged`` the first that counts as such.
    """

    run: str
    title: str
    variable: str
    step: np.ndarray
    value: np.ndarray
    has_markers: bool = False
    silent: tuple[int, ...] = ()
    diverged: int | None = None

    @property
    def label(self) -> str:
        """Text of the legend."""
        return self.run if self.diverged is None else f"{self.run} × step {self.diverged}"

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Finite values as columns ``step`` and ``value``."""
        finite = np.isfinite(self.value)
        return {"step": self.step[finite], "value": self.value[finite]}

    @property
    def cross(self) -> tuple[int, float] | None:
        """Step of divergence and the last finite value up to it; None if there is no such value."""
        columns = self.columns
        if self.diverged is None:
            return None
        before = columns["value"][columns["step"] <= self.diverged]
        return (self.diverged, float(before[-1])) if len(before) else None

    @property
    def remarks(self) -> list[str]:
        """Notes on values that are not drawn because they are not finite or missing."""
        if not len(self.step):
            return ["not recorded"]
        remarks = []
        if self.silent:
            shown = ", ".join(map(str, self.silent[:4])) + ("…" if len(self.silent) > 4 else "")
            remarks.append(f"update too small for a spectrum at step {shown}")
        if np.isinf(self.value).any():
            remarks.append(f"infinite from step {self.step[np.isinf(self.value)][0]}")
        # A monitor measured at few steps is NaN between them; missing values are reported only where a run diverged.
        defined = self.step[~np.isnan(self.value)]
        if not len(defined) and len(self.silent) < len(self.step):
            remarks.append("undefined")
        elif len(defined) and self.diverged is not None and np.isnan(self.value[-1]):
            remarks.append(f"undefined after step {defined[-1]}")
        return remarks


def with_unit(name: str, unit: str) -> str:
    """Return the title of a quantity: its name, and its unit unless it is dimensionless."""
    return name if unit in ("1", "") else f"{name} ({unit})"


def trace_of(run: xr.DataTree, variable: str, name: str, *, statistic: str = "mean") -> Trace:
    """Return one variable of a run: a monitor, or a measure reduced over layers; empty if the run lacks it."""
    diverged = divergence_step(run)
    monitors = run["monitors"].to_dataset() if "monitors" in run.children else None
    if monitors is not None and _is_trace(monitors, variable):
        attrs = (MONITORS[variable].attrs if variable in MONITORS else {}) | monitors[variable].attrs
        title = with_unit(attrs.get("long_name", variable.replace("_", " ")), attrs.get("units", ""))
        return Trace(name, title, variable, monitors["step"].values, _numbers(monitors[variable]), diverged=diverged)
    title = f"{SPECTRA[variable].long_name}, {statistic} over layers" if variable in SPECTRA else variable
    spectra = spectra_of(run) if "spectra" in run.children else None
    if spectra is None or variable not in SPECTRA or "step" not in spectra[variable].dims:
        return Trace(name, title, variable, np.zeros(0, int), np.zeros(0), diverged=diverged)
    values, silent = spectra[variable].astype(float), ()
    if variable in SPECTRAL:
        values = values.where(spectra["is_informative"])
        silent = tuple(spectra["step"].values[~spectra["is_informative"].any("layer").values].tolist())
    reduced = getattr(values, statistic)("layer")
    return Trace(name, title, variable, spectra["step"].values, _numbers(reduced), True, silent, diverged)


@dataclass(frozen=True)
class TracesPanel:
    """Lines of one variable, the range of their common axis without padding, and a note on what is not drawn."""

    lines: list[Trace]
    limits: tuple[float, float]
    is_logarithmic: bool
    note: str

    @classmethod
    def of(cls, lines: list[Trace], *, shows_all: bool = False) -> TracesPanel:
        """Choose the axis; see `traces`."""
        variable = lines[0].variable
        values = np.concatenate([line.columns["value"] for line in lines])
        converged = np.concatenate([line.columns["value"] for line in lines if line.diverged is None] or [np.zeros(0)])
        usual = converged if len(converged) and not shows_all else values
        lowest, highest = (values.min(), values.max()) if len(values) else (0.0, 1.0)
        is_wide = variable in UNBOUNDED or (len(usual) and usual.max() > _WIDE * usual.min())
        is_logarithmic = bool(variable not in BOUNDED and lowest > 0 and is_wide)
        if len(converged) and not shows_all and variable not in BOUNDED:
            ends = np.array([lowest, converged.max(), highest])
            low, usual_high, high = np.log(ends) if is_logarithmic else ends
            if usual_high - low < _LEAST_FRACTION * (high - low):
                highest = converged.max()
        remarks = [(line.run, remark) for line in lines for remark in line.remarks]
        for line in lines:
            top = line.columns["value"].max(initial=-np.inf)
            if top > highest:
                remarks.append((line.run, f"up to {top:.3g}, above the axis"))
        note = "; ".join(f"{run} {remark}" if len(lines) > 1 else remark for run, remark in remarks)
        return cls(lines, (float(lowest), float(highest)), is_logarithmic, note)

    @property
    def view(self) -> tuple[float, float]:
        """Range of the axis."""
        return padded(*self.limits, is_logarithmic=self.is_logarithmic)

    @property
    def title(self) -> str:
        """Title of the variable, from a run that has it."""
        return next((line.title for line in self.lines if len(line.step)), self.lines[0].title)


def _known(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """Return the names of variables over steps that at least one run has."""
    monitors = [run["monitors"].to_dataset() for run in runs.values() if "monitors" in run.children]
    names = dict.fromkeys(str(name) for data in monitors for name in data.data_vars if _is_trace(data, str(name)))
    if any("spectra" in run.children and "step" in run["spectra"].dims for run in runs.values()):
        names |= dict.fromkeys(name for name, rule in SPECTRA.items() if rule.dims == ("layer",) and rule.kind != "b")
    return list(names)


def _is_trace(monitors: xr.Dataset, variable: str) -> bool:
    if variable not in monitors.data_vars:
        return False
    return monitors[variable].dims == ("step",) and monitors[variable].dtype.kind in "fiu"


def _numbers(values: xr.DataArray) -> np.ndarray:
    return values.transpose("step").values.astype(float)


def _trace_panel(
    hv: Any,
    backend: str,
    panel: TracesPanel,
    places: Sequence[int],
    span: tuple[float, float],
    n_below: int,
    n: int,
    *,
    is_placed: bool,
) -> Any:
    """Draw one variable; ``n_below`` of the ``n`` panels are below it."""
    draw = Primitives(hv, backend, "step", hv.Dimension("value", label=panel.title))
    for place, line in zip(places, panel.lines, strict=True):
        look, columns = style.model_style(place), line.columns
        at, color = (columns["step"], columns["value"]), look["color"]
        tips = [("", line.label), ("step", "@step"), (panel.title, "@value")]
        lines_tips = () if line.has_markers else tips
        draw.line(*at, color=color, dash=look["dash"], width=1.5, label=line.label, tips=lines_tips)
        if line.has_markers:
            draw.dots(*at, color=color, marker=look["marker"], size=6, tips=tips)
        if line.cross is not None:
            step, value = line.cross
            draw.dots([step], [min(value, panel.limits[1])], color=color, marker="x", size=12)
    return draw.panel(
        title=capitalized(panel.title),
        note=panel.note.split("; "),
        view=(span, panel.view),
        size=_TRACE_SIZE,
        names=("step", ""),
        ticks=(None, (decades(*panel.view, n_most=5) or None) if panel.is_logarithmic else None),
        is_log=(False, panel.is_logarithmic),
        legend=n_below == n - 1,
        bare=(n_below > 0, False),
        at=(0, n_below * (_TRACE_SIZE[1] + _BETWEEN)) if is_placed else None,
    )
