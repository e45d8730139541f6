"""Record how well a ladder of narrow or shallow models predicts the explosion edge of a larger one.

    python data/make_scaling.py                          # everything, into data/scaling.nc
    python data/make_scaling.py --folder try --only Mamba

For each architecture, a ladder up to a quarter of the target's width (or depth) and the target itself are measured with
the same runs, by `scaling_study`. The settings below were chosen on ladders of
Pre-LN, No-Norm and Llama-style models with seeds 91 and 92, which are not used here. An interrupted recording is
resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from coordinate_checks import coordinate_check
from ladder_trend import ATTRS, EDGE, FLOW, SPECTRAL, extrapolated, rule_of
from size_ladder import ExplosionEdge, LadderTrainer, Rung, rungs_of
from threadpoolctl import threadpool_limits

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.scaling.designs import design

SEEDS = (1, 2, 3)
WIDTHS, TARGET_WIDTH = (16, 32, 64), 256
DEPTHS, TARGET_DEPTH, DEEP_WIDTH = (2, 3, 4), 16, 32
N_STEPS, CHECK_RATE, N_CHECK_STEPS, N_SNAPSHOTS = 100, 3e-3, 10, 1024
#: Largest factor of extrapolation, and level of the intervals.
REACH, LEVEL = 4.0, 0.95
OPTIMIZER_OPTIONS = {"fused": True}
VOCABULARY, LENGTH, BATCH_SIZE = 64, 16, 8
TEXT = {"vocab_size": VOCABULARY, "max_length": LENGTH}
#: Smallest number of values of a variable that is compressed.
_LARGE = 1000
#: Heads have the width of the narrowest model, so that wider models have more heads.
HEADS = {"n_heads": TARGET_WIDTH // WIDTHS[0]}
MOE = {"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 2}
LLAMA = {"norm": "rms_norm", "position": "rotary", "mlp": "swiglu", "has_bias": False}

#: Name -> options of the target model, and its parametrization.
STUDIES: dict[str, tuple[dict[str, Any], Any]] = {
    "Pre-LN": ({"norm": "pre_ln", "n_layers": 4, **HEADS}, None),
    "No-Norm": ({"norm": "none", "n_layers": 4, **HEADS}, None),
    "Post-LN": ({"norm": "post_ln", "n_layers": 4, **HEADS}, None),
    "Mamba": ({"family": "mamba", "n_layers": 2}, None),
    "MoE top-2": ({**MOE, "n_layers": 2, **HEADS}, None),
    "Llama-style": ({**LLAMA, "n_layers": 2, **HEADS}, None),
    "KAN": ({"family": "kan", "norm": "pre_ln", "n_layers": 2, **HEADS}, None),
    "Pre-LN in muP": (
        {"norm": "pre_ln", "n_layers": 4, **HEADS},
        wb.baselines.MuP(base_width=WIDTHS[0], base_heads=1),
    ),
    "No-Norm, deeper": ({"norm": "none", "n_layers": TARGET_DEPTH, "d_model": DEEP_WIDTH, "n_heads": 2}, None),
    "Post-LN, deeper": ({"norm": "post_ln", "n_layers": TARGET_DEPTH, "d_model": DEEP_WIDTH, "n_heads": 2}, None),
}


def task(seed: int) -> wb.tasks.Task:
    """Return the task of all models."""
    return wb.tasks.associative_recall(
        length=LENGTH, vocab_size=VOCABULARY, n_pairs=3, batch_size=BATCH_SIZE, seed=seed
    )


def study(
    name: str,
    *,
    widths: Sequence[int] = WIDTHS,
    seeds: Sequence[int] = SEEDS,
    n_check_steps: int = N_CHECK_STEPS,
    measures_target: bool = True,
) -> xr.Dataset:
    """Run the study of one architecture in one thread; other arguments repeat a part of it."""
    model, parametrization = STUDIES[name]
    of = design({"d_model": TARGET_WIDTH, **TEXT, **model}, name=name)
    is_deep = of.width == DEEP_WIDTH
    rungs = rungs_of((DEEP_WIDTH,), DEPTHS) if is_deep else rungs_of(widths, (of.depth,))
    trainer = LadderTrainer(of, task, OPTIMIZER_OPTIONS, parametrization)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            return scaling_study(trainer, rungs, seeds, 0 if is_deep else n_check_steps, measures_target)
    finally:
        torch.set_num_threads(n_threads)


def scaling_study(
    trainer: LadderTrainer, rungs: Sequence[Rung], seeds: Sequence[int], n_check_steps: int, measures_target: bool
) -> xr.Dataset:
    """Measure an architecture at several sizes, and extrapolate to the target size.

    Measured on each rung, with each seed, are the Koopman spectra and the information flow of the untrained model, the
    learning rate at which short runs begin to diverge and, over the widths, the coordinate check. A line through the
    logarithms is extrapolated to the target; if the ladder does not support this, a reason is returned.

    Args:
        trainer: Builder and trainer of the models.
        rungs: Sizes of the ladder, from `rungs_of`.
        seeds: Seeds of parameters, training and data.
        n_check_steps: Updates of the coordinate check; 0 omits the check.
        measures_target: Also measure the target itself, to compare it with the extrapolation. The trend does not use
            it.

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
    """
    start_time = time.monotonic()
    of, target = trainer.design, Rung(trainer.design.width, trainer.design.depth)
    sizes = [*rungs, *([target] if measures_target else [])]
    rows, edges = [], []
    start: float | None = None
    for rung in sizes:
        rows.append([untrained(trainer, rung, seed) for seed in seeds])
        edges.append([])
        for seed in seeds:  # Each search starts at the result of the previous one.
            edge = trainer.explosion_edge(rung, seed, n_steps=N_STEPS, start=start)
            start = edge.middle if 0 < edge.middle < math.inf else None
            edges[-1].append(edge)
    names = [EDGE, *(name for name in rows[0][0] if any(math.isfinite(one[name]) for row in rows for one in row))]
    measured = np.array([
        [[edge.middle for edge in of_size] if name == EDGE else [one[name] for one in row]
         for row, of_size in zip(rows, edges, strict=True)]
        for name in names
    ])  # fmt: skip
    found = assembled(trainer, rungs, seeds, names, measured[:, : len(rungs)], edges)
    if measures_target:
        found["measured_at_target"] = ("quantity", [mean(*row) for row in zip(names, measured[:, -1], strict=True)])
        found["measured_at_target_of_seed"] = (("quantity", "seed"), measured[:, -1])
        found["measured_edge_low"] = ((), min(edge.low for edge in edges[-1]))
        found["measured_edge_high"] = ((), max(edge.high for edge in edges[-1]))
    found = found.merge(extrapolated(found, (target.width, target.depth), largest_reach=REACH, level=LEVEL))
    if n_check_steps:
        of_one_depth = [rung for rung in rungs if rung.depth == rungs[0].depth]
        check = coordinate_check(trainer, of_one_depth, seeds, learning_rate=CHECK_RATE, n_steps=n_check_steps)
        for name, variable in check.data_vars.items():
            if "rung" in variable.dims:
                variable = variable.pad(rung=(0, len(rungs) - len(of_one_depth)), constant_values=np.nan)
            found[name] = (variable.dims, variable.values, variable.attrs)
        found = found.assign_coords({name: check[name] for name in ("step", "layer_group")})
    for name, attrs in ATTRS.items():
        if name in found:
            found[name].attrs.update(attrs)
    found.attrs = {
        "kind": "scaling",
        "subject": of.name,
        "design": json.dumps(of.describe(), default=str),
        "target_width": target.width,
        "target_depth": target.depth,
        "edge": "trained",
        "n_steps": N_STEPS,
        "learning_rate": CHECK_RATE,
        "n_coordinate_steps": n_check_steps,
        "training": json.dumps({"optimizer_options": trainer.optimizer_options}),
        "parametrization": "" if trainer.parametrization is None else repr(trainer.parametrization),
        "task": json.dumps(trainer.task(seeds[0]).describe(), default=str),
        "largest_reach": REACH,
        "level": LEVEL,
        "seeds": json.dumps(seeds),
        "versions": versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration": round(time.monotonic() - start_time, 2),
    }
    return found


def untrained(trainer: LadderTrainer, rung: Rung, seed: int) -> dict[str, float]:
    """Measure the spectra and the flow of an untrained model, by quantity."""
    model, data = trainer.model(rung, seed), trainer.task(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # only means over layers are used
        spectra = wb.profile(model, data.probe(N_SNAPSHOTS), n_snapshots=N_SNAPSHOTS, n_workers=1, progress=False)
    inputs, targets = next(data.stream(0))
    flow = wb.flow.summarize(wb.flow.measure(model, inputs, targets=targets, jacobian=False))
    found = {name: float(spectra[name].astype(float).mean()) for name in SPECTRAL}
    return found | {name: float(flow[name]) for name in FLOW if name in flow}


def assembled(
    trainer: LadderTrainer,
    rungs: Sequence[Rung],
    seeds: Sequence[int],
    names: Sequence[str],
    measured: np.ndarray,
    edges: list[list[ExplosionEdge]],
) -> xr.Dataset:
    """Combine the measurements of the rungs into one dataset."""
    edges = edges[: len(rungs)]
    data: dict[str, Any] = {"measured": (("quantity", "rung", "seed"), measured)}
    for name, of_name in zip(names, measured, strict=True):
        data[name] = ("rung", [mean(name, row) for row in of_name])
    data["edge_low"] = ("rung", [min(edge.low for edge in row) for row in edges])
    data["edge_high"] = ("rung", [max(edge.high for edge in row) for row in edges])
    for end in ("low", "high"):
        data[f"edge_{end}_of_seed"] = (("rung", "seed"), [[getattr(edge, end) for edge in row] for row in edges])
    data["n_runs"] = ("rung", [sum(edge.n_runs for edge in row) for row in edges])
    coords = {
        "width": ("rung", [rung.width for rung in rungs]),
        "depth": ("rung", [rung.depth for rung in rungs]),
        "n_weights": ("rung", [trainer.design.n_weights(rung.width, rung.depth) for rung in rungs]),
        "seed": ("seed", list(seeds)),
        "quantity": ("quantity", list(names)),
    }
    return xr.Dataset(data, coords=coords)


def mean(name: str, values: np.ndarray) -> float:
    """Return the mean over seeds; the geometric mean of a quantity with a logarithmic trend."""
    if rule_of(name)[0] == "linear" or not (np.isfinite(values) & (values > 0)).all():
        return float(np.mean(values))
    return float(np.exp(np.log(values).mean()))


def make(folder: Path, names: list[str]) -> dict[str, xr.Dataset]:
    """Run the studies and write each to a separate file."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        file = folder / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.nc"
        if not file.exists():
            begun = time.process_time()
            result = study(name)
            result.attrs["core_seconds"] = round(time.process_time() - begun, 1)
            with replacing(file) as partial_file:
                result.to_netcdf(partial_file, engine="netcdf4")
        found[name] = xr.load_dataset(file, engine="netcdf4")
    return found


