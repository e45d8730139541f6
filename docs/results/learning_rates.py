"""Tables of the page on learning rates and risk, from the recorded accuracy of pilots and of the risk model."""

from pathlib import Path

import pandas as pd

import workbench as wb
from workbench.formatting import percent

SETS = {"fit": "training", "choose": "validation", "locked": "test"}
FACTORS = ("1.6", "2.5")
BUDGETS = (300, 600, 1000)
HORIZONS = (240, 480, 2000)
#: Numbers of updates after which the runs of one seed were evaluated, the smallest first.
PREFIXES = (120, 240, 360, 480)
PREDICTORS = {
    "rate alone": "rate alone",
    "table": "**table** (ships)",
    "table, M": "table, M",
    "table, all of RKSP": "table, all of RKSP",
    "table, curvature after 100 updates": "table, curvature after 100 updates",
    "pilot": "pilot of 1,000 updates",
    "table, where the pilot answers": "the table, where the pilot answers",
    "pilot and table": "pilot and table",
}


def pilots():
    """Return the fractions of designs whose useful edge is estimated within both factors."""
    rows = read("rate_accuracy.csv").set_index(["set", "horizon", "kind", "budget"])
    table = []
    for name, title in SETS.items():
        for horizon in HORIZONS:
            of = {budget: rows.loc[name, horizon, "model", budget] for budget in BUDGETS}
            best = of[max(BUDGETS)]
            row = {"set": title, "updates of the training": f"{horizon:,}", "designs": int(best["designs"])}
            row |= {f"pilot of {budget:,}": within(of[budget]) for budget in BUDGETS}
            row |= {
                "its 80 % interval": f"{best['in interval']:.2f}",
                "losses of a loop": within(rows.loc[name, horizon, "loop", max(BUDGETS)]),
                "median edge of the optimizer": within(best, "by optimizer, "),
                "one rate for all": within(best, "one rate, "),
            }
            table.append(row)
    return pd.DataFrame(table)


def seeds():
    """Return how well all runs of one seed estimate the useful edge of the other seeds."""
    rows = read("rate_accuracy.csv").query("kind == 'one seed'")
    budgets = sorted(set(rows["budget"]))
    lengths = dict(zip(budgets, PREFIXES, strict=True))
    rows = rows[rows["budget"].map(lengths) >= min(HORIZONS)]
    return pd.DataFrame({
        "set": rows["set"].map(SETS),
        "updates of each run": rows["budget"].map(lengths),
        "updates together": rows["budget"].map("{:,}".format),
        "designs": rows["designs"],
        "within both factors": [within(row) for _, row in rows.iterrows()],
    })  # fmt: skip


def risk():
    """Return the accuracy of predictors of the risk on the test set."""
    rows = read("risk_accuracy.csv").query("set == 'locked'").set_index(["rates", "predictor"])
    table = []
    for name, title in PREDICTORS.items():
        grid, near = rows.loc["grid", name], rows.loc["around the edge", name]
        table.append({
            "": title,
            "AUROC on a grid of rates": area(grid),
            "AUROC around the edge": area(near),
            "ECE on the grid": f"{grid['ECE']:.3f}",
            "ECE around the edge": f"{near['ECE']:.3f}",
            "edge within both factors": within(grid, "edge within "),
            "no answer": percent(grid["no answer"]),
        })  # fmt: skip
    return pd.DataFrame(table)


def gains():
    """Return the gains in likelihood over the table, by group of features."""
    rows = read("risk_gains.csv")
    return pd.DataFrame({
        "features": rows["features"],
        "gain, nat for each design": [f"{r.gain:+.3f} [{r.low:+.3f}, {r.high:+.3f}]" for r in rows.itertuples()],
        "samples of families with a gain": rows["share that gains"].map("{:.1%}".format).str.replace("%", " %"),
    })  # fmt: skip


def within(row, before=""):
    """Return the fractions within both factors."""
    return ", ".join(f"{row[f'{before}{factor}']:.2f}" for factor in FACTORS)


def area(row):
    """Return an AUROC with its interval."""
    return f"{row['AUROC']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def read(name):
    """Return a recorded table."""
    return pd.read_csv(Path(wb.__file__).parent / "data" / name)
