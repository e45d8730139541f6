"""Record the runs that ship in data/runs: every architecture at a converging and at a diverging learning rate.

    python data/make_runs.py                                # everything, into data/runs; resumable
    python data/make_runs.py --only divergence --out try    # one part, into another folder

There are three parts: `initialization` (spectra at initialization for the sizes of the paper's tables, three seeds),
`divergence` (divergence by normalization and learning rate) and `runs` (spectra, loss and gradients during training).
Each job has one thread, and two jobs run at a time, so a re-run with the same machine, Python and torch yields the same
numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

SEEDS = (42, 123, 456)
#: Architecture -> options besides size and seed. Names are those of the published tables if available.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Pre-LN": {"norm": "pre_ln"},
    "Post-LN": {"norm": "post_ln"},
    "RMSNorm": {"norm": "rms_norm"},
    "DeepNorm": {"norm": "deep_norm"},
    "DeepNorm, DeepNet's": {"norm": "deep_norm_post"},
    "SubLN": {"norm": "sub_ln"},
    "No-Norm": {"norm": "none"},
    "Fixup": {"norm": "none", "initialization": "fixup"},
    "ReZero": {"norm": "none", "initialization": "rezero"},
    "Parallel": {"norm": "pre_ln", "is_parallel": True},
    "MoE top-1": {"family": "moe", "norm": "pre_ln", "n_experts": 8, "top_k": 1},
    "MoE top-2": {"family": "moe", "norm": "pre_ln", "n_experts": 8, "top_k": 2},
    "MoE top-4": {"family": "moe", "norm": "pre_ln", "n_experts": 8, "top_k": 4},
    "Mamba": {"family": "mamba"},
    "KAN B=4": {"family": "kan", "norm": "pre_ln", "n_grid": 4},
    "KAN B=8": {"family": "kan", "norm": "pre_ln", "n_grid": 8},
    "MoE top-1, normalized": {"family": "moe", "norm": "pre_ln", "n_experts": 8, "top_k": 1, "normalizes_top_k": True},
    "KAN B=4, small": {"family": "kan", "norm": "pre_ln", "n_grid": 4, "spline_std": 0.02},
    "KAN B=8, small": {"family": "kan", "norm": "pre_ln", "n_grid": 8, "spline_std": 0.02},
    "ViT Pre-LN": {"family": "vit", "norm": "pre_ln"},
    "ViT RMSNorm": {"family": "vit", "norm": "rms_norm"},
}
#: Variants that differ in the initial spectra only; their training is not recorded.
VARIANTS = ("MoE top-1, normalized", "KAN B=4, small", "KAN B=8, small")
NORMS = ("Pre-LN", "Post-LN", "RMSNorm", "DeepNorm", "DeepNorm, DeepNet's", "SubLN", "No-Norm")
#: Architectures of the tables at initialization.
TABLES = {
    "norms": (*NORMS, "Fixup", "ReZero"),
    "architectures": tuple(
        name for name in ARCHITECTURES if name in ("Pre-LN", "No-Norm") or "family" in ARCHITECTURES[name]
    ),
}

#: Width and depth of the recorded runs, of Table 1, and of the architecture tables (ViT-Tiny for images).
RUN_SIZE = {"d_model": 64, "n_layers": 4}
TABLE_1_SIZE = {"d_model": 128, "n_layers": 4}
FAMILY_SIZE = {"d_model": 256, "n_layers": 6}
VIT_TINY = {"d_model": 192, "n_layers": 12, "n_heads": 3}

#: A run converges at the first of these rates; a second run is recorded at the smallest rate at which it diverges.
RATES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0, 100.0)
BATCH_SIZE = 16
N_STEPS, WARMUP, SPECTRA_EVERY = 200, 20, 25
#: Settings of the divergence table.
TABLE_RATES = (3e-3, 5e-3, 1e-2)
TABLE_SEEDS = (1, 2, 3, 4)
TABLE_STEPS = 300


def make_model(name: str, size: dict[str, int], seed: int) -> torch.nn.Module:
    """Return a freshly initialized model of an architecture."""
    options = {"family": "transformer", **ARCHITECTURES[name], **size, "seed": seed}
    if options["family"] == "vit":
        options |= {"image_size": 8, "patch_size": 2, "n_channels": 1, "n_classes": 10}
    return wb.zoo.build(wb.zoo.ArchitectureConfig(**options))


def make_task(name: str, seed: int) -> Any:
    """Return the task that the paper uses for this architecture, with digits in place of CIFAR-10."""
    family = ARCHITECTURES[name].get("family", "transformer")
    kinds = {"transformer": wb.tasks.associative_recall, "vit": wb.tasks.digits}
    return kinds.get(family, wb.tasks.random_tokens)(seed=seed, batch_size=BATCH_SIZE)


def initial_spectra(name: str, table: str, seed: int) -> xr.Dataset:
    """Return the spectra at initialization on 2,048 states of the table's task."""
    is_vit = ARCHITECTURES[name].get("family") == "vit"
    size = TABLE_1_SIZE if table == "norms" else VIT_TINY if is_vit else FAMILY_SIZE
    # The architecture tables of the paper use random tokens, also for transformers.
    is_own = table == "norms" or is_vit
    task = make_task(name, seed) if is_own else wb.tasks.random_tokens(seed=seed, batch_size=BATCH_SIZE)
    return wb.profile(make_model(name, size, seed), task.probe(2048), seed=seed, n_workers=1, progress=False)


