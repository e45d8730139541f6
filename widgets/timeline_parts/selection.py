"""A step that was chosen on the timeline, with the layers, heads and modes of each run at it."""

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
        run: Its name.
        heat: The signal with its layers and heads, shape (row, column); None: there is none.
        rows: Labels of its rows.
        columns: Labels of its columns; one empty label where there are only rows.
        row_layers: Layer of each row; None: none, as of an embedding.
        step: Step of the heat map.
        modes: The nearest recorded ones; None: no spectra.
        mode_layers: Numbers of the layers that the modes count.
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
    """A step that was chosen, by an alarm or by hand.

    Attributes:
        step: The step.
        signal: Signal of the heat maps; empty: no signal has layers.
        run: Whose alarm it is; empty: none's.
        event: The alarm; None: a step chosen by hand.
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
        """Read the details of each run at its recorded step nearest to this one."""
        details, dims = [], ("", "")
        for each in runs:
            detail, found = _detail(each, step, signal)
            details.append(detail)
            dims = found or dims
        return cls(step, signal, run, event, dims, details)


def _detail(run: FollowedRun, step: int, signal: str) -> tuple[Detail, tuple[str, str] | None]:
    """The details of a run at a step, and the names of its map's rows and columns."""
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
    """The layer of each row; modules outside of all layers have none, which their records note as -1."""
    if "layer" not in heat.coords or heat["layer"].dims != (dim,):
        return list(range(heat.sizes[dim])) if dim == "layer" else [None] * heat.sizes[dim]
    return [int(layer) if layer >= 0 else None for layer in heat["layer"].values]
