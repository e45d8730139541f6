"""Record how well a ladder of narrow or shallow models predicts the explosion edge of a larger one.

    python data/make_scaling.py                          # everything, into data/scaling.nc
    python data/make_scaling.py --folder try --only Mamba

For each architecture, a ladder up to a quarter of the target's width (or depth) and the target itself are measured with
the same runs, by `workbench.scaling_study` with ``measures_target=True``. The settings below were chosen on ladders of
Pre-LN, No-Norm and Llama-style models with seeds 91 and 92, which are not used here. An interrupted recording is
resumed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from threadpoolctl import threadpool_limits

import workbench as wb
from workbench.io.atomic import replacing
from workbench.scaling import extrapolated
from workbench.scaling.designs import design
from workbench.scaling.ladder_study import scaling_study

SEEDS = (1, 2, 3)
WIDTHS, TARGET_WIDTH = (16, 32, 64), 256
DEPTHS, TARGET_DEPTH, DEEP_WIDTH = (2, 3, 4), 16, 32
N_STEPS, CHECK_RATE = 100, 3e-3
VOCABULARY, LENGTH, BATCH_SIZE = 64, 16, 8
TEXT = {"vocab_size": VOCABULARY, "max_length": LENGTH}
#: Smallest number of values of a variable that is compressed.
_LARGE = 1000
#: Heads have the width of the narrowest model, so that wider models have more heads.
HEADS = {"n_heads": TARGET_WIDTH // WIDTHS[0]}
MOE = {"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 2}
LLAMA = {"norm": "rms_norm", "position": "rotary", "mlp": "swiglu", "has_bias": False}

#: Name -> options of the target model, and options of the study that differ from those of the others.
STUDIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Pre-LN": ({"norm": "pre_ln", "n_layers": 4, **HEADS}, {}),
    "No-Norm": ({"norm": "none", "n_layers": 4, **HEADS}, {}),
    "Post-LN": ({"norm": "post_ln", "n_layers": 4, **HEADS}, {}),
    "Mamba": ({"family": "mamba", "n_layers": 2}, {}),
    "MoE top-2": ({**MOE, "n_layers": 2, **HEADS}, {}),
    "Llama-style": ({**LLAMA, "n_layers": 2, **HEADS}, {}),
    "KAN": ({"family": "kan", "norm": "pre_ln", "n_layers": 2, **HEADS}, {}),
    "Pre-LN in muP": (
        {"norm": "pre_ln", "n_layers": 4, **HEADS},
        {"parametrization": wb.baselines.MuP(base_width=WIDTHS[0], base_heads=1)},
    ),
    "No-Norm, deeper": ({"norm": "none", "n_layers": TARGET_DEPTH, "d_model": DEEP_WIDTH, "n_heads": 2}, {}),
    "Post-LN, deeper": ({"norm": "post_ln", "n_layers": TARGET_DEPTH, "d_model": DEEP_WIDTH, "n_heads": 2}, {}),
}


def task(seed: int) -> wb.tasks.Task:
    """Return the task of all models."""
    return wb.tasks.associative_recall(
        length=LENGTH, vocab_size=VOCABULARY, n_pairs=3, batch_size=BATCH_SIZE, seed=seed
    )


def study(name: str, **changes: Any) -> xr.Dataset:
    """Run the study of one architecture in one thread.

    Args:
        name: Name in ``STUDIES``.
        **changes: Arguments of `scaling_study` that differ from the recorded ones.
    """
    model, options = STUDIES[name]
    of = design({"d_model": TARGET_WIDTH, **TEXT, **model}, name=name)
    is_deep = of.width == DEEP_WIDTH
    arguments = {
        "widths": (DEEP_WIDTH,) if is_deep else WIDTHS,
        "depths": DEPTHS if is_deep else None,
        "task": task,
        "seeds": SEEDS,
        "n_steps": N_STEPS,
        "learning_rate": CHECK_RATE,
        "n_coordinate_steps": 0 if is_deep else 10,
        "measures_target": True,
        "progress": False,
        "optimizer_options": {"fused": True},
        **options,
        **changes,
    }
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            return scaling_study(of, **arguments)
    finally:
        torch.set_num_threads(n_threads)


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