def record_run(name: str, rate: float, store: Path, *, n_steps: int = N_STEPS) -> str:
    """Record a training run in a store, and return the cause of its divergence, or an empty text."""
    seed = SEEDS[0]
    model, task = make_model(name, RUN_SIZE, seed), make_task(name, seed)
    settings = {"learning_rate": rate, "warmup": WARMUP, "seed": seed, "n_steps": n_steps}
    *_, last = wb.train(
        model,
        task,
        store=store,
        overwrite=True,
        spectra_every=SPECTRA_EVERY,
        profile_options={"n_snapshots": 2048, "n_workers": 1},
        **settings,
    )
    return last.cause


def outcome(name: str, rate: float, seed: int, *, n_steps: int = TABLE_STEPS) -> dict[str, Any]:
    """Return the outcome of one run of the divergence table."""
    model = make_model(name, TABLE_1_SIZE, seed)
    task = make_task(name, seed)
    *_, last = wb.train(model, task, n_steps=n_steps, learning_rate=rate, warmup=WARMUP, seed=seed)
    return {"has_diverged": last.diverged, "step": last.step if last.diverged else math.nan, "final_loss": last.loss}


# ---- jobs: each writes its own files, and does nothing if they exist


def do_runs(name: str, out: Path) -> str:
    """Record the converging and the diverging run of an architecture."""
    start, tried = time.monotonic(), {}
    files = {kind: out / "runs" / f"{_slug(name)}-{kind}.nc" for kind in ("healthy", "diverged")}
    if all(file.exists() for file in files.values()):
        return f"{name}: there already"
    with tempfile.TemporaryDirectory() as folder:
        for rate in RATES:
            store = Path(folder) / "run.zarr"
            tried[rate] = cause = record_run(name, rate, store)
            kind = "diverged" if cause else "healthy"
            if kind == "diverged" or rate == RATES[0]:
                run = wb.open_run(store)
                run.attrs |= {"architecture": name, "place": list(ARCHITECTURES).index(name)}
                wb.export_netcdf(run, files[kind], overwrite=True)
            if cause:
                break
    told = ", ".join(f"{rate:g} {cause or 'healthy'}" for rate, cause in tried.items())
    return f"{name}: {told} ({time.monotonic() - start:.0f} s)"


def do_divergence(name: str, out: Path) -> str:
    """Record the rows of the divergence table for one normalization."""
    start, file = time.monotonic(), out / "parts" / f"divergence-{_slug(name)}.nc"
    if file.exists():
        return f"{name}: there already"
    ends = [[outcome(name, rate, seed) for seed in TABLE_SEEDS] for rate in TABLE_RATES]
    variables = {
        variable: (("architecture", "learning_rate", "seed"), [[[end[variable] for end in row] for row in ends]])
        for variable in ends[0][0]
    }
    coords = {"architecture": [name], "learning_rate": list(TABLE_RATES), "seed": list(TABLE_SEEDS)}
    _write(xr.Dataset(variables, coords, {"size": json.dumps(TABLE_1_SIZE), "n_steps": TABLE_STEPS}), file)
    diverged = {rate: sum(end["has_diverged"] for end in row) for rate, row in zip(TABLE_RATES, ends, strict=True)}
    return f"{name}: diverged of {len(TABLE_SEEDS)} runs {diverged} ({time.monotonic() - start:.0f} s)"


def do_initialization(name: str, out: Path) -> str:
    """Record rows of the tables at initialization for one architecture, dim ``seed``."""
    start, told = time.monotonic(), []
    for table, names in TABLES.items():
        file = out / "parts" / f"{table}-{_slug(name)}.nc"
        if name not in names or file.exists():
            continue
        rows = [wb.compare({name: initial_spectra(name, table, seed)}) for seed in SEEDS]
        _write(xr.concat(rows, xr.IndexVariable("seed", list(SEEDS)), combine_attrs="override"), file)
        told.append(f"{table} M {float(rows[0].near_unit_mass.sel(source='ours').item()):.3f}")
    return f"{name}: {', '.join(told) or 'there already'} ({time.monotonic() - start:.0f} s)"


PARTS: dict[str, tuple[Callable[[str, Path], str], tuple[str, ...]]] = {
    "initialization": (do_initialization, tuple(ARCHITECTURES)),
    "runs": (do_runs, tuple(name for name in ARCHITECTURES if name not in VARIANTS)),
    "divergence": (do_divergence, NORMS),
}


def collect(out: Path) -> None:
    """Combine the parts of each table, and record their origin."""
    for target, names in {
        **{f"initialization/{table}": names for table, names in TABLES.items()},
        "divergence": NORMS,
    }.items():
        parts = [out / "parts" / f"{Path(target).name}-{_slug(name)}.nc" for name in names]
        if all(part.exists() for part in parts):
            _write(
                xr.concat([xr.load_dataset(part) for part in parts], "architecture", combine_attrs="override"),
                out / f"{target}.nc",
            )
    record = {
        "call": "python data/make_runs.py",
        "seeds": {"runs": SEEDS[0], "initialization": SEEDS, "divergence": TABLE_SEEDS},
        "versions": versions(),
        "sha256": {
            file.relative_to(out).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for folder in (out / "runs", out / "initialization", out)
            for file in sorted(folder.glob("*.nc"))
        },
    }
    with replacing(out / "runs" / "record.json") as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n")


def _write(data: xr.Dataset, file: Path) -> None:
    with replacing(file) as partial:
        # The encodings of the parts are dropped, because text widths of one part would truncate the names of another.
        data.drop_encoding().to_netcdf(partial, engine="netcdf4")


def _slug(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower().replace("'", "")).split())


def _work(parts: list[str], out: Path, n_processes: int) -> None:
    jobs = [(PARTS[part][0], name) for part in parts for name in PARTS[part][1]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(function, name, out) for function, name in jobs]):
            print(done.result(), flush=True)


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    _work([args.only] if args.only else list(PARTS), args.out, args.processes)
    collect(args.out)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
