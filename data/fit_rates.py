"""Fit how learning rates change from a pilot to the training, and measure the accuracy of `wb.find_rate`.

    python data/fit_rates.py                         # fits to the set "fit", chooses and evaluates on "choose"
    python data/fit_rates.py --locked                # also evaluates once on "locked", after a fit to both others

Reads ``rates.nc`` and ``rate_pilots.jsonl``. Features are chosen on the validation set ("choose"). The chosen features
are fitted to both sets and written to ``workbench/rates/shipped/drift.json``; the printed table is written to
``rate_accuracy.csv``. Its rows "one seed" are not estimates: they measure how well the full grid of runs of one seed
predicts the useful edge of the other seeds, which is the random part of the errors.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from make_pilots import recorded
from rate_designs import designs

import workbench as wb
from workbench.io.atomic import replacing
from workbench.rates.find_rate import SOURCES, features
from workbench.rates.outcomes import design_key, rate_outcomes
from workbench.rates.rate_search import LONGEST_SHARE
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(wb.rates.__file__).parent / "shipped" / "drift.json"
KINDS, ROUNDS = ("model", "loop"), ("coarse", "fine")
#: Rates that a round of a pilot estimates.
FOUND = ("best_rate", "useful_edge")
#: Sets of features of `workbench.rates.find_rate.features` to try, in this order.
TRIED = tuple(("constant", "growth", "decays", "width")[:n] for n in (1, 2, 3, 4))
#: Fractions of the designs of other families that lie below and above the interval.
TAILS = (0.1, 0.9)
#: Horizons of designs with a constant rate; the horizon of other designs is the end of their schedule.
HORIZONS = (120, 240, 480)
FACTORS = (1.6, 2.5)
#: Updates after which the runs of one seed are evaluated; losses were measured there and after four fifths of them.
PREFIXES = (120, 240, 360, 480)
#: Sets that may be used for decisions: the training set and the validation set.
OPEN_SETS = ("fit", "choose")


def read(file: Path, *, has_locked: bool) -> xr.Dataset:
    """Return the recorded study, with or without the test set (``locked``)."""
    rates = xr.load_dataset(file)
    return rates if has_locked else rates.isel(run=rates["study"].values != "locked")


def truths(rates: xr.Dataset) -> pd.DataFrame:
    """Return measured best rate and useful edge of each design by horizon; NaN if outside of the tried rates."""
    import pandas as pd

    stage, n_steps = rates["stage"].values, rates["n_steps"].values
    short = rates.isel(run=np.isin(stage, ["coarse", "fine", "wider"]))
    shorter, long = rates.isel(run=stage == "shorter"), rates.isel(run=stage == "long")
    found = [_truths(short, shorter, horizon) for horizon in HORIZONS]
    if long.sizes["run"]:
        found.append(_truths(long, shorter, int(n_steps.max())))
    return pd.concat(found, ignore_index=True)


def _truths(runs: xr.Dataset, shorter: xr.Dataset, horizon: int) -> pd.DataFrame:
    """Return the outcomes of designs after ``horizon`` updates."""
    import pandas as pd

    rows = []
    for cell in dict.fromkeys(runs["cell"].values.tolist()):
        of = runs.isel(run=runs["cell"].values == cell)
        settings = json.loads(str(of["settings"].values[0]))
        schedule = settings["training"]["schedule"]
        if schedule != "constant" and settings["training"]["n_steps"] != horizon:
            continue
        found = rate_outcomes(of, shorter=shorter, n_steps=horizon).isel(cell=0)
        best, *tried = (float(found[name]) for name in ("best_rate", "smallest_rate", "largest_rate"))
        row = {name: float(found[name]) for name in ("slow_edge", "useful_edge", "explosion_edge", "best_loss")}
        row["best_rate"] = best if tried[0] < best < tried[1] else math.nan
        row |= {"smallest": tried[0], "largest": tried[1], "is_learned": bool(found["is_learned"])}
        rows.append(row | {"key": design_key(settings), "horizon": horizon, "schedule": schedule})
    return pd.DataFrame(rows)


def table(rates: xr.Dataset, pilots: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the results of each round of each pilot with the measured outcomes, by horizon.

    ``is_last`` marks the round that a pilot answers from. A pilot without an answer has one row, whose round is empty.
    Trainings shorter than the longest runs of a pilot are excluded, because a pilot for them would not have such runs.
    """
    import pandas as pd

    named = {one.run(0, 1).cell: one for one in designs()}
    rows = []
    for pilot in pilots:
        design = named[pilot["cell"]]
        about = {"architecture": design.architecture.name, "family": design.architecture.family, "set": design.set}
        about |= {"key": design_key(design.run(0, 1).as_dict()), "optimizer": design.optimizer}
        about |= {"kind": pilot["kind"], "budget": pilot["budget"]}
        last = {ROUNDS[not one["is_coarse"]]: one for one in pilot["rounds"]}  # a repeated round contains more rates
        known = {name: one for name, one in last.items() if pilot["is_learned"] and math.isfinite(one["useful_edge"])}
        for name, one in known.items():
            found = {f"{rate}_pilot": one[rate] for rate in FOUND}
            rows.append(about | found | {"round": name, "updates": one["n_updates"], "is_last": name == [*known][-1]})
        if not known:
            rows.append(about | {"round": "", "is_last": True})
    found = pd.DataFrame(rows).merge(truths(rates), on="key")
    return found[found["horizon"] >= LONGEST_SHARE * found["budget"]].reset_index(drop=True)


