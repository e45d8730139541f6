"""A scaling study: spectra, flow, coordinate check and explosion edge on the rungs of a ladder, and their trends."""

from __future__ import annotations

import datetime
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from workbench import flow
from workbench.errors import OptionError
from workbench.formatting import counted
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.profile import profile
from workbench.option_checks import Level, NonNegativeInt, PositiveFloat, PositiveInt, checked
from workbench.scaling.coordinate_checks import coordinate_check
from workbench.scaling.designs import Design, design
from workbench.scaling.explosion_edges import ExplosionEdge, explosion_edge, pilot_edge
from workbench.scaling.outlook import extrapolated
from workbench.scaling.quantities import ATTRS, EDGE, FLOW, SPECTRAL, rule_of
from workbench.scaling.size_ladder import LadderTrainer, Parametrization, Rung, require_seeds, rungs_of
from workbench.training.training_plan import NO_OPTIONS, departures

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from torch import nn

EDGES = ("trained", "pilot", "none")


@checked
def scaling_study(
    make_model: Any,
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    *,
    task: Any,
    learning_rate: PositiveFloat = 1e-3,
    n_steps: PositiveInt = 100,
    seeds: Sequence[int] = (0, 1, 2),
    target_width: PositiveInt | None = None,
    target_depth: PositiveInt | None = None,
    edge: Literal["trained", "pilot", "none"] = "trained",
    n_coordinate_steps: NonNegativeInt = 10,
    parametrization: Parametrization | None = None,
    vocabulary: PositiveInt | None = None,
    measures_target: bool = False,
    n_snapshots: PositiveInt = 1024,
    largest_reach: PositiveFloat = 4.0,
    level: Level = 0.95,
    progress: bool | Callable[[str], None] = True,
    warmup: NonNegativeInt = 0,
    schedule: str | Callable[[int], float] = "constant",
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "AdamW",
    optimizer_options: Mapping[str, Any] = NO_OPTIONS,
    clip_norm: PositiveFloat | None = None,
    precision: str = "float32",
    loss_limit: float = 50.0,
    grad_norm_limit: float = 500.0,
    stops_at_divergence: bool = True,
) -> xr.Dataset:
    """Measure an architecture at several sizes, and extrapolate to the target size.

    The rungs of the ladder are every width at the smallest depth, and every other depth at the largest width. Measured
    on each rung, with each seed, are the Koopman spectra and the information flow of the untrained model, the learning
    rate at which short runs begin to diverge and, over the widths, the coordinate check. A line through the logarithms
    is extrapolated to the target; if the ladder does not support this, a reason is returned.

    Args:
        make_model: A `Design`, or a source as in `workbench.design`: a known name, a configuration, or a function of
            width, depth and seed.
        widths: Widths of the ladder.
        depths: Depths of the ladder; None uses only the target depth.
        task: The task of training (`workbench.tasks.as_task`), or a function that returns it for a seed. The vocabulary
            of the models is reduced to that of the task.
        learning_rate: Learning rate of the coordinate check. With a parametrization, the rate at its base width.
        n_steps: Updates of the runs that find the explosion edge.
        seeds: Seeds of parameters, training and, if ``task`` is a function, data.
        target_width: Target width; None uses that of the design, or of a function the largest width of the ladder.
        target_depth: Target depth; None as for the width.
        edge: Method for the explosion edge: ``"trained"`` uses runs of ``n_steps``, ``"pilot"`` ten updates at a
            constant rate, which is fast and usually too high; ``"none"`` omits it.
        n_coordinate_steps: Updates of the coordinate check; 0 omits the check.
        parametrization: A parametrization such as ``wb.baselines.MuP(base_width=16)``, applied to every model before it
            is measured. It creates the optimizer, so the rates found are those at its base width.
        vocabulary: Size of the vocabulary of the models; None as described under ``task``.
        measures_target: Also measure the target itself, to compare it with the extrapolation. The trend does not use
            it.
        n_snapshots: Number of token states from which the spectra are computed.
        largest_reach: As in `extrapolated`; 4 is the largest factor tested by `data/make_scaling.py`.
        level: Level of the intervals.
        progress: Show the progress; or a function that receives each message and may stop the study by raising an
            exception.
        warmup: Warm-up of the short runs; this and the arguments below are those of `workbench.train`.
        schedule: Schedule of their learning rate.
        optimizer: Their optimizer.
        optimizer_options: Options of the optimizer.
        clip_norm: Limit at which the norm of their gradients is clipped; None disables clipping.
        precision: Precision of their arithmetic.
        loss_limit: A loss above it counts as divergence.
        grad_norm_limit: A gradient norm above it counts as divergence.
        stops_at_divergence: Whether runs end when they diverge.

    Returns:
        Dataset with dimensions ``rung`` (coordinates ``width``, ``depth``, ``n_weights``), ``seed`` and ``quantity``,
        NaN where not measured:

        - ``measured`` (quantity, rung, seed), and the mean over seeds of each quantity under its name (rung,);
        - ``explosion_edge``, the geometric mean over seeds, with ``edge_low``, the largest rate at which no seed
          diverges, and ``edge_high``, the smallest rate at which every seed diverges (0 if all rates tried diverge,
          infinite if none does);
        - the trend (quantity): ``slope`` against the width and ``depth_slope``, with ``_low`` and ``_high``;
          ``at_target`` with ``_low`` and ``_high``; ``is_supported`` and ``reason``; ``scale`` ("log" if slopes are
          exponents); and with ``measures_target`` ``measured_at_target``;
        - the coordinate check, with dimensions ``step`` and ``layer_group``; see `coordinate_check`.

    Raises:
        OptionError: If a setting is unknown or invalid, or a size cannot be built, before any run is trained.
        AnatomyError: If the residual stream cannot be read.

    Example:
        >>> import workbench as wb
        >>> options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 8}
        >>> task = wb.tasks.random_tokens(vocab_size=16, length=8)
        >>> measures = {"edge": "none", "n_coordinate_steps": 0, "n_snapshots": 64, "seeds": [0]}
        >>> study = wb.scaling_study(options, [8, 16], task=task, **measures)
        >>> study["width"].values, study["near_unit_mass"].dims
        (array([ 8, 16]), ('rung',))

    See Also:
        `workbench.scaling.extrapolated`: Extrapolates a study to another size.
        `workbench.plots.scaling_trend`: Draws the trends.
        `workbench.samples.scaling`: Loads recorded studies.
    """
    import xarray as xr

    start_time = time.monotonic()
    of = _design_of(make_model, widths, depths, target_width, target_depth)
    target = Rung(of.width, of.depth)
    rungs = rungs_of(of, list(widths), [target.depth] if depths is None else list(depths))
    seeds = require_seeds(seeds)
    training = departures(
        warmup=warmup,
        schedule=schedule,
        optimizer=optimizer,
        optimizer_options=dict(optimizer_options),
        clip_norm=clip_norm,
        precision=precision,
        loss_limit=loss_limit,
        grad_norm_limit=grad_norm_limit,
        stops_at_divergence=stops_at_divergence,
    )
    trainer = LadderTrainer(of, task, training, parametrization, vocabulary)
    sizes = [*rungs, *([target] if measures_target else [])]
    n_models = len(sizes) * len(seeds)
    # Typical duration, in units of that of spectra and flow of one model.
    edge_duration = {"trained": n_steps / 12, "pilot": 3.0, "none": 0.0}[edge]
    total = n_models * (1 + edge_duration + bool(n_coordinate_steps))
    with Progress(progress, f"measured {counted(len(sizes), 'size')}", total=total, unit="%") as bar:
        rows = [[_measured(trainer, rung, seed, n_snapshots, bar) for seed in seeds] for rung in sizes]
        edges = _edges(trainer, sizes, seeds, edge, n_steps, bar, edge_duration)
        coordinates = xr.Dataset()
        if n_coordinate_steps:
            bar.begin("coordinate check", n_models)
            coordinates = coordinate_check(
                trainer,
                [rung for rung in rungs if rung.depth == rungs[0].depth],
                seeds,
                learning_rate=learning_rate,
                n_steps=n_coordinate_steps,
                level=level,
            )
    names = [EDGE, *_measured_names(rows)] if edge != "none" else _measured_names(rows)
    measured = np.array([_values(name, rows, edges) for name in names]).reshape(len(names), len(sizes), len(seeds))
    study = _assembled(trainer, rungs, seeds, names, measured[:, : len(rungs)], edges[: len(rungs)])
    if measures_target:
        study = study.merge(_at_target(names, measured[:, -1], edges[-1]))
    study = study.merge(extrapolated(study, (target.width, target.depth), largest_reach=largest_reach, level=level))
    study = _with_coordinates(study, coordinates)
    for name, attrs in ATTRS.items():
        if name in study:
            study[name].attrs.update(attrs)
    study.attrs = {
        "kind": "scaling",
        "subject": of.name,
        "design": json.dumps(of.describe(), default=str),
        "target_width": target.width,
        "target_depth": target.depth,
        "edge": edge,
        "n_steps": n_steps,
        "learning_rate": learning_rate,
        "n_coordinate_steps": n_coordinate_steps,
        "training": json.dumps({k: getattr(v, "__qualname__", v) for k, v in training.items()}, default=str),
        "parametrization": "" if parametrization is None else repr(parametrization),
        "task": json.dumps(trainer.task_of(seeds[0]).describe(), default=str),
        "largest_reach": largest_reach,
        "level": level,
        "seeds": json.dumps(seeds),
        "versions": versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration": round(time.monotonic() - start_time, 2),
    }
    return study


