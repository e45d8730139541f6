"""Eigenvalues of every layer in the complex plane: one panel per model, or one per run and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError
from workbench.io.store import at_step, divergence_step, last_step, named_runs, recorded_steps, spectra_of
from workbench.koopman.measures import remeasure
from workbench.option_kinds import PositiveInt
from workbench.plots import style
from workbench.plots.complex_plane import PlaneStyle, Scale, plane_panel
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import named_spectra, select_layers
from workbench.plots.plane_view import depth_of, headline, key, mode_columns, silent_layers, view_of
from workbench.plots.style import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import xarray as xr

    from workbench.plots.plane_view import PlaneView


@redrawable
def eigenvalue_map(
    spectra: xr.Dataset | xr.DataTree | Mapping[str, xr.Dataset | xr.DataTree] | Sequence[xr.Dataset | xr.DataTree],
    *,
    step: int | str | None = None,
    layers: Iterable[int] | None = None,
    reliable_only: bool = False,
    zoom: str = "all modes",
    columns: PositiveInt = 3,
    backend: str = "bokeh",
) -> Any:
    """Draw the eigenvalues of each layer in the complex plane, one panel per model, all on the same linked axes.

    The unit circle is drawn and the near-unit band is shaded. The color is the depth of the layer. Modes whose residual
    exceeds the threshold are hollow; modes of a layer whose update is too small for a spectrum are crosses. A panel
    with more than 5,000 modes shows their density instead.

    Args:
        spectra: One spectra dataset or run, or several by name or in a list; dims ``layer``, ``mode``, and ``step`` if
            ``step`` is given.
        step: Step to show: ``"first"``, ``"last"``, or a number (the latest recorded step up to it). The titles state
            the step. None if the data hold no steps.
        layers: Layer numbers to show, for example ``range(4)``; None shows all.
        reliable_only: Whether to exclude modes whose residual exceeds the threshold, also from the masses.
        zoom: ``"all modes"``: true to scale up to a modulus of 1.25 and logarithmic beyond. ``"near 1"``: the square of
            half width 0.3 around 1, true to scale, which holds most modes of deep models. Each panel states how many
            modes are outside.
        columns: Panels per row.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only; show it with ``workbench.widgets.show()`` or write it
        with ``workbench.plots.save()``.

    Raises:
        SchemaError: If a dataset is not a spectra dataset, or holds several runs, or several steps without ``step``.
        OptionError: If the backend, the zoom, the step or all of the layers do not exist.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> figure = wb.plots.eigenvalue_map({"Pre-LN": spectra})
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.profile`: Measures the spectra.
        `workbench.plots.step_grid`: Draws the eigenvalues at several steps of a run.
    """
    layers = None if layers is None else list(layers)
    models, depths = {}, {}
    for name, data in named_spectra(spectra, step=step).items():
        measured = remeasure(data, reliable_only=True) if reliable_only else data
        models[name] = select_layers(measured, layers)
        depths[name] = depth_of(data)
    if not any(data.sizes["layer"] for data in models.values()):
        raise OptionError.of("layers", layers, f"numbers from 0 to {max(depths.values()) - 1}")
    modes = {
        name: mode_columns(data, n_layers=depths[name], reliable_only=reliable_only) for name, data in models.items()
    }
    view = view_of(modes, zoom)
    scale = Scale(max(depths.values()), is_shared=len(set(depths.values())) == 1)
    first_key = key(next(iter(models.values())))
    with style.drawing(backend) as hv:
        panels = []
        for index, (name, data) in enumerate(models.items()):
            is_known = index > 0 and key(data) == first_key
            styling = PlaneStyle(
                title=name,
                note=headline(data, modes[name], view),
                key="\n".join(filter(None, ["" if is_known else key(data), silent_layers(data)])),
                view=view,
                scale=scale,
                has_scale=index == min(columns, len(models)) - 1,
                side={1: 420, 2: 300}.get(len(models), 240),
            )
            panels.append(plane_panel(hv, backend, data, modes[name], styling))
        return style.laid_out(hv, panels, backend, n_columns=columns, tight=True, hspace=0.3, vspace=0.5)


_N_COLUMNS = 4


@redrawable
def step_grid(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    *,
    steps: Iterable[int] | None = None,
    layers: Iterable[int] | None = None,
    zoom: str = "all modes",
    backend: str = "bokeh",
) -> Any:
    """Draw the eigenvalues of each run at several steps: one row per run, one column per step, linked axes.

    Each panel is drawn as in `eigenvalue_map` and states the mean near-unit mass and the largest spectral radius. It
    shows the latest spectra up to the step of its column and states their step. A panel without spectra states why it
    is empty.

    Args:
        runs: One run, or several by name. Spectra without a step are shown in the first column.
        steps: Steps of the columns; None selects up to four recorded steps, as evenly spaced as possible.
        layers: Layer numbers to show; None shows all.
        zoom: ``"all modes"`` or ``"near 1"``, as in `eigenvalue_map`.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If there is no run, or one has no spectra.
        OptionError: If no run reaches a step, or the backend, the zoom or all of the layers do not exist.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> figure = wb.plots.step_grid({"a failed run": run}, steps=[0, 100])
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.plots.eigenvalue_map`: Draws one step of several models.
        `workbench.train`: Records spectra during training.
    """
    layers = None if layers is None else list(layers)
    trees = named_runs(runs)
    columns = _columns(trees, steps)
    cells = [
        cell_of(tree, step, name=name, layers=layers, is_first=step == columns[0])
        for name, tree in trees.items()
        for step in columns
    ]
    depths = [depth_of(tree["spectra"].dataset) for tree in trees.values()]
    if not any(cell.spectra.sizes["layer"] for cell in cells):
        raise OptionError.of("layers", layers, f"numbers from 0 to {max(depths) - 1}")
    modes = [
        mode_columns(cell.spectra.isel(layer=[]) if cell.word else cell.spectra, n_layers=depths[i // len(columns)])
        for i, cell in enumerate(cells)
    ]
    view = view_of({str(i): columns for i, columns in enumerate(modes)}, zoom)
    scale = Scale(max(depths), is_shared=len(set(depths)) == 1)
    lines = {"M: mean near-unit mass\nρ: largest spectral radius": None}
    lines |= dict.fromkeys(key(spectra_of(run)) for run in trees.values())
    if any(not cell.spectra["is_informative"].all() for cell in cells if not cell.word):
        lines["× update too small for a spectrum"] = None
    keys = "\n".join(lines)
    n = len(columns)
    side = 300 if n <= 2 else 210
    with style.drawing(backend) as hv:
        panels = []
        for index, cell in enumerate(cells):
            row, column = divmod(index, n)
            is_last_row = row == len(trees) - 1
            styling = PlaneStyle(
                title=cell.title,
                note=_note(cell, modes[index], view),
                key=keys if is_last_row and column == 0 else "",
                view=view,
                scale=scale,
                has_scale=index == n - 1,
                side=side,
                inches=3.4 if n <= 2 else 2.6,
                row=shortened(list(trees)[row], side) if column == 0 else "",
                has_axis=(is_last_row, column == 0),
                word=cell.word,
            )
            panels.append(plane_panel(hv, backend, cell.spectra, modes[index], styling))
        return style.laid_out(hv, panels, backend, n_columns=n, tight=True, hspace=0.06, vspace=0.15)


@dataclass(frozen=True)
class GridCell:
    """One panel of the grid."""

    title: str
    spectra: xr.Dataset
    word: str = ""


def cell_of(
    run: xr.DataTree, step: int, *, name: str, layers: Iterable[int] | None = None, is_first: bool = True
) -> GridCell:
    """Return the panel of a run in one step's column; the first one has spectra without a step. None: all layers."""
    spectra = select_layers(spectra_of(run), layers)
    steps = recorded_steps(spectra)
    if not len(steps):
        return GridCell("no step recorded", at_step(spectra, "last", name=name), "" if is_first else "no step recorded")
    if step < steps[0]:
        return GridCell(f"step {step}", at_step(spectra, "first", name=name), f"recorded from step {steps[0]}")
    diverged, last = divergence_step(run), last_step(run)
    if last is not None and step > last:
        why = f"recorded to step {last}" if diverged is None else f"diverged at step {diverged}"
        return GridCell(f"step {step}", at_step(spectra, "last", name=name), why)
    chosen = at_step(spectra, step, name=name)
    title = f"step {int(chosen['step'])}"
    if diverged is not None and diverged <= int(chosen["step"]):
        title += f", diverged at {diverged}"
    has_modes = chosen.sizes["layer"] == 0 or bool(np.isfinite(chosen["eigenvalue"]).any())
    return GridCell(title, chosen, "" if has_modes else "no modes")


def _columns(runs: Mapping[str, xr.DataTree], steps: Iterable[int] | None) -> list[int]:
    recorded = sorted({int(step) for run in runs.values() for step in recorded_steps(spectra_of(run))}) or [0]
    if steps is None:
        targets = np.linspace(recorded[0], recorded[-1], _N_COLUMNS)
        return sorted({min(recorded, key=lambda step: abs(step - target)) for target in targets})
    steps = [int(step) for step in steps]
    last = max(filter(None, (last_step(run) for run in runs.values())), default=recorded[-1])
    for step in steps:
        if not recorded[0] <= step <= last:
            raise OptionError.of("steps", step, f"from {recorded[0]} to {last}")
    if not steps:
        raise OptionError(f"steps is empty; choose steps from {recorded[0]} to {last}, or pass None.")
    return steps


def _note(cell: GridCell, columns: Mapping[str, np.ndarray], view: PlaneView) -> str:
    if cell.word:
        return " "
    if cell.spectra.sizes["layer"] and not cell.spectra["is_informative"].any():
        return "update too small for a spectrum"
    return headline(cell.spectra, columns, view, template="M {:.2f}   ρ {:.3g}")
