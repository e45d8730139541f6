"""A selected step of the timeline, with the layers, heads and modes of each run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from workbench.plots.timeline_events import TimelineEvent
    from workbench.widgets.live.history import LiveModes
    from workbench.widgets.timeline_parts.followed_run import FollowedRun


@dataclass(frozen=True)
class Detail:
    """The details of one run at a step.

    Attributes:
        run: Name of the run.
        heat: The signal by layer and head, shape (row, column); None if there is none.
        rows: Labels of its rows.
        columns: Labels of its columns; a single empty label if there are only rows.
        row_layers: Layer of each row; None for rows outside of all layers, such as an embedding.
        step: Step of the heat map.
        modes: The nearest recorded modes; None if there are no spectra.
        mode_layers: Layer numbers of the layers of the modes.
    """

    run: str
    heat: np.ndarray | None
    rows: list[str]
    columns: list[str]
    row_layers: list[int | None]
    step: int
    modes: LiveModes | None
    mode_layers: list[int]


@dataclass(frozen=True)
class PanelSelection:
    """A step that was selected, directly or by an alarm.

    Attributes:
        step: The step.
        signal: Signal of the heat maps; empty if no signal has layers.
        run: Run of the alarm; empty if there is none.
        event: The alarm; None if the step was selected directly.
        dims: Names of the heat maps' rows and columns.
        details: Details, one per run.
    """

    step: int
    signal: str
    run: str = ""
    event: TimelineEvent | None = None
    dims: tuple[str, str] = ("", "")
    details: list[Detail] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        runs: Sequence[FollowedRun],
        step: int,
        signal: str,
        *,
        run: str = "",
        event: TimelineEvent | None = None,
    ) -> PanelSelection:
        """Read the details of each run at its recorded step nearest to a step."""
        details, dims = [], ("", "")
        for each in runs:
            detail, found = _detail(each, step, signal)
            details.append(detail)
            dims = found or dims
        return cls(step, signal, run, event, dims, details)


def _detail(run: FollowedRun, step: int, signal: str) -> tuple[Detail, tuple[str, str] | None]:
    """Return the details of a run at a step, and the names of the rows and columns of its heat map."""
    heat = run.heat(signal, step) if signal else None
    modes, layers = run.modes(step) or (None, [])
    if heat is None:
        return Detail(run.name, None, [], [], [], step, modes, layers), None
    values = np.asarray(heat.values, float)
    rows, columns = heat.dims[0], heat.dims[1] if heat.ndim > 1 else ""
    labels = _labels(heat, rows), _labels(heat, columns) if columns else [""], _layers(heat, rows)
    detail = Detail(run.name, values.reshape(len(values), -1), *labels, int(heat["step"]), modes, layers)
    return detail, (str(rows), str(columns))


def _labels(heat: xr.DataArray, dim: Any) -> list[str]:
    names = f"{dim}_name"
    if dim == "module" and names in heat.coords:
        return [str(name) for name in heat[names].values]
    labels = heat[dim].values if dim in heat.coords else range(heat.sizes[dim])
    return [str(label) for label in labels]


def _layers(heat: xr.DataArray, dim: Any) -> list[int | None]:
    """Return the layer of each row; None for modules outside of all layers, which are recorded as -1."""
    if "layer" not in heat.coords or heat["layer"].dims != (dim,):
        return list(range(heat.sizes[dim])) if dim == "layer" else [None] * heat.sizes[dim]
    return [int(layer) if layer >= 0 else None for layer in heat["layer"].values]