def inputs(rows: pd.DataFrame, names: tuple[str, ...]) -> np.ndarray:
    """Return features, shape (row, feature)."""
    values = []
    for row in rows.itertuples():
        plan = TrainingPlan(n_steps=int(row.horizon), schedule=row.schedule)
        values.append(features(int(row.updates), row.best_rate_pilot, row.useful_edge_pilot, plan))
    return np.array([[one[name] for name in names] for one in values]).reshape(len(rows), len(names))


def changes(rows: pd.DataFrame, target: str) -> np.ndarray:
    """Return the logarithm of the rate of the training over that of the pilot; NaN if one of them is unknown."""
    return np.log(rows[target].to_numpy() / rows[f"{SOURCES[target]}_pilot"].to_numpy())


def weights(rows: pd.DataFrame, target: str, names: tuple[str, ...]) -> np.ndarray:
    """Return the weights with the smallest absolute error."""
    from sklearn.linear_model import QuantileRegressor

    model = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
    return np.asarray(model.fit(inputs(rows, names), changes(rows, target)).coef_)


def fitted(rows: pd.DataFrame, target: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return weights, and quantiles of the errors on held-out families."""
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
    """Return the logarithm of the estimate over the measured rate; NaN if one of them is unknown."""
    found = np.full(len(rows), np.nan)
    for kind, which in product(KINDS, ROUNDS):
        is_it = (rows["kind"] == kind) & (rows["round"] == which) & np.isfinite(changes(rows, target))
        if is_it.any():
            weights = drift[kind][which][target]["weights"]
            values = inputs(rows[is_it], tuple(weights)) @ np.array(list(weights.values()))
            found[is_it] = values - changes(rows[is_it], target)
    return found


def shipped_features() -> dict[str, tuple[str, ...]]:
    """Return the features of the shipped fit, by kind of pilot."""
    shipped = json.loads(SHIPPED.read_text())
    return {kind: tuple(shipped[kind]["fine"]["useful_edge"]["weights"]) for kind in KINDS}


def drift_of(of_fit: pd.DataFrame, names: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the content of the file that `workbench.rates.find_rate` reads, for features by kind of pilot."""
    found: dict[str, Any] = {"longest": int(of_fit["horizon"].max())}
    for (kind, which), rows in of_fit[of_fit["round"] != ""].groupby(["kind", "round"]):
        growth = float((rows["horizon"] / rows["updates"]).max())
        fits: dict[str, Any] = {target: fitted(rows, target, names[kind]) for target in SOURCES}
        found.setdefault(kind, {})[which] = fits | {"largest_growth": round(growth, 1)}
    return found


def judged(rows: pd.DataFrame, names: dict[str, tuple[str, ...]]) -> pd.DataFrame:
    """Return the rows that answer, with the errors of their useful edges and of two simpler rules.

    ``error`` is the logarithm of the estimate over the measured edge, NaN without an answer. ``one rate`` and
    ``by optimizer`` are the errors of the median edge of all designs of the fit, and of those with the same optimizer.
    ``is_in_interval`` is whether the measured edge lies in the interval. The sets "fit" and "choose" are evaluated
    after a fit to the set "fit" without the evaluated family, and "locked" after a fit to both.

    Args:
        rows: Rows from `table`.
        names: Features by kind of pilot.
    """
    import pandas as pd

    found = []
    for family, of_family in rows.groupby("family", sort=False):
        fitted_to = OPEN_SETS if (of_family["set"] == "locked").all() else OPEN_SETS[:1]
        others = rows[rows["set"].isin(fitted_to) & (rows["family"] != family)]
        drift = drift_of(others, names)
        answers = of_family[np.isfinite(of_family["useful_edge"]) & of_family["is_last"]].copy()
        answers["error"] = errors(answers, drift, "useful_edge")
        ends = [
            [drift[one.kind][one.round]["useful_edge"][end] if one.round else math.nan for one in answers.itertuples()]
            for end in ("low", "high")
        ]
        answers["is_in_interval"] = (-answers["error"]).between(*map(np.array, ends))
        once = others[others["is_last"] & (others["budget"] == others["budget"].max()) & (others["kind"] == "model")]
        edge = np.log(answers["useful_edge"])
        answers["one rate"] = np.log(once["useful_edge"]).median() - edge
        medians = np.log(once["useful_edge"]).groupby(once["optimizer"]).median()
        answers["by optimizer"] = answers["optimizer"].map(medians) - edge
        found.append(answers)
    return pd.concat(found)


def best_features(rows: pd.DataFrame, kind: str) -> tuple[str, ...]:
    """Return the features with the smallest median error on the set "choose", for the pilots of the largest budget."""
    medians = {}
    for names in TRIED:  # the simpler rules are taken from pilots of the first kind
        found = judged(rows[rows["kind"].isin([kind, KINDS[0]])], dict.fromkeys(KINDS, names))
        is_it = (found["set"] == "choose") & (found["kind"] == kind) & (found["budget"] == found["budget"].max())
        medians[names] = float(found["error"][is_it].abs().median())
        print(f"{kind}: {', '.join(names)}: median error on the set choose {math.exp(medians[names]):.2f}")
    return min(medians, key=lambda names: medians[names])


def by_one_seed(rates: xr.Dataset) -> pd.DataFrame:
    """Return how well all runs of one seed predict the useful edge of the other seeds, as rows of `judged`.

    This is a limit of the accuracy of any pilot. ``budget`` is the mean number of updates of the runs. For runs at a
    constant rate shorter horizons are evaluated too; the median change of the edge after them, over other families, is
    corrected for.

    Args:
        rates: Training runs at all rates.
    """
    import pandas as pd

    stage, whole = rates["stage"].values, max(HORIZONS)
    runs, shorter = rates.isel(run=np.isin(stage, ["coarse", "fine", "wider"])), rates.isel(run=stage == "shorter")
    n_cells = len(set(runs["cell"].values))
    named = {design_key(one.run(0, 1).as_dict()): one for one in designs()}
    found = []
    for seed in np.unique(runs["seed"].values):
        is_own = runs["seed"].values == seed
        others = _truths(runs.isel(run=~is_own), shorter, whole).set_index("key")["useful_edge"].dropna()
        for n_steps in PREFIXES:
            own = _truths(runs.isel(run=is_own), shorter, n_steps).set_index("key")["useful_edge"]
            both = others[others.index.isin(own.index)]
            rows = pd.DataFrame({"key": both.index, "error": np.log(own.reindex(both.index) / both).to_numpy()})
            n_rates = is_own.sum() / n_cells
            found.append(rows.assign(n_steps=n_steps, n_rates=n_rates))
    rows = pd.concat(found, ignore_index=True)
    rows["set"] = [named[key].set for key in rows["key"]]
    rows["family"] = [named[key].architecture.family for key in rows["key"]]
    budgets = rows.groupby("n_steps")["n_rates"].transform("mean") * rows["n_steps"]
    rows["budget"] = budgets.round().astype(int)
    for (family, n_steps), group in rows[rows["n_steps"] < whole].groupby(["family", "n_steps"]):
        is_other = (rows["n_steps"] == n_steps) & (rows["family"] != family) & rows["set"].isin(OPEN_SETS)
        rows.loc[group.index, "error"] -= rows["error"][is_other].median()
    return rows.assign(kind="one seed", horizon=whole)


def accuracy(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the fractions of designs whose useful edge is within a factor, by estimate.

    A design without an answer counts as outside.

    Args:
        rows: Rows from `judged`.
        by: Columns by which the rows are grouped.
    """
    import pandas as pd

    found = []
    for name, group in rows.groupby(by, sort=False):
        row: dict[str, Any] = dict(zip(by, name, strict=True)) | {"designs": group["key"].nunique()}
        row["no answer"] = float(group["error"].isna().mean())
        for factor in FACTORS:
            for what, column in (("", "error"), ("by optimizer, ", "by optimizer"), ("one rate, ", "one rate")):
                if column in group:
                    row[f"{what}{factor}"] = float((group[column].abs() <= math.log(factor)).mean())
        if "is_in_interval" in group:
            row["in interval"] = float(group["is_in_interval"][group["error"].notna()].mean())
        found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Fit, evaluate and write the files."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--rates", type=Path, default=here / "rates.nc")
    parser.add_argument("--pilots", type=Path, default=here / "rate_pilots.jsonl")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--table", type=Path, default=here / "rate_accuracy.csv")
    parser.add_argument("--locked", action="store_true", help="also evaluate on the test set (locked)")
    args = parser.parse_args()
    rates = read(args.rates, has_locked=args.locked)
    rows = table(rates, recorded(args.pilots))
    names = {kind: best_features(rows, kind) for kind in KINDS}
    columns = ["set", "kind", "budget", "horizon"]
    found = pd.concat([accuracy(one, columns) for one in (judged(rows, names), by_one_seed(rates))])
    print(found.to_string(index=False, float_format=lambda value: f"{value:.2f}"))
    with replacing(args.table) as partial:
        found.to_csv(partial, index=False, float_format="%.3f")
    drift = {"call": "python data/fit_rates.py"} | drift_of(rows[rows["set"].isin(OPEN_SETS)], names)
    with replacing(args.out) as partial:
        partial.write_text(json.dumps(drift, indent=1) + "\n")


if __name__ == "__main__":
    main()
