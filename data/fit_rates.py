"""Fit how learning rates change from a pilot to the training, and say how accurate `wb.find_rate` is.

    python data/fit_rates.py                         # fits on the set "fit", judges on "choose"
    python data/fit_rates.py --locked                # and judges once on "locked", into the README's table

Reads ``rates.nc`` and ``rate_pilots.nc``; writes ``workbench/rates/shipped/drift.json`` from the set "fit" alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

import workbench as wb
from workbench.io.atomic import replacing
from workbench.rates.drift import features
from workbench.rates.outcomes import rate_outcomes
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(wb.rates.__file__).parent / "shipped" / "drift.json"
TARGETS = ("best_rate", "useful_edge")
#: Shares of the designs of other families that lie below and above the interval.
TAILS = (0.1, 0.9)
#: Budget whose pilots are fitted to; the others only show what fewer updates cost.
BUDGET = 1000
#: Horizons of designs with a constant rate; those of others are where their schedule ends.
HORIZONS = (240, 480)
FACTORS = (1.6, 2.5)


def table(rates: xr.Dataset, pilots: xr.Dataset) -> pd.DataFrame:
    """One row for each design, horizon and budget: what the pilot found and what the runs showed."""
    import pandas as pd

    stage, n_steps = rates["stage"].values, rates["n_steps"].values
    short = rates.isel(run=np.isin(stage, ["coarse", "fine", "wider"]))
    shorter, long = rates.isel(run=stage == "shorter"), rates.isel(run=stage == "long")
    truths = [_truths(short, shorter, horizon) for horizon in HORIZONS]
    if long.sizes["run"]:
        truths.append(_truths(long, None, int(n_steps.max())))
    found = pilots.to_dataframe().reset_index()
    found = found.merge(pd.concat(truths), on=["architecture", "key"], suffixes=("_pilot", ""))
    return found[np.isfinite(found[["useful_edge_pilot", "useful_edge"]]).all(axis=1)].reset_index(drop=True)


def _truths(runs: xr.Dataset, shorter: xr.Dataset | None, horizon: int) -> pd.DataFrame:
    """Outcomes of designs after some updates."""
    import pandas as pd

    rows = []
    for cell in dict.fromkeys(runs["cell"].values.tolist()):
        of = runs.isel(run=runs["cell"].values == cell)
        settings = json.loads(str(of["settings"].values[0]))
        schedule = settings["training"]["schedule"]
        if schedule != "constant" and settings["training"]["n_steps"] != horizon:
            continue
        found = rate_outcomes(of, shorter=shorter, n_steps=horizon).isel(cell=0)
        rows.append(
            {
                "architecture": str(found["architecture"].item()),
                "key": key_of(settings),
                "horizon": horizon,
                "schedule": schedule,
                **{name: float(found[name]) for name in TARGETS},
            }
        )
    return pd.DataFrame(rows)


def key_of(settings: dict[str, Any]) -> str:
    """The design of a run: all settings but rate, seed and length."""
    training = {name: value for name, value in settings["training"].items() if name not in ("learning_rate", "n_steps")}
    return json.dumps([settings["model"], settings["task"], training], sort_keys=True)


def inputs(rows: pd.DataFrame, names: list[str]) -> np.ndarray:
    """Features of rows, shape (row, feature)."""
    values = [
        features(int(row.last_updates), TrainingPlan(n_steps=int(row.horizon), schedule=row.schedule))
        for row in rows.itertuples()
    ]
    return np.array([[one[name] for name in names] for one in values])


def changes(rows: pd.DataFrame, target: str) -> np.ndarray:
    """Logarithm of the rate of the training over that of the pilot."""
    return np.log(rows[target].to_numpy() / rows[f"{target}_pilot"].to_numpy())


def fitted(rows: pd.DataFrame, target: str, names: list[str]) -> dict[str, Any]:
    """Weights of least absolute error, and the quantiles of the errors for families left out."""
    from sklearn.linear_model import QuantileRegressor

    known = rows[np.isfinite(changes(rows, target))]
    x, y = inputs(known, names), changes(known, target)

    def weights(is_in: np.ndarray) -> np.ndarray:
        model = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
        return np.asarray(model.fit(x[is_in], y[is_in]).coef_)

    error = np.empty(len(y))
    for family in known["family"].unique():
        is_out = (known["family"] == family).to_numpy()
        error[is_out] = y[is_out] - x[is_out] @ weights(~is_out)
    low, high = np.quantile(error, TAILS)
    found = weights(np.ones(len(y), dtype=bool))
    return {
        "weights": {name: round(float(value), 4) for name, value in zip(names, found, strict=True)},
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "median_error_of_new_families": round(float(np.median(np.abs(error))), 4),
        "n_rows": len(y),
    }


def errors(rows: pd.DataFrame, drift: dict[str, Any], target: str) -> np.ndarray:
    """Logarithm of the estimate over the measured rate."""
    weights = drift[target]["weights"]
    return inputs(rows, list(weights)) @ np.array(list(weights.values())) - changes(rows, target)


def accuracy(rows: pd.DataFrame, drift: dict[str, Any]) -> pd.DataFrame:
    """Shares of designs within a factor, by set, budget and horizon; beside them those of one rate for all."""
    import pandas as pd

    rows = rows.assign(error=errors(rows, drift, "useful_edge"))
    of_fit = rows[(rows["set"] == "fit") & (rows["budget"] == BUDGET)]
    constant = np.log(of_fit["useful_edge"]).median()
    rows["error of a constant"] = constant - np.log(rows["useful_edge"])
    found = []
    for (name, budget, horizon), group in rows.groupby(["set", "budget", "horizon"], sort=False):
        row: dict[str, Any] = {"set": name, "budget": budget, "horizon": horizon, "designs": len(group)}
        for factor in FACTORS:
            row[f"within {factor}"] = float((group["error"].abs() <= math.log(factor)).mean())
            row[f"constant within {factor}"] = float((group["error of a constant"].abs() <= math.log(factor)).mean())
        edge = drift["useful_edge"]
        row["in interval"] = float(((-group["error"] >= edge["low"]) & (-group["error"] <= edge["high"])).mean())
        found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Fit, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--rates", type=Path, default=here / "rates.nc")
    parser.add_argument("--pilots", type=Path, default=here / "rate_pilots.nc")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--locked", action="store_true", help="judge on the locked set too")
    args = parser.parse_args()
    with xr.open_dataset(args.rates) as rates, xr.open_dataset(args.pilots) as pilots:
        rows = table(rates.load(), with_keys(pilots.load()))
    if not args.locked:
        rows = rows[rows["set"] != "locked"]
    of_fit = rows[(rows["set"] == "fit") & (rows["budget"] == BUDGET)]
    for names in (["constant"], ["constant", "growth"], ["constant", "growth", "decays"]):
        tried = {target: fitted(of_fit, target, names)["median_error_of_new_families"] for target in TARGETS}
        print(f"{', '.join(names)}: median error for families left out {tried}")
    names = ["constant", "growth"]
    growth = float((of_fit["horizon"] / of_fit["last_updates"]).max())
    drift = {target: fitted(of_fit, target, names) for target in TARGETS} | {"largest_growth": round(growth, 1)}
    print(accuracy(rows, drift).to_string(index=False, float_format=lambda value: f"{value:.2f}"))
    with replacing(args.out) as partial:
        partial.write_text(json.dumps({"call": "python data/fit_rates.py", **drift}, indent=1) + "\n")


def with_keys(pilots: xr.Dataset) -> xr.Dataset:
    """Pilots with the key of their design, which finds its runs of any length."""
    from rate_designs import designs

    return pilots.assign_coords(key=("design", [key_of(one.run(0, 1).as_dict()) for one in designs()]))


if __name__ == "__main__":
    main()
