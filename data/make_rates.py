"""Record the study of learning rates: the best rate of a design, and the useful rates.

    python data/make_rates.py                        # everything that data/rates.nc lacks
    python data/make_rates.py --folder try --out try.nc --sets fit --stage coarse

The study has 72 designs (see rate_designs.py) in three sets of families. Each set is recorded in stages, and the file
is written after each of them; an interrupted stage is resumed:

- ``coarse``: rates a factor of 3.4 apart over 3.7 decades, one seed;
- ``fine``: rates a factor of 1.5 apart, up to three steps on either side of the best coarse rate, three seeds;
- ``wider``: three more rates if the useful band extends beyond those;
- ``shorter``: the best rate with four fifths of the updates, if the schedule ends at 0;
- ``measures``: measurements before training, two seeds;
- ``long``: four designs with a constant rate at five rates around their useful edge, two seeds, 2,000 updates.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr
from make_sweep import join, write
from rate_designs import FAMILIES, N_STEPS, SEED_OF_SETUPS, Design, designs

import workbench as wb
from workbench.errors import SweepError
from workbench.rates.outcomes import LossTable, UsefulBand, useful_band
from workbench.rates.rate_search import power_of

N_EVALUATIONS, N_SNAPSHOTS = 20, 1024
SEEDS = (1, 2, 3)
REACH, N_WIDER = 3, 3
N_LONG, LONG_STEPS, LONG_SEEDS = 4, 2000, (4, 5)
#: Distances from the useful edge, in steps of the lattice of rates, at which long runs are trained.
LONG_OFFSETS = (-4, -2, -1, 0, 2)
STAGES = ("coarse", "fine", "wider", "shorter", "measures", "long")
EVALUATED = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS}


def of_design(sweep: xr.Dataset, design: Design) -> LossTable:
    """Return the losses of a design."""
    return LossTable.of(sweep.isel(run=sweep["cell"].values == design.run(0, 1).cell))


def index_of(rate: float) -> int:
    """Return the index k of a rate in the lattice."""
    return round(power_of(rate))


def coarse_runs(of: list[Design]) -> list[wb.sweeps.RunSettings]:
    """Return the runs of designs at the coarse rates."""
    return [design.run(k, SEEDS[0], **EVALUATED) for design in of for k in design.coarse]


def fine_runs(of: list[Design], coarse: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Return the runs at the rates around the best coarse one."""
    runs = []
    for design in of:
        _, band = band_of(of_design(coarse, design))
        if np.isnan(band.best_rate):
            continue  # no coarse rate has a finite loss
        best = index_of(band.best_rate)
        runs += missing_runs(design, range(best - REACH, best + REACH + 1))
    return runs


def missing_runs(design: Design, ks: range) -> list[wb.sweeps.RunSettings]:
    """Return runs at the given rates with all seeds, without those of the coarse stage."""
    seeds = {k: SEEDS[1:] if k in design.coarse else SEEDS for k in ks}
    return [design.run(k, seed, **EVALUATED) for k in ks for seed in seeds[k]]


def band_of(table: LossTable) -> tuple[list[int], UsefulBand]:
    """Return the indices of the rates tried with all seeds, and the useful band among them."""
    is_full = ~np.isnan(table.loss).any(axis=1)
    band = useful_band(table.rate[is_full], table.loss[is_full], table.earlier()[is_full])
    return [index_of(rate) for rate in table.rate[is_full]], band


