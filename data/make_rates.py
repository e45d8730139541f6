"""Record the study of learning rates: which rate is the best for a design, and which are useful.

    python data/make_rates.py                        # everything, into data/rates.nc
    python data/make_rates.py --folder try --stage coarse

72 designs (see rate_designs.py) in stages, each of which goes on where it stopped:

- ``coarse``: rates a factor 3.4 apart over three and a half decades, one seed;
- ``fine``: rates a factor 1.5 apart up to three steps on either side of the best coarse rate, three seeds;
- ``wider``: three more rates where the useful band goes beyond those;
- ``shorter``: the best rate with four fifths of the updates, where the schedule ends at 0;
- ``pilot``: 120 updates at a constant rate, two other seeds, from four steps below the best rate to eight above;
- ``long``: 12 designs at five rates around their useful edge, two seeds, 2,000 updates;
- ``measures``: what can be measured before training, two seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import xarray as xr
from rate_designs import FAMILIES, N_STEPS, RATIO, SEED_OF_SETUPS, Design, designs

import workbench as wb
from workbench.io.atomic import replacing
from workbench.rates.outcomes import LossTable, useful_band

N_EVALUATIONS = 20
SEEDS = (1, 2, 3)
REACH, N_WIDER = 3, 3
PILOT_STEPS, PILOT_SEEDS, PILOT_WARMUP, PILOT_OFFSETS = 120, (6, 7), 24, range(-4, 9)
LONG_STEPS, LONG_SEEDS = 2000, (4, 5)
#: Steps of the lattice of rates from the useful edge at which long runs are made.
LONG_OFFSETS = (-4, -2, -1, 0, 2)
EVALUATED = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS}
STAGES = ("coarse", "fine", "wider", "shorter", "pilot", "long", "measures")


def of_design(sweep: xr.Dataset, design: Design) -> xr.Dataset:
    """The runs of a design."""
    cell = design.run(0, 1).cell
    return sweep.isel(run=sweep["cell"].values == cell)


def index_of(rate: float) -> int:
    """The k of a rate of the lattice."""
    return int(np.rint(np.log(rate / 1e-3) / np.log(RATIO)))


def coarse_runs() -> list[wb.sweeps.RunSettings]:
    """The coarse rates of all designs."""
    return [design.run(k, SEEDS[0], **EVALUATED) for design in designs() for k in design.coarse]


def fine_runs(coarse: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """The rates around the best coarse one."""
    runs = []
    for design in designs():
        table = LossTable.of(of_design(coarse, design))
        best = index_of(table.rate[int(np.argmin(table.loss[:, 0]))])
        for k in range(best - REACH, best + REACH + 1):
            seeds = SEEDS[1:] if k in design.coarse else SEEDS
            runs += [design.run(k, seed, **EVALUATED) for seed in seeds]
    return runs


def band_of(runs: xr.Dataset) -> tuple[list[int], float, float]:
    """The k of the rates tried with all seeds, and the ends of the useful band."""
    table = LossTable.of(runs)
    is_full = ~np.isnan(table.loss).any(axis=1)
    band = useful_band(table.rate[is_full], table.loss[is_full], table.earlier[is_full])
    return [index_of(rate) for rate in table.rate[is_full]], band.slow_edge, band.useful_edge


def wider_runs(known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """More rates where the band goes on."""
    runs = []
    for design in designs():
        ks, slow_edge, useful_edge = band_of(of_design(known, design))
        more = []
        if np.isnan(slow_edge):
            more += range(min(ks) - N_WIDER, min(ks))
        if np.isnan(useful_edge):
            more += range(max(ks) + 1, max(ks) + N_WIDER + 1)
        seeds = {k: SEEDS[1:] if k in design.coarse else SEEDS for k in more}
        runs += [design.run(k, seed, **EVALUATED) for k in more for seed in seeds[k]]
    return runs


def best_of(known: xr.Dataset, design: Design) -> int:
    """The k of the best rate."""
    table = LossTable.of(of_design(known, design))
    is_full = ~np.isnan(table.loss).any(axis=1)
    mean = np.where(is_full, table.loss.mean(axis=1), np.inf)
    return index_of(table.rate[int(np.argmin(mean))])


def shorter_runs(known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Four fifths of the updates at the best rate of scheduled designs."""
    runs = []
    options = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS * 4 // 5, "n_steps": N_STEPS * 4 // 5}
    for design in designs():
        if design.training["schedule"] == "constant":
            continue
        best = best_of(known, design)
        runs += [design.run(best, seed, **options) for seed in SEEDS]
    return runs


