"""Calibrate alarms on the user's own healthy runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.callbacks.alarms.alarms import Pair, watched_values
from workbench.callbacks.alarms.calibration import KINDS, Calibration
from workbench.callbacks.alarms.detector import Detector
from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.callbacks.alarms.replaying import observations
from workbench.callbacks.alarms.settling import Settling
from workbench.callbacks.alarms.watched import WATCHED

if TYPE_CHECKING:
    import xarray as xr

_GROUPS = {watched.name: "outcome" if watched.is_outcome else "mechanism" for watched in WATCHED}


def calibrate(
    runs: Iterable[xr.DataTree],
    *,
    options: DetectorOptions | None = None,
    about: str = "",
) -> Calibration:
    """Measure the ranges of healthy runs, for ``workbench.Alarms(calibration=)``.

    Args:
        runs: Healthy runs of the kind to be watched: same recorder, similar models and lengths; twenty for a budget of
            5 %.
        options: Options of the detectors.
        about: Origin of the runs, for readers.

    Raises:
        OptionError: If there are fewer than five runs.
        SchemaError: If a run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> def healthy(seed):
        ...     loss = np.random.default_rng(seed).normal(3.0, 0.1, size=400)
        ...     monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(400)})
        ...     return xr.DataTree.from_dict({"/monitors": monitors})
        >>> calibration = wb.alarms.calibrate([healthy(seed) for seed in range(5)])
        >>> alarms = wb.Alarms(calibration=calibration)
    """
    options = options or DetectorOptions()
    return Calibration.of([departures(run, options) for run in runs], options, groups=_GROUPS, about=about)


def calibrate_paired(
    pairs: Sequence[tuple[xr.DataTree, xr.DataTree]], *, options: DetectorOptions | None = None, about: str = ""
) -> Calibration:
    """Measure how far two healthy runs of one model differ, for `workbench.Alarms` with ``paired=``.

    Args:
        pairs: Pairs of healthy runs of the same kind: the one to watch, the one to compare it with.
        options: Options of the detectors.
        about: Origin of the runs, for readers.

    Raises:
        OptionError: If there are fewer than five pairs.
        SchemaError: If a run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> def healthy(seed):
        ...     loss = np.random.default_rng(seed).normal(3.0, 0.1, size=400)
        ...     monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(400)})
        ...     return xr.DataTree.from_dict({"/monitors": monitors})
        >>> calibration = wb.alarms.calibrate_paired([(healthy(seed), healthy(seed + 5)) for seed in range(5)])
        >>> alarms = wb.Alarms(calibration=calibration, paired=healthy(10))
    """
    options = options or DetectorOptions()
    found = [departures(run, options, pair=pair) for run, pair in pairs]
    return Calibration.of(found, options, groups=_GROUPS, about=about)


def departures(
    run: xr.DataTree, options: DetectorOptions, *, pair: xr.DataTree | None = None
) -> dict[str, dict[str, float]]:
    """The largest departure of each signal over all steps, layers and heads of a run.

    Args:
        run: Run with monitors.
        options: Options of the detectors.
        pair: Another run to compare with, step by step.

    Returns:
        Signal name and kind -> departure on the scale of `Watched.badness`.

    Raises:
        SchemaError: If a run has no monitors.
    """
    detectors: dict[str, Detector] = {}
    settling = Settling(options)
    compared_with = None if pair is None else Pair(pair)
    largest: dict[str, dict[str, float]] = {}
    for observation in observations(run):
        if observation.part == "monitors":
            settling.update(observation.step, observation.values)
        for watched, values, _ in watched_values(observation.part, observation.values, observation.coords):
            if watched.name not in detectors:
                detectors[watched.name] = Detector(
                    options, part=watched.part, has_pair=pair is not None, settling=settling
                )
            compared = watched.badness(values)
            if compared_with is not None:
                compared = compared - compared_with.badness(watched, observation.step, compared.shape)
            departure = detectors[watched.name].update(observation.step, compared)
            if departure is None:
                continue
            found = largest.setdefault(watched.name, {})
            for kind in KINDS:
                departed = getattr(departure, kind)
                if np.isfinite(departed).any():
                    found[kind] = max(found.get(kind, -np.inf), float(np.nanmax(departed)))
    return largest