def wider_runs(of: list[Design], known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Return runs at more rates if the band extends further; it is overestimated for designs with a schedule."""
    runs = []
    for design in of:
        ks, band = band_of(of_design(known, design))
        if np.isnan(band.slow_edge):
            runs += missing_runs(design, range(min(ks) - N_WIDER, min(ks)))
        if np.isnan(band.useful_edge):
            runs += missing_runs(design, range(max(ks) + 1, max(ks) + N_WIDER + 1))
    return runs


def shorter_runs(of: list[Design], known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Return runs at the best rate with four fifths of the updates, for designs with a schedule."""
    runs = []
    for design in of:
        if design.training["schedule"] != "constant":
            _, band = band_of(of_design(known, design))
            n_steps = design.training["n_steps"] * 4 // 5
            options = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS * 4 // 5, "n_steps": n_steps}
            runs += [design.run(index_of(band.best_rate), seed, **options) for seed in SEEDS]
    return runs


def long_runs(of: list[Design], known: xr.Dataset) -> list[wb.sweeps.RunSettings]:
    """Return long runs around the edge, for one design with a constant rate in each of the first four such families."""
    first: dict[str, Design] = {}
    for design in of:
        if design.training["schedule"] == "constant":
            first.setdefault(design.architecture.family, design)
    runs = []
    options = {"n_snapshots": 0, "n_evaluations": N_EVALUATIONS, "n_steps": LONG_STEPS}
    for design in list(first.values())[:N_LONG]:
        ks, band = band_of(of_design(known, design))
        center = index_of(band.useful_edge) if np.isfinite(band.useful_edge) else max(ks)
        runs += [design.run(center + by, seed, **options) for by in LONG_OFFSETS for seed in LONG_SEEDS]
    return runs


def measured_runs(of: list[Design]) -> list[wb.sweeps.RunSettings]:
    """Return runs of one update with all measurements before training."""
    return [design.run(0, seed, n_steps=1, n_snapshots=N_SNAPSHOTS) for design in of for seed in SEEDS[:2]]


@dataclass
class Record:
    """The recorded stages, in one file that is written after each of them.

    Args:
        file: The file.
        folder: Folder of the stores of unfinished stages.
        n_workers: Number of processes.
    """

    file: Path
    folder: Path
    n_workers: int
    stages: dict[tuple[str, str], xr.Dataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file.exists():
            recorded = xr.load_dataset(self.file, engine="netcdf4")
            for name, stage in dict.fromkeys(zip(recorded["study"].values, recorded["stage"].values, strict=True)):
                is_it = (recorded["study"].values == name) & (recorded["stage"].values == stage)
                self.stages[name, stage] = recorded.isel(run=is_it)

    def make(self, of: str, stage: str, runs: list[wb.sweeps.RunSettings]) -> None:
        """Record a stage of a set unless it is already recorded.

        Raises:
            SweepError: If the recorded runs differ from these.
        """
        if (of, stage) in self.stages:
            recorded = self.stages[of, stage]["settings"].values.tolist()
            if recorded != [run.describe()["settings"] for run in runs]:
                raise SweepError(
                    f"{self.file} holds other runs of the stage {stage} of the set {of} than this script plans; "
                    "move it away to record them again.",
                    name="stage",
                    value=stage,
                    expected="the runs that this script plans",
                )
        elif runs:
            print(f"{of}, {stage}:", flush=True)
            made = wb.sweeps.run(runs, self.folder / f"{of}-{stage}.zarr", n_workers=self.n_workers)
            made = made.drop_vars("eigenvalue").assign_coords(stage=("run", [stage] * made.sizes["run"]))
            self.stages[of, stage] = made
            self._write()

    def known(self, of: str, *stages: str) -> xr.Dataset:
        """Return the runs of the given stages of a set."""
        return join([self.stages[of, stage] for stage in stages if (of, stage) in self.stages])

    def _write(self) -> None:
        about = {
            "call": "python data/make_rates.py",
            "n_steps": N_STEPS,
            "seeds": json.dumps({"setups": SEED_OF_SETUPS, "runs": SEEDS, "long": LONG_SEEDS}),
            "families": json.dumps(FAMILIES),
        }
        parts = list(self.stages.values())
        versions = dict.fromkeys(one for part in parts for one in part.attrs["versions"].split("; "))
        write(join(parts), self.file, about, parts[-1].attrs | {"versions": "; ".join(versions)})


def make(record: Record, of: str, last: str) -> None:
    """Record all stages of a set up to the given one."""
    members = [design for design in designs() if design.set == of]
    plans = {
        "coarse": lambda: coarse_runs(members),
        "fine": lambda: fine_runs(members, record.known(of, "coarse")),
        "wider": lambda: wider_runs(members, record.known(of, "coarse", "fine")),
        "shorter": lambda: shorter_runs(members, record.known(of, "coarse", "fine", "wider")),
        "measures": lambda: measured_runs(members),
        "long": lambda: long_runs(members, record.known(of, "coarse", "fine", "wider")),
    }
    for stage in STAGES[: STAGES.index(last) + 1]:
        record.make(of, stage, plans[stage]())


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "rates", help="stores of unfinished stages")
    parser.add_argument("--out", type=Path, default=here / "rates.nc")
    parser.add_argument("--sets", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="sets to record")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="last stage to record")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    record = Record(args.out, args.folder, args.workers)
    for name in args.sets:
        make(record, name, args.stage)
    print(f"{', '.join(args.sets)} up to {args.stage}: {(time.monotonic() - start) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