def collect(studies: Mapping[str, xr.Dataset], file: Path, minutes: float) -> None:
    """Write all studies to one file, with its origin."""
    first = next(iter(studies.values()))
    per_study = ("design", "parametrization", "target_width", "target_depth", "n_coordinate_steps", "core_seconds")
    names = _in_order(list(studies.values()), "quantity")
    parts = [
        with_trend(with_every(data, names)).assign({name: data.attrs[name] for name in per_study})
        for data in studies.values()
    ]
    join = partial(xr.concat, dim="architecture", join="outer", data_vars="all", coords="all", compat="override")
    together = join(parts, combine_attrs="override").assign_coords(architecture=list(studies))
    together = together.sel(quantity=names, layer_group=_in_order(parts, "layer_group"))
    kept = (
        "kind",
        "edge",
        "n_steps",
        "learning_rate",
        "training",
        "task",
        "largest_reach",
        "level",
        "seeds",
        "versions",
    )
    together.attrs = {
        "call": "python data/make_scaling.py",
        **{name: first.attrs[name] for name in kept},
        "core_minutes": round(float(together["core_seconds"].sum()) / 60, 1),
        "minutes": round(minutes, 1),
        "created": first.attrs["created"],
    }
    is_large = {name: v.dtype.kind == "f" and v.size > _LARGE for name, v in together.variables.items()}
    packed = {name: {"zlib": True, "complevel": 9, "shuffle": True} for name, large in is_large.items() if large}
    with replacing(file) as partial_file:
        together.drop_encoding().to_netcdf(partial_file, engine="netcdf4", encoding=packed)


