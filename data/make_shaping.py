"""Record the sweep of the tables of Koopman Spectral Shaping: which runs converge under which control, and its cost.

    python data/make_shaping.py                              # everything, into data/shaping.nc; resumable
    python data/make_shaping.py --only controls --out try    # one study, into another folder

Every run trains a No-Norm transformer (width 64, 4 layers) on associative recall for 400 steps of AdamW with a warm-up
of 50 steps, in one thread, two runs at a time. There are three studies: `controls` (no control, clipping, published and
best KSS at nine rates with six seeds), `tables` (the baselines and combinations of the paper at three of the rates with
three of the seeds) and `doses` (variants and doses of KSS at three of the rates with two other seeds). No seed was used
for tuning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import workbench as wb
from workbench.callbacks.kss import KSS, KSSOptions, PenaltyShape, TrustRegion
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning

MODEL = {"norm": "none", "d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 16, "max_length": 8}
TASK = {"length": 8, "vocab_size": 16, "n_pairs": 2, "batch_size": 32}
N_STEPS, WARMUP = 400, 50
#: Rates with even logarithmic spacing across the explosion edge.
RATES = (0.002, 0.0026, 0.0033, 0.0043, 0.0056, 0.0072, 0.0093, 0.012, 0.0155)
SEEDS = (1, 2, 3, 4, 5, 6)
#: Rates and seeds of the studies with more controls and fewer runs.
FEWER_RATES = (0.0043, 0.0056, 0.0072)
FEWER_SEEDS, DOSE_SEEDS = (1, 2, 3), (11, 12)
#: Seeds with which the best variant was chosen; they are in no table.
TUNING_SEEDS = (100, 101, 102)


def published(strength: float = 0.15, **options: Any) -> KSS:
    """Return the KSS of the paper with another strength or penalty."""
    return KSS(strength=strength, options=KSSOptions(penalty=PenaltyShape(**options)))


def penalty(strength: float, interval: int, coupling: str = "gradient", n_snapshots: int = 256, **shape: Any) -> KSS:
    """Return KSS on all layers with a penalty at an effective dose."""
    options = KSSOptions(n_snapshots=n_snapshots, coupling=coupling, penalty=PenaltyShape(**shape))
    return KSS(strength=strength, interval=interval, layers="all", options=options)


def trust_region(interval: int = 1, **region: Any) -> KSS:
    """Return the best variant with changed options."""
    best = KSS.recommended()
    return KSS(
        strength=best.strength,
        interval=interval,
        layers=best.layers,
        options=KSSOptions(
            n_snapshots=best.options.n_snapshots,
            coupling="trust_region",
            penalty=best.options.penalty,
            trust_region=TrustRegion(**{**vars(best.options.trust_region), **region}),
        ),
    )


#: Name -> (name of a baseline, KSS or None).
CONTROLS: dict[str, tuple[str, Callable[[], KSS] | None]] = {
    "none": ("none", None),
    "clip 1.0": ("clip 1.0", None),
    "KSS .15, published": ("none", KSS.published),
    "KSS, best": ("none", KSS.recommended),
}
TABLES: dict[str, tuple[str, Callable[[], KSS] | None]] = {
    **{name: (name, None) for name in wb.baselines.controls() if name not in ("none", "clip 1.0")},
    "KSS .10, published": ("none", lambda: published(0.10)),
    "KSS .20, published": ("none", lambda: published(0.20)),
    "KSS .15, unstable term only": ("none", lambda: published(beta=0.0)),
    "KSS .15, near-unit term only": ("none", lambda: published(unstable=0.0)),
    "clip 1.0 + KSS, best": ("clip 1.0", KSS.recommended),
    "SAM 0.05 + KSS .15, published": ("SAM 0.05", KSS.published),
    "LAMB + KSS .15, published": ("LAMB", KSS.published),
    "muP + KSS .15, published": ("muP", KSS.published),
    "SAM 0.05 + KSS, best": ("SAM 0.05", KSS.recommended),
    "LAMB + KSS, best": ("LAMB", KSS.recommended),
    "muP + KSS, best": ("muP", KSS.recommended),
}
LOG = {"unstable_term": "log", "beta": 0.0}
DOSES: dict[str, tuple[str, Callable[[], KSS] | None]] = {
    "none": ("none", None),
    "gradient, .15 / 10": ("none", lambda: penalty(0.15, 10)),
    "gradient, 1 / 2": ("none", lambda: penalty(1.0, 2)),
    "gradient, 5 / 2": ("none", lambda: penalty(5.0, 2)),
    "gradient, 5 / 1": ("none", lambda: penalty(5.0, 1)),
    "gradient, rank 8, log, 10 / 1": ("none", lambda: penalty(10.0, 1, n_snapshots=64, rank=8, upper=1.5, **LOG)),
    "decoupled, rank 8, log, 10 / 1": (
        "none",
        lambda: penalty(10.0, 1, "decoupled", n_snapshots=64, rank=8, upper=1.5, **LOG),
    ),
    "projection, rank 8, log, 1 / 1": (
        "none",
        lambda: penalty(1.0, 1, "projection", n_snapshots=64, rank=8, upper=1.5, **LOG),
    ),
    "projection, rank 32, log, 1 / 1": ("none", lambda: penalty(1.0, 1, "projection", upper=2.0, **LOG)),
    "trust region, 1 / 1": ("none", KSS.recommended),
    "trust region, 1 / 2": ("none", lambda: trust_region(2)),
    "trust region, 1 / 5": ("none", lambda: trust_region(5)),
    "trust region of the radius, 1 / 1": ("none", lambda: trust_region(measure="spectral_radius")),
}
STUDIES = {
    "controls": (CONTROLS, RATES, SEEDS),
    "tables": (TABLES, FEWER_RATES, FEWER_SEEDS),
    "doses": (DOSES, FEWER_RATES, DOSE_SEEDS),
}


def outcome(study: str, control: str, rate: float, seed: int, *, n_steps: int = N_STEPS) -> dict[str, Any]:
    """Return the outcome of one run."""
    start = time.monotonic()
    baseline, make_kss = STUDIES[study][0][control]
    model, settings = wb.baselines.controls()[baseline].prepare(lambda: wb.zoo.transformer(**MODEL, seed=seed), rate)
    task = wb.tasks.associative_recall(**TASK, seed=seed)
    kss = None if make_kss is None else make_kss()
    records = list(wb.train(model, task, n_steps=n_steps, warmup=WARMUP, seed=seed, kss=kss, **settings))
    last, tail = records[-1], records[-max(1, n_steps // 8) :]
    return {
        "study": study,
        "control": control,
        "learning_rate": rate,
        "seed": seed,
        "has_diverged": last.diverged,
        "cause": last.cause,
        "step": last.step,
        "loss": math.nan if last.diverged else sum(record.loss for record in tail) / len(tail),
        "accuracy": math.nan if last.diverged else sum(record.accuracy for record in tail) / len(tail),
        "near_unit_mass": math.nan if last.diverged else near_unit_mass(model, task),
        "seconds": time.monotonic() - start,
    }


def near_unit_mass(model: torch.nn.Module, task: Any) -> float:
    """Return M averaged over the layers, in 32 leading directions; NaN if there is no spectrum."""
    warnings.simplefilter("ignore", RankWarning)  # eight positions and sixteen tokens span at most 20 directions
    try:
        spectra = wb.profile(wb.baselines.plain_copy(model), task.probe(512), rank=32, n_workers=1, progress=False)
    except wb.errors.SnapshotError:
        return math.nan
    return float(spectra.near_unit_mass.mean())


def do_run(study: str, control: str, rate: float, seed: int, out: Path) -> str:
    """Record a run in a separate file, unless it exists."""
    name = "_".join("".join(c if c.isalnum() else " " for c in f"{control} {rate} {seed}".lower()).split())
    file = out / "parts" / study / f"{name}.json"
    if file.exists():
        return f"{study} {name}: there already"
    file.parent.mkdir(parents=True, exist_ok=True)
    result = outcome(study, control, rate, seed)
    with replacing(file) as partial:
        partial.write_text(json.dumps(result))
    how = f"{result['cause']} at {result['step']}" if result["has_diverged"] else f"accuracy {result['accuracy']:.3f}"
    return f"{study} {name}: {how} ({result['seconds']:.0f} s)"


def jobs(studies: list[str]) -> list[tuple[str, str, float, int]]:
    """Return all runs of the given studies."""
    found = []
    for study in studies:
        controls, rates, seeds = STUDIES[study]
        found += [(study, name, rate, seed) for seed in seeds for rate in rates for name in controls]
    return found


def collect(out: Path) -> None:
    """Combine all runs in one file, with its origin."""
    rows = [json.loads(file.read_text()) for file in sorted((out / "parts").glob("*/*.json"))]
    order = {job: i for i, job in enumerate(jobs(list(STUDIES)))}
    rows = [row for row in rows if _job(row) in order]
    rows.sort(key=lambda row: order[_job(row)])
    table = xr.Dataset({name: ("run", [row[name] for row in rows]) for name in rows[0]})
    table = table.set_coords(["study", "control", "learning_rate", "seed"])
    table.attrs = {
        "call": "python data/make_shaping.py",
        "model": json.dumps(MODEL),
        "task": json.dumps(TASK),
        "n_steps": N_STEPS,
        "warmup": WARMUP,
        "tuning_seeds": json.dumps(TUNING_SEEDS),
        "versions": versions(),
    }
    with replacing(out / "shaping.nc") as partial:
        table.to_netcdf(partial, engine="netcdf4")
    record = {
        "call": table.attrs["call"],
        "n_runs": len(rows),
        "core_minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
        "versions": versions(),
        "sha256": hashlib.sha256((out / "shaping.nc").read_bytes()).hexdigest(),
    }
    with replacing(out / "shaping.json") as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n")


def _job(row: dict[str, Any]) -> tuple[str, str, float, int]:
    return row["study"], row["control"], row["learning_rate"], row["seed"]


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=sorted(STUDIES))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    todo = jobs([args.only] if args.only else list(STUDIES))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        args.processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for done in as_completed([pool.submit(do_run, *job, args.out) for job in todo]):
            print(done.result(), flush=True)
    collect(args.out)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
