"""Eigenvalues of every layer in the complex plane, one panel per model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.errors import OptionError
from workbench.koopman.measures import remeasure
from workbench.option_checks import PositiveInt
from workbench.plots import style
from workbench.plots.complex_plane import PlaneStyle, Scale, panel_bokeh, panel_matplotlib
from workbench.plots.figure_files import redrawable
from workbench.plots.mode_columns import depth_of, headline, key, mode_columns, silent_layers
from workbench.plots.plane_view import view_of
from workbench.plots.spectra_inputs import named_spectra, select_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import xarray as xr


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
            panel = panel_bokeh if backend == "bokeh" else panel_matplotlib
            panels.append(panel(hv, data, modes[name], styling))
        return style.laid_out(hv, panels, backend, n_columns=columns, tight=True, hspace=0.3, vspace=0.5)
