"""How far the spectra are from the literal formulas, over many random problems.

Call: python -m benchmarks.accuracy [--problems 400]; writes benchmarks/accuracy.md.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.report import write_report
from tests.koopman.snapshots import snapshots
from tests.koopman.test_dmd import largest_error
from workbench.io.provenance import versions

KINDS = ("linear", "residual", "generic")
#: Covariance conditions from, up to, and the relative error wanted there.
RANGES = ((0.0, 1e6, 1e-8), (1e6, 1e10, 1e-5))
SEED = 123


def main() -> None:
    """Draw the problems, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=400)
    n_problems = parser.parse_args().problems
    rng = np.random.default_rng(SEED)
    conditions, worst, names, digits_left, digits_said = [], [], [], [], []
    for i in range(n_problems):
        width = int(rng.integers(4, 80))
        n_snapshots = int(width * rng.uniform(3, 12)) + 10
        X, Y = snapshots(width, n_snapshots, rng.uniform(0, 9.8), KINDS[i % 3], seed=1000 + i)
        errors, said, condition = largest_error(X, Y)
        digits_left.append(-np.log10(errors.pop("of_radius") + 1e-16))
        name = max(errors, key=errors.get)
        conditions.append(condition)
        worst.append(errors[name])
        names.append(name)
        digits_said.append(said)
    conditions, worst = np.array(conditions), np.array(worst)
    rows = []
    for lowest, highest, wanted in RANGES:
        inside = (conditions >= lowest) & (conditions < highest)
        beyond = np.flatnonzero(inside & (worst > wanted))
        which = ", ".join(f"{names[i]} {worst[i]:.1e}" for i in beyond) or "none"
        rows.append(
            f"| {lowest:.0e} to {highest:.0e} | {inside.sum()} | {wanted:.0e} | {np.median(worst[inside]):.0e} "
            f"| {worst[inside].max():.1e} | {which} |"
        )
    n_overstated = int(np.sum(np.array(digits_said) > np.array(digits_left)))
    about = (
        "Largest relative difference from `tests/oracle.py` over |lambda|, residuals and measures, in "
        f"{n_problems} random problems (width 4 to 79, {', '.join(KINDS)}; seed {SEED}). "
        f"Made by `make bench` with {versions()}."
    )
    columns = ("covariance condition", "problems", "wanted", "median", "largest", "beyond what is wanted")
    after = f"`significant_digits` said more digits than were left in {n_overstated} problems."
    write_report("accuracy", "Accuracy", about, columns, rows, after)


if __name__ == "__main__":
    main()
