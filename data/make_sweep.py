"""Record the sweep of the risk model: the learning rates at which architectures diverge, and their initial spectra.

    python data/make_sweep.py                        # everything, into data/divergence_sweep.nc
    python data/make_sweep.py --folder try --only norms

There are four studies of short runs (120 steps), all run by `wb.sweeps.run`:

- ``norms``: the six normalizations of RKSP Table 1 at one init scale, at rates at which No-Norm diverges;
- ``scales``: the same at four other init scales;
- ``fit`` and ``held out``: cells (architecture, size, task, batch, optimizer and schedule) drawn at random, each with
  runs on a coarse ladder of rates and then on a fine one around the rate at which it diverges. Sizes, init scales and
  seeds of ``held out`` do not occur in ``fit``.

An interrupted recording is resumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import workbench as wb
from workbench.io.atomic import replacing
from workbench.schema.sweeps import SETTINGS

N_STEPS = 120
VOCABULARY, LENGTH = 64, 16
TEXT = {"vocab_size": VOCABULARY, "max_length": LENGTH}
RECALL = {"name": "associative_recall", "length": LENGTH, "vocab_size": VOCABULARY, "n_pairs": 3}

#: RKSP Table 1.
NORMS: dict[str, dict[str, Any]] = {
    "Pre-LN": {"norm": "pre_ln"},
    "Post-LN": {"norm": "post_ln"},
    "RMSNorm": {"norm": "rms_norm"},
    "DeepNorm": {"norm": "deep_norm"},
    "SubLN": {"norm": "sub_ln"},
    "No-Norm": {"norm": "none"},
}
NORM_SIZE = {"d_model": 64, "n_layers": 4, "n_heads": 4, **TEXT}
NORM_RATES = (0.015, 0.02, 0.03)
NORM_SEEDS = tuple(range(11, 21))
SCALES, SCALE_SEEDS = (0.005, 0.05, 0.1, 0.2), (21, 22)

#: Architecture -> options, and numbers of cells for the fit and held out.
ARCHITECTURES: dict[str, tuple[dict[str, Any], int, int]] = {
    "Pre-LN": ({"norm": "pre_ln"}, 4, 2),
    "Post-LN": ({"norm": "post_ln"}, 4, 2),
    "RMSNorm": ({"norm": "rms_norm"}, 3, 1),
    "DeepNorm": ({"norm": "deep_norm"}, 3, 1),
    "DeepNorm, DeepNet's": ({"norm": "deep_norm_post"}, 3, 1),
    "SubLN": ({"norm": "sub_ln"}, 3, 1),
    "No-Norm": ({"norm": "none"}, 8, 3),
    "Fixup": ({"norm": "none", "initialization": "fixup"}, 4, 2),
    "ReZero": ({"norm": "none", "initialization": "rezero"}, 4, 2),
    "Parallel": ({"norm": "pre_ln", "is_parallel": True}, 3, 1),
    "QK-norm": ({"norm": "pre_ln", "qk_norm": True}, 3, 1),
    "Llama-style": ({"norm": "rms_norm", "position": "rotary", "mlp": "swiglu", "has_bias": False}, 3, 1),
    "MoE top-1": ({"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 1}, 3, 1),
    "MoE top-2": ({"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 2}, 3, 1),
    "KAN": ({"family": "kan", "norm": "pre_ln"}, 2, 1),
    "Mamba": ({"family": "mamba"}, 2, 1),
    "ViT": ({"family": "vit", "norm": "pre_ln"}, 3, 1),
}
#: Values from which cells are drawn: widths, depths and init scales by study, all others for both studies.
SIZES = {
    "fit": {"d_model": (24, 48, 96), "n_layers": (2, 4, 6), "init_std": (0.02, 0.05, 0.1)},
    "held out": {"d_model": (32, 64), "n_layers": (3, 5), "init_std": (0.03, 0.07)},
}
TASKS = (
    RECALL,
    {"name": "random_tokens", "length": LENGTH, "vocab_size": VOCABULARY},
    {"name": "synthetic_lm", "length": LENGTH, "vocab_size": VOCABULARY},
    {"name": "text_bytes", "length": LENGTH},
)
BATCHES, WARMUPS, SCHEDULES = (4, 16, 32), (0, 10, 30), ("constant", "cosine", "linear")
#: Name, options, and the first and last rate of the coarse ladder; half of the cells use AdamW.
OPTIMIZERS: tuple[tuple[str, dict[str, Any], tuple[float, float]], ...] = (
    ("AdamW", {"fused": True}, (5e-4, 4.0)),
    ("AdamW", {"fused": True, "betas": [0.9, 0.95], "weight_decay": 0.1}, (5e-4, 4.0)),
    ("RMSprop", {}, (1e-4, 1.0)),
    ("SGD", {"fused": True, "momentum": 0.9}, (3e-3, 300.0)),
)
N_COARSE = 9
#: Multiples of the rate halfway between the last coarse rate that converged and the first that diverged.
FINE = (0.5, 0.7, 1.0, 1.4, 2.0)
#: Seeds: one on the coarse ladder, three on the fine one.
SEEDS = {"fit": (1, (2, 3, 4)), "held out": (101, (102, 103, 104))}


def norm_runs(study: str) -> list[wb.sweeps.RunSettings]:
    """Return the runs of the normalizations at one init scale, or at others."""
    scales, seeds = ((0.02,), NORM_SEEDS) if study == "norms" else (SCALES, SCALE_SEEDS)
    return wb.sweeps.grid(
        NORMS,
        learning_rate=NORM_RATES,
        n_steps=N_STEPS,
        task={**RECALL, "batch_size": 16},
        seed=seeds,
        study=study,
        warmup=20,
        init_std=scales,
        optimizer_options={"fused": True},
        **NORM_SIZE,
    )


def cells(study: str) -> list[dict[str, Any]]:
    """Return cells drawn at random: all settings of a run except rate and seed, and the ladder of rates."""
    generator = np.random.default_rng(6 if study == "fit" else 7)
    return [
        _cell(name, options, SIZES[study], generator)
        for name, (options, *counts) in ARCHITECTURES.items()
        for _ in range(counts[study == "held out"])
    ]


def _cell(
    name: str, options: dict[str, Any], sizes: dict[str, tuple], generator: np.random.Generator
) -> dict[str, Any]:
    def one(values: tuple) -> Any:
        return values[generator.integers(len(values))]

    model = {**options, **{key: one(values) for key, values in sizes.items()}}
    task = {**one(TASKS), "batch_size": one(BATCHES)}
    optimizer, optimizer_options, ends = OPTIMIZERS[generator.choice(4, p=(0.3, 0.25, 0.2, 0.25))]
    training = {
        "n_steps": N_STEPS,
        "warmup": one(WARMUPS),
        "schedule": one(SCHEDULES),
        "optimizer": optimizer,
        "optimizer_options": optimizer_options,
        "clip_norm": one((None, None, 1.0)),
    }
    if options.get("family") == "vit":
        model |= {"image_size": 8, "patch_size": 2, "n_channels": 1, "n_classes": 10, "n_heads": 4}
        task = {"name": "digits", "batch_size": task["batch_size"]}
    else:
        model |= {"vocab_size": 256 if task["name"] == "text_bytes" else VOCABULARY, "max_length": LENGTH}
    if options.get("family") in ("mamba", "kan"):
        model["n_layers"] = min(model["n_layers"], 3)  # several times slower than the others
    if options.get("family") not in ("mamba", "vit"):
        model["n_heads"] = 4
    return {"architecture": name, "model": model, "task": task, "training": training, "ends": ends}


def ladder_runs(study: str, coarse: xr.Dataset | None = None) -> list[wb.sweeps.RunSettings]:
    """Return runs of all cells on the coarse ladder or, given its outcomes, on the fine one."""
    first, others = SEEDS[study]
    runs = []
    for i, cell in enumerate(cells(study)):
        rates, seeds = np.geomspace(*cell["ends"], N_COARSE), (first,)
        if coarse is not None:
            has_diverged = coarse["has_diverged"].values[i * N_COARSE : (i + 1) * N_COARSE]
            rates, seeds = np.array(FINE) * edge(rates, has_diverged), others
        common = {name: cell[name] for name in ("architecture", "model", "task")} | {"study": study}
        trainings = [{**cell["training"], "learning_rate": float(f"{rate:.4g}")} for rate in rates]
        runs.extend(
            wb.sweeps.RunSettings(**common, training=training, seed=seed) for training in trainings for seed in seeds
        )
    return runs


def edge(rates: np.ndarray, has_diverged: np.ndarray) -> float:
    """Return the midpoint of the first diverged rate and the one before; half a step beyond the ladder if none did."""
    half = np.sqrt(rates[1] / rates[0])
    first = int(np.argmax(has_diverged)) if has_diverged.any() else len(rates)
    return float(rates[first] / half) if first < len(rates) else float(rates[-1] * half)


def make(folder: Path, only: str | None, n_workers: int) -> list[xr.Dataset]:
    """Record all studies, each in separate stores."""
    found = [
        wb.sweeps.run(norm_runs(study), folder / f"{study}.zarr", n_workers=n_workers)
        for study in ("norms", "scales")
        if only in (None, study)
    ]
    for study in ("fit", "held out"):
        if only in (None, study):
            name = study.replace(" ", "_")
            coarse = wb.sweeps.run(ladder_runs(study), folder / f"{name}-coarse.zarr", n_workers=n_workers)
            fine = wb.sweeps.run(ladder_runs(study, coarse), folder / f"{name}-fine.zarr", n_workers=n_workers)
            found += [coarse, fine]
    return found


def collect(sweeps: list[xr.Dataset], file: Path, minutes: float) -> None:
    """Write all studies to one file, with its origin."""
    seeds = {"norms": NORM_SEEDS, "scales": SCALE_SEEDS, **SEEDS}
    about = {"call": "python data/make_sweep.py", "n_steps": N_STEPS, "seeds": json.dumps(seeds)}
    write(join(sweeps), file, about | {"minutes": round(minutes, 1)}, sweeps[0].attrs)


def join(sweeps: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join several sweeps into one, in the order given; missing layers and modes are NaN."""
    dims = dict.fromkeys(dim for part in sweeps for dim in part.dims if dim != "run")
    extents = {dim: max(part.sizes.get(dim, 0) for part in sweeps) for dim in dims}
    padded = [part.pad({d: (0, n - part.sizes[d]) for d, n in extents.items() if d in part.dims}) for part in sweeps]
    return xr.concat(padded, "run", combine_attrs="drop_conflicts").set_coords(list(SETTINGS))