def with_every(data: xr.Dataset, names: list[str]) -> xr.Dataset:
    """Return a study with all quantities, NaN where it lacks one, and a state of a missing coordinate check."""
    data = data.drop_vars(["reason", "scale", "is_supported"]).reindex(quantity=names)
    if "coordinate_state" not in data:
        unknown = {"coordinate_state": "not measured", "coordinate_reason": "", "passes_coordinate_check": False}
        data = data.assign(unknown)
    return data


def with_trend(data: xr.Dataset) -> xr.Dataset:
    """Return a study with refitted trends, so that a change of the fit needs no new runs."""
    target = int(data.attrs["target_width"]), int(data.attrs["target_depth"])
    trend = extrapolated(
        data, target, largest_reach=float(data.attrs["largest_reach"]), level=float(data.attrs["level"])
    )
    kept = data.drop_vars([name for name in trend.data_vars if name in data])
    return kept.drop_dims("curve_point", errors="ignore").merge(trend, join="exact")


def _in_order(parts: list[xr.Dataset], dim: str) -> list[str]:
    """Return all names along a dimension, in the order of the parts."""
    return list(dict.fromkeys(name for part in parts if dim in part.coords for name in part[dim].values.tolist()))


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "parts" / "scaling", help="folder of the temporary parts")
    parser.add_argument("--out", type=Path, default=here / "scaling.nc")
    parser.add_argument("--only", choices=list(STUDIES))
    args = parser.parse_args()
    start = time.monotonic()
    studies = make(args.folder, [args.only] if args.only else list(STUDIES))
    if args.only is None:
        collect(studies, args.out, (time.monotonic() - start) / 60)


if __name__ == "__main__":
    main()
