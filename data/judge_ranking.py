"""Measure how often the pilots of two designs predict which one reaches the lower loss.

    python data/judge_ranking.py

Reads ``rates.nc`` and ``rate_pilots.jsonl``, writes ``ranking_accuracy.csv``. The predicted order is that of the
smallest held-out losses in the last rounds of the two pilots. The measured order is that of the smallest losses over
all rates at the end of the training, mean over seeds. Pairs share task and number of updates, and their measured
difference exceeds twice its standard error over seeds. The baseline is the rule that the design with more parameters
reaches the lower loss. Intervals (95 %) are from bootstraps over families.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from make_pilots import recorded
from rate_designs import designs

from workbench.io.atomic import replacing

HERE = Path(__file__).parent
BUDGETS = (300, 600, 1000)
SETS = {"fit and choose": ("fit", "choose"), "locked": ("locked",)}
N_BOOTSTRAPS, SEED = 2000, 19


@dataclass(frozen=True)
class Measured:
    """A design of the study.

    Attributes:
        family: Family with which the design is held out.
        study: Set of the design.
        setup: Task and number of updates, which pairs share.
        optimizer: Name of the optimizer.
        n_weights: Number of parameters.
        loss: Smallest loss over the rates, shape (seed,).
    """

    family: str
    study: str
    setup: str
    optimizer: str
    n_weights: int
    loss: np.ndarray


def measured(rates: xr.Dataset) -> dict[str, Measured]:
    """Return the designs by cell, with the longest trainings of each."""
    families = {design.run(0, 1).cell: design.architecture.family for design in designs()}
    found = {}
    for cell in dict.fromkeys(rates["cell"].values.tolist()):
        own = rates.isel(run=rates["cell"].values == cell)
        own = own.isel(run=np.isin(own["stage"].values, ("coarse", "fine", "wider")))
        if not own.sizes["run"]:
            continue
        settings = json.loads(str(own["settings"].values[0]))
        training, last = settings["training"], own["held_out_loss"].values[:, -1]
        seeds = own["seed"].values
        loss = np.array(
            [np.nanmin(last[seeds == seed]) for seed in np.unique(seeds) if np.isfinite(last[seeds == seed]).any()]
        )
        setup = json.dumps([settings["task"], training["n_steps"]], sort_keys=True)
        found[cell] = Measured(
            families[cell], str(own["study"].values[0]), setup, training.get("optimizer", "AdamW"),
            int(own["n_weights"].values[0]), loss,
        )  # fmt: skip
    return found


def pairs(of: dict[str, Measured], predicted: dict[str, float]) -> list[tuple[str, str, bool, bool, bool]]:
    """Return for each pair both families, whether pilots and baseline are right, and whether optimizers are equal."""
    found = []
    for one, other in itertools.combinations([cell for cell in of if cell in predicted], 2):
        a, b = of[one], of[other]
        if a.setup != b.setup:
            continue
        difference = a.loss.mean() - b.loss.mean()
        error = np.sqrt(sum(np.var(each.loss, ddof=1) / len(each.loss) for each in (a, b)))
        if not abs(difference) > 2 * error:
            continue
        is_right = (predicted[one] - predicted[other]) * difference > 0
        found.append(
            (a.family, b.family, is_right, (b.n_weights - a.n_weights) * difference > 0, a.optimizer == b.optimizer)
        )
    return found


def interval(rows: list[tuple[str, str, bool, bool, bool]]) -> tuple[float, float]:
    """Return the interval of the fraction of right pairs; a pair counts as often as both of its families were drawn."""
    families = sorted({family for row in rows for family in row[:2]})
    place = {family: i for i, family in enumerate(families)}
    first, second = (np.array([place[row[side]] for row in rows]) for side in (0, 1))
    right = np.array([row[2] for row in rows], dtype=float)
    draws = np.random.default_rng(SEED).integers(len(families), size=(N_BOOTSTRAPS, len(families)))
    shares = []
    for draw in draws:
        times = np.bincount(draw, minlength=len(families))
        weight = np.where(first == second, times[first], times[first] * times[second])
        if weight.sum():
            shares.append(np.average(right, weights=weight))
    low, high = np.quantile(shares, (0.025, 0.975))
    return float(low), float(high)


def judged(rates: xr.Dataset, pilots: list[dict]) -> list[dict[str, object]]:
    """Return a row for each budget and set."""
    of, rows = measured(rates), []
    for budget, (name, studies), same in itertools.product(BUDGETS, SETS.items(), (False, True)):
        predicted = {
            pilot["cell"]: float(np.nanmin(np.nanmean(np.array(pilot["rounds"][-1]["loss"], float), axis=1)))
            for pilot in pilots
            if pilot["kind"] == "model" and pilot["budget"] == budget and pilot["rounds"]
        }
        own = pairs({cell: each for cell, each in of.items() if each.study in studies}, predicted)
        own = [row for row in own if row[4] or not same]
        low, high = interval(own)
        rows.append({
            "set": name, "budget": budget, "optimizers": "same" if same else "any", "pairs": len(own),
            "right": np.mean([row[2] for row in own]), "low": low, "high": high,
            "more weights": np.mean([row[3] for row in own]),
        })  # fmt: skip
    return rows


def main() -> None:
    """Evaluate and write the table."""
    import pandas as pd

    table = pd.DataFrame(judged(xr.load_dataset(HERE / "rates.nc"), recorded(HERE / "rate_pilots.jsonl")))
    print(table.to_string(float_format="%.3f"))
    with replacing(HERE / "ranking_accuracy.csv") as partial:
        table.to_csv(partial, index=False, float_format="%.3f")


if __name__ == "__main__":
    main()