def pilot_runs(known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Short runs at a constant rate."""
    runs = []
    options = {"n_snapshots": 0, "n_evaluations": PILOT_STEPS // 12, "n_steps": PILOT_STEPS}
    for design in designs():
        training = {**design.training, "schedule": "constant", "warmup": min(design.training["warmup"], PILOT_WARMUP)}
        pilot, best = replace(design, training=training), best_of(known, design)
        runs += [pilot.run(best + by, seed, **options) for by in PILOT_OFFSETS for seed in PILOT_SEEDS]
    return runs


def long_runs(known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Long runs of the first design of four families of each set, in the order of the families, around their edge."""
    runs = []
    options = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS, "n_steps": LONG_STEPS}
    for families in FAMILIES.values():
        for family in families[:4]:
            design = next(one for one in designs() if one.architecture.family == family)
            _, _, edge = band_of(of_design(known, design))
            center = index_of(edge) if np.isfinite(edge) else 0
            runs += [design.run(center + by, seed, **options) for by in LONG_OFFSETS for seed in LONG_SEEDS]
    return runs


def measured_runs() -> list[wb.sweeps.RunSettings]:
    """One update each, with all that is measured before."""
    return [design.run(0, seed, n_steps=1, n_snapshots=1024) for design in designs() for seed in SEEDS[:2]]


def make(folder: Path, last: str, n_workers: int) -> dict[str, xr.Dataset]:
    """All stages up to one, each in a store of its own."""

    def made(stage: str, runs: list[wb.sweeps.RunSettings]) -> None:
        found[stage] = wb.sweeps.run(runs, folder / f"{stage}.zarr", n_workers=n_workers)

    found: dict[str, xr.Dataset] = {}
    for stage in STAGES[: STAGES.index(last) + 1]:
        if stage == "coarse":
            made(stage, coarse_runs())
        elif stage == "fine":
            made(stage, fine_runs(found["coarse"]))
        elif stage == "wider":
            if runs := wider_runs(wb.sweeps.join([found["coarse"], found["fine"]])):
                made(stage, runs)
            known = wb.sweeps.join([found[one] for one in ("coarse", "fine", "wider") if one in found])
        elif stage == "shorter":
            made(stage, shorter_runs(known))
        elif stage == "pilot":
            made(stage, pilot_runs(known))
        elif stage == "long":
            made(stage, long_runs(known))
        else:
            made(stage, measured_runs())
    return found


def collect(stages: dict[str, xr.Dataset], file: Path, minutes: float) -> None:
    """One file of all stages, and how it was made."""
    runs = wb.sweeps.join([part.assign_coords(stage=("run", [s] * part.sizes["run"])) for s, part in stages.items()])
    eigenvalue = runs["eigenvalue"]
    runs = runs.drop_vars("eigenvalue")
    for part in ("real", "imag"):  # netCDF has no complex numbers
        rounded = np.round(getattr(eigenvalue, part).values.astype(np.float32), 4)
        runs[f"eigenvalue_{part}"] = (eigenvalue.dims, rounded, eigenvalue.attrs)
    first = stages["coarse"]
    runs.attrs = {
        "call": "python data/make_rates.py",
        "n_steps": N_STEPS,
        "seeds": json.dumps({"setups": SEED_OF_SETUPS, "runs": SEEDS, "long": LONG_SEEDS}),
        "families": json.dumps(FAMILIES),
        "versions": first.attrs["versions"],
        "sweep_version": first.attrs["sweep_version"],
        "core_hours": round(float(runs["seconds"].sum()) / 3600, 2),
        "minutes": round(minutes, 1),
    }
    packed = {
        name: {"zlib": True, "complevel": 9, "shuffle": True}
        for name, variable in runs.variables.items()
        if variable.dtype.kind in "fib"
    }
    with replacing(file) as partial:
        runs.drop_encoding().to_netcdf(partial, engine="netcdf4", encoding=packed)


def main() -> None:
    """Read the command line and make the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "rates", help="where the stores are kept meanwhile")
    parser.add_argument("--out", type=Path, default=here / "rates.nc")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last stage to be made")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    stages = make(args.folder, args.stage, args.workers)
    if args.stage == STAGES[-1]:
        collect(stages, args.out, (time.monotonic() - start) / 60)


if __name__ == "__main__":
    main()