def _design_of(
    make_model: Any, widths: Sequence[int], depths: Sequence[int] | None, width: int | None, depth: int | None
) -> Design:
    """Return the design of a study; the target size of a function is by default the largest of the ladder."""
    is_function = callable(make_model) and not hasattr(make_model, "parameters")
    if is_function and not isinstance(make_model, Design):
        width = max(widths, default=None) if width is None else width
        depth = max(depths, default=None) if depth is None and depths is not None else depth
        if depth is None:
            raise OptionError("A function has no target depth; pass depths= or target_depth=.")
    return design(make_model, width=width, depth=depth)


def _measured(trainer: LadderTrainer, rung: Rung, seed: int, n_snapshots: int, bar: Progress) -> dict[str, float]:
    """Measure the spectra and the flow of an untrained model, by quantity."""
    bar.begin(f"spectra and flow, width {rung.width}, depth {rung.depth}, seed {seed}", 1)
    model, task = trainer.model(rung, seed), trainer.task_of(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # only means over layers are used
        spectra = profile(model, task.probe(n_snapshots), n_snapshots=n_snapshots, n_workers=1, progress=False)
    found = {name: float(spectra[name].astype(float).mean()) for name in SPECTRAL}
    return found | _flow(model, task)


def _flow(model: Any, task: Any) -> dict[str, float]:
    """Measure the information flow of a model on the first batch of a task."""
    inputs, targets = next(task.stream(0))
    summary = flow.summarize(flow.measure(model, inputs, targets=targets, jacobian=False))
    return {name: float(summary[name]) for name in FLOW if name in summary}


def _edges(
    trainer: LadderTrainer,
    rungs: Sequence[Rung],
    seeds: Sequence[int],
    kind: str,
    n_steps: int,
    bar: Progress,
    duration: float,
) -> list[list[ExplosionEdge]]:
    """Find the explosion edge of each rung and seed; each search starts at the result of the previous one."""
    found: list[list[ExplosionEdge]] = []
    start: float | None = None
    for rung in rungs:
        row = []
        for seed in seeds if kind != "none" else ():
            bar.begin(f"explosion edge, width {rung.width}, depth {rung.depth}, seed {seed}", duration)
            if kind == "trained":
                edge = explosion_edge(trainer, rung, seed, n_steps=n_steps, start=start)
            else:
                edge = pilot_edge(trainer, rung, seed, start=1.0 if start is None else start)
            start = edge.middle if 0 < edge.middle < math.inf else None
            row.append(edge)
        found.append(row)
    return found


def _measured_names(rows: list[list[dict[str, float]]]) -> list[str]:
    """Return the names of the quantities that were measured on at least one model."""
    return [name for name in rows[0][0] if any(math.isfinite(found[name]) for row in rows for found in row)]


def _values(name: str, rows: list[list[dict[str, float]]], edges: list[list[ExplosionEdge]]) -> list[list[float]]:
    """Return the values of a quantity for every size and seed."""
    if name == EDGE:
        return [[edge.middle for edge in row] for row in edges]
    return [[found[name] for found in row] for row in rows]


def _assembled(
    trainer: LadderTrainer,
    rungs: Sequence[Rung],
    seeds: Sequence[int],
    names: Sequence[str],
    measured: np.ndarray,
    edges: list[list[ExplosionEdge]],
) -> xr.Dataset:
    """Combine the measurements of the rungs into one dataset."""
    import xarray as xr

    data: dict[str, Any] = {"measured": (("quantity", "rung", "seed"), measured)}
    for name, of_name in zip(names, measured, strict=True):
        data[name] = ("rung", [_mean(name, row) for row in of_name])
    if EDGE in names:
        data["edge_low"] = ("rung", [min(edge.low for edge in row) for row in edges])
        data["edge_high"] = ("rung", [max(edge.high for edge in row) for row in edges])
        for end in ("low", "high"):
            data[f"edge_{end}_of_seed"] = (("rung", "seed"), [[getattr(edge, end) for edge in row] for row in edges])
        data["n_runs"] = ("rung", [sum(edge.n_runs for edge in row) for row in edges])
    coords = {
        "width": ("rung", [rung.width for rung in rungs]),
        "depth": ("rung", [rung.depth for rung in rungs]),
        "n_weights": ("rung", [trainer.n_weights(rung) for rung in rungs]),
        "seed": ("seed", list(seeds)),
        "quantity": ("quantity", list(names)),
    }
    return xr.Dataset(data, coords=coords)


def _at_target(names: Sequence[str], measured: np.ndarray, edges: Sequence[ExplosionEdge]) -> xr.Dataset:
    """Return a dataset of the measurements at the target.

    Args:
        names: Names of the quantities.
        measured: Their values at the target, shape (quantity, seed).
        edges: Explosion edge of each seed; empty if it was not measured.
    """
    import xarray as xr

    data = {
        "measured_at_target": ("quantity", [_mean(name, row) for name, row in zip(names, measured, strict=True)]),
        "measured_at_target_of_seed": (("quantity", "seed"), measured),
    }
    if edges:
        data["measured_edge_low"] = ((), min(edge.low for edge in edges))
        data["measured_edge_high"] = ((), max(edge.high for edge in edges))
    return xr.Dataset(data)


def _mean(name: str, values: np.ndarray) -> float:
    """Return the mean over seeds; the geometric mean of a quantity with a logarithmic trend."""
    if rule_of(name)[0] == "linear" or not (np.isfinite(values) & (values > 0)).all():
        return float(np.mean(values))
    return float(np.exp(np.log(values).mean()))


def _with_coordinates(study: xr.Dataset, check: xr.Dataset) -> xr.Dataset:
    """Add the coordinate check to a study; rungs without a check are NaN."""
    n_more = study.sizes["rung"] - check.sizes.get("rung", 0)
    for name, variable in check.data_vars.items():
        if "rung" in variable.dims:
            variable = variable.pad(rung=(0, n_more), constant_values=np.nan)
        study[name] = (variable.dims, variable.values, variable.attrs)
    return study.assign_coords({name: check[name] for name in ("step", "layer_group") if name in check.coords})