def write(runs: xr.Dataset, file: Path, about: dict[str, Any], first: dict[str, Any]) -> None:
    """Write a sweep as a compressed netCDF file with a description and the versions of its first part."""
    if "eigenvalue" in runs:
        eigenvalue = runs["eigenvalue"]
        runs = runs.drop_vars("eigenvalue")
        for part in ("real", "imag"):  # netCDF has no complex numbers
            rounded = np.round(getattr(eigenvalue, part).values.astype(np.float32), 4)
            runs[f"eigenvalue_{part}"] = (eigenvalue.dims, rounded, eigenvalue.attrs)
    core_minutes = round(float(runs["seconds"].sum()) / 60, 1)
    runs.attrs = about | {name: first[name] for name in ("versions", "sweep_version")} | {"core_minutes": core_minutes}
    packed = {
        name: {"zlib": True, "complevel": 9, "shuffle": True}
        for name, variable in runs.variables.items()
        if variable.dtype.kind in "fib"
    }
    with replacing(file) as partial:
        runs.drop_encoding().to_netcdf(partial, engine="netcdf4", encoding=packed)


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "sweeps", help="folder of the temporary stores")
    parser.add_argument("--out", type=Path, default=here / "divergence_sweep.nc")
    parser.add_argument("--only", choices=("norms", "scales", "fit", "held out"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    sweeps = make(args.folder, args.only, args.workers)
    if args.only is None:
        collect(sweeps, args.out, (time.monotonic() - start) / 60)


if __name__ == "__main__":
    main()
