"""Fit how learning rates change from a pilot to the training, and say how accurate `wb.find_rate` is.

    python data/fit_rates.py                         # fits on the set "fit", judges on "choose"
    python data/fit_rates.py --locked                # and judges once on "locked"

Reads ``rates.nc`` and ``rate_pilots.nc``; writes ``workbench/rates/shipped/drift.json`` from the set "fit" alone, and
the table that it prints into ``rate_accuracy.csv``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from make_pilots import ROUNDS
from rate_designs import designs

import workbench as wb
from workbench.io.atomic import replacing
from workbench.rates.drift import SOURCES, features
from workbench.rates.outcomes import design_key, rate_outcomes
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(wb.rates.__file__).parent / "shipped" / "drift.json"
#: Rates that a round of a pilot finds.
FOUND = ("best_rate", "useful_edge")
#: Features of `workbench.rates.drift.features` that are tried, in this order.
TRIED = tuple(("constant", "growth", "decays", "width")[:n] for n in (1, 2, 3, 4))
#: Shares of the designs of other families that lie below and above the interval.
TAILS = (0.1, 0.9)
#: Horizons of designs with a constant rate; those of others are where their schedule ends.
HORIZONS = (240, 480)
FACTORS = (1.6, 2.5)


def truths(rates: xr.Dataset) -> pd.DataFrame:
    """Measured best rate and useful edge of each design after some updates; NaN: not within the rates tried."""
    import pandas as pd

    stage, n_steps = rates["stage"].values, rates["n_steps"].values
    short = rates.isel(run=np.isin(stage, ["coarse", "fine", "wider"]))
    shorter, long = rates.isel(run=stage == "shorter"), rates.isel(run=stage == "long")
    found = [_truths(short, shorter, horizon) for horizon in HORIZONS]
    if long.sizes["run"]:
        found.append(_truths(long, shorter, int(n_steps.max())))
    return pd.concat(found, ignore_index=True)


def _truths(runs: xr.Dataset, shorter: xr.Dataset, horizon: int) -> pd.DataFrame:
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
        tried = np.unique(of["learning_rate"].values)
        best = float(found["best_rate"])
        row = {name: float(found[name]) for name in ("slow_edge", "useful_edge", "explosion_edge", "best_loss")}
        row["best_rate"] = best if tried[0] < best < tried[-1] else math.nan
        row |= {"smallest": tried[0], "largest": tried[-1], "is_learned": bool(found["is_learned"])}
        rows.append(row | {"key": design_key(settings), "horizon": horizon, "schedule": schedule})
    return pd.DataFrame(rows)


def table(rates: xr.Dataset, pilots: xr.Dataset) -> pd.DataFrame:
    """What each round of each pilot found and what the runs showed, by horizon; ``is_last``: what a pilot answers from.

    A pilot without an answer has one row, whose round is empty.
    """
    import pandas as pd

    named = designs()
    rows = []
    for i, design in enumerate(named):
        for budget in pilots["budget"].values.tolist():
            of = pilots.isel(design=i).sel(budget=budget)
            if np.isnan(of["n_updates"]):
                continue  # not made yet
            about = {"architecture": design.architecture.name, "family": design.architecture.family, "set": design.set}
            about |= {"key": design_key(design.run(0, 1).as_dict()), "optimizer": design.optimizer, "budget": budget}
            known = np.flatnonzero(np.isfinite(of["useful_edge"].values)) if of["is_learned"] == 1 else []
            for at in known:
                found = {f"{name}_pilot": float(of[name][at]) for name in FOUND}
                found |= {"round": ROUNDS[at], "updates": float(of["updates"][at]), "is_last": at == known[-1]}
                rows.append(about | found)
            if not len(known):
                rows.append(about | {"round": "", "is_last": True})
    return pd.DataFrame(rows).merge(truths(rates), on="key")


def inputs(rows: pd.DataFrame, names: tuple[str, ...]) -> np.ndarray:
    """Features of rows, shape (row, feature)."""
    values = []
    for row in rows.itertuples():
        plan = TrainingPlan(n_steps=int(row.horizon), schedule=row.schedule)
        values.append(features(int(row.updates), row.best_rate_pilot, row.useful_edge_pilot, plan))
    return np.array([[one[name] for name in names] for one in values]).reshape(len(rows), len(names))


def changes(rows: pd.DataFrame, target: str) -> np.ndarray:
    """Logarithm of the rate of the training over that of the pilot; NaN: one of them is not known."""
    return np.log(rows[target].to_numpy() / rows[f"{SOURCES[target]}_pilot"].to_numpy())


def weights(rows: pd.DataFrame, target: str, names: tuple[str, ...]) -> np.ndarray:
    """Weights of least absolute error."""
    from sklearn.linear_model import QuantileRegressor

    model = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
    return np.asarray(model.fit(inputs(rows, names), changes(rows, target)).coef_)


def fitted(rows: pd.DataFrame, target: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Weights, and the quantiles of the errors for families left out."""
    known = rows[np.isfinite(changes(rows, target))]
    y, error = changes(known, target), np.full(len(known), np.nan)
    for family in known["family"].unique():
        is_out = (known["family"] == family).to_numpy()
        error[is_out] = y[is_out] - inputs(known[is_out], names) @ weights(known[~is_out], target, names)
    low, high = np.quantile(error, TAILS)
    found = weights(known, target, names)
    return {
        "weights": {name: round(float(value), 4) for name, value in zip(names, found, strict=True)},
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "n_rows": len(y),
    }


