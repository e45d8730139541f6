"""The content of `LiveTraining` as a static figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench import plots
from workbench.errors import OptionError
from workbench.plots import style
from workbench.plots.figure_files import redrawable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.widgets.live.history import RunHistory

_TRACES = ("loss", "grad_norm", "near_unit_mass", "spectral_radius")


@redrawable
def live_figure(histories: Mapping[str, RunHistory], *, step: int | None = None, backend: str = "bokeh") -> Any:
    """Draw the eigenvalues of each run at a step, and the traces of all runs.

    Args:
        histories: Histories by run.
        step: Recorded step; None for the latest.
        backend: ``"bokeh"`` or ``"matplotlib"``.

    Returns:
        A holoviews Layout.

    Raises:
        OptionError: If there are no modes yet, or there is no such backend.
    """
    found = {name: history.spectra_at(step) for name, history in histories.items()}
    spectra = {name: data for name, data in found.items() if data is not None}
    if not spectra:
        raise OptionError("There are no modes to draw yet; press Start and wait for the first step.")
    runs = {name: history.as_run() for name, history in histories.items() if history.n_done}
    maps = plots.eigenvalue_map(spectra, step="last", columns=2, backend=backend)
    lines = plots.traces(runs, variables=_TRACES, backend=backend)
    with style.drawing(backend) as hv:
        # The traces share a step axis and have their legend at the side, so they are in one column.
        n_columns = max(len(spectra), 2)
        row = [[line, *(hv.Empty() for _ in range(n_columns - 1))] for line in lines]
        blank = [hv.Empty() for _ in range(n_columns - len(spectra))]
        panels = [*maps, *blank, *(panel for panels in row for panel in panels)]
        return style.laid_out(
            hv, panels, backend, n_columns=n_columns, tight=True, hspace=0.3, vspace=0.55, aspect_weight=1.0
        )