def errors(rows: pd.DataFrame, drift: dict[str, Any], target: str) -> np.ndarray:
    """Logarithm of the estimate over the measured rate; NaN: one of them is not known."""
    found = np.full(len(rows), np.nan)
    for kind in ROUNDS:
        is_it = ((rows["round"] == kind) & np.isfinite(changes(rows, target))).to_numpy()
        names = tuple(drift[kind][target]["weights"])
        values = np.array(list(drift[kind][target]["weights"].values()))
        found[is_it] = inputs(rows[is_it], names) @ values - changes(rows[is_it], target)
    return found


def drift_of(of_fit: pd.DataFrame, names: tuple[str, ...]) -> dict[str, Any]:
    """What `workbench.rates.drift` reads."""
    found: dict[str, Any] = {"longest": int(of_fit["horizon"].max())}
    for kind in ROUNDS:
        rows = of_fit[of_fit["round"] == kind]
        growth = float((rows["horizon"] / rows["updates"]).max())
        found[kind] = {target: fitted(rows, target, names) for target in SOURCES} | {"largest_growth": round(growth, 1)}
    return found


def accuracy(rows: pd.DataFrame, drift: dict[str, Any], by: list[str]) -> pd.DataFrame:
    """Shares of designs whose useful edge is within a factor; a design without an answer is outside.

    Beside them those of the median edge of all designs of the set "fit", and of those with the same optimizer.
    """
    import pandas as pd

    rows = rows[np.isfinite(rows["useful_edge"]) & rows["is_last"]].copy()
    rows["error"] = errors(rows, drift, "useful_edge")
    of_fit = rows[(rows["set"] == "fit") & (rows["budget"] == rows["budget"].max())]
    edge = np.log(rows["useful_edge"])
    rows["one rate"] = np.log(of_fit["useful_edge"]).median() - edge
    medians = np.log(of_fit["useful_edge"]).groupby(of_fit["optimizer"]).median()
    rows["by optimizer"] = rows["optimizer"].map(medians) - edge
    low, high = (
        rows["round"].map({kind: drift[kind]["useful_edge"][end] for kind in ROUNDS}) for end in ("low", "high")
    )
    rows["is in interval"] = (-rows["error"] >= low) & (-rows["error"] <= high)
    found = []
    for name, group in rows.groupby(by, sort=False):
        row: dict[str, Any] = dict(zip(by, name, strict=True)) | {"designs": len(group)}
        row["no answer"] = float(group["error"].isna().mean())
        for factor in FACTORS:
            for what, column in (("", "error"), ("one rate, ", "one rate"), ("by optimizer, ", "by optimizer")):
                row[f"{what}{factor}"] = float((group[column].abs() <= math.log(factor)).mean())
        row["in interval"] = float(group["is in interval"][group["error"].notna()].mean())
        found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Fit, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--rates", type=Path, default=here / "rates.nc")
    parser.add_argument("--pilots", type=Path, default=here / "rate_pilots.nc")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--table", type=Path, default=here / "rate_accuracy.csv")
    parser.add_argument("--locked", action="store_true", help="judge on the locked set too")
    args = parser.parse_args()
    with xr.open_dataset(args.rates) as rates, xr.open_dataset(args.pilots) as pilots:
        rows = table(rates.load(), pilots.load())
    if not args.locked:
        rows = rows[rows["set"] != "locked"]
    of_fit = rows[rows["set"] == "fit"]
    judged: dict[tuple[str, ...], float] = {}
    choose = rows[(rows["set"] == "choose") & (rows["budget"] == rows["budget"].max()) & rows["is_last"]]
    for names in TRIED:
        judged[names] = float(np.nanmedian(np.abs(errors(choose, drift_of(of_fit, names), "useful_edge"))))
        print(f"{', '.join(names)}: median error on the set choose {math.exp(judged[names]):.2f}")
    drift = drift_of(of_fit, min(judged, key=lambda names: judged[names]))
    found = accuracy(rows, drift, ["set", "budget", "horizon"])
    print(found.to_string(index=False, float_format=lambda value: f"{value:.2f}"))
    with replacing(args.table) as partial:
        found.to_csv(partial, index=False, float_format="%.3f")
    with replacing(args.out) as partial:
        partial.write_text(json.dumps({"call": "python data/fit_rates.py", **drift}, indent=1) + "\n")


if __name__ == "__main__":
    main()
