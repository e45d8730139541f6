"""Tables of the page on diagnosis, from the recorded runs of the test set."""

from pathlib import Path

import numpy as np
import pandas as pd

import workbench as wb
from workbench.diagnosis import CAUSES
from workbench.formatting import capitalized

READ = {
    "store": "everything",
    "recorder": "without the configuration",
    "mechanism": "**what the run did alone**",
    "mechanism and one replay": "the same, and one replay",
    "log": "a log of loss, gradient norm, rate, batch size",
    "curves": "loss and gradient norm alone",
    "settings alone": "settings alone",
    "majority class": "always the most frequent cause",
}
#: Answers that are a single cause and not a set.
SINGLE = ("settings alone", "majority class")


def accuracy():
    """Return how often the answers are right, by what the diagnosis reads."""
    rows = pd.read_csv(Path(wb.__file__).parent / "data" / "diagnosis_accuracy.csv").query("set == 'locked'")
    rows = rows.set_index("answer").loc[[*READ]]
    # The file has three decimals; the counts are exact.
    for name in ("first", "covered", "size", "missed", "healthy"):
        of = "sound" if name == "healthy" else "failed"
        rows[name] = (rows[name] * rows[of]).round() / rows[of]
    is_single = rows.index.isin(SINGLE)
    return pd.DataFrame({
        "read": [*READ.values()],
        "first cause is right": with_interval(rows, "first"),
        "set holds all causes": np.where(is_single, "", with_interval(rows, "covered")),
        "its mean size": np.where(is_single, "", rows["size"].map("{:.2f}".format)),
        "failed, called healthy": rows["missed"].map("{:.2f}".format),
        "healthy, called healthy": with_interval(rows, "healthy"),
    })  # fmt: skip


def with_interval(rows, name):
    """Return a column of fractions with their intervals."""
    values = rows[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
    return [f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in values]


def unknown():
    """Return the answers for runs of kinds that the rules were not fitted to, one kind left out at a time."""
    rows = pd.read_csv(Path(wb.__file__).parent / "data" / "unknown_causes.csv").query("set == 'locked'")
    rows = rows.set_index("view").loc[["store", "mechanism", "log", "curves"]].reset_index()
    return pd.DataFrame({
        "read": rows["view"].map(READ),
        "answer": rows["answer"],
        "another cause": rows["unknown"].map("{:.2f}".format),
        "nothing": rows["nothing"].map("{:.2f}".format),
        "a wrong cause with at least 50 %": rows["sure_and_wrong"].map("{:.2f}".format),
        "known kinds: first cause is right": rows["right"].map("{:.2f}".format),
    })  # fmt: skip


def causes():
    """Return the answers from what the failed runs did alone, by true cause."""
    runs = wb.samples.open("failures")
    runs = runs.isel(run=(runs["set"] == "locked").values).sel(view="mechanism")
    truth, inside = runs["is_cause"].values, runs["is_in_set"].values
    first = runs["probability"].values.argmax(axis=1)
    rows = []
    for k, name in enumerate(runs["ranked_cause"].values.tolist()):
        own = truth[:, k]
        if name != "nothing":
            found = {"named first": (first[own] == k).mean(), "in the set": inside[own, k].mean()}
            row = {"cause": capitalized(CAUSES[name].title), "failed runs": int(own.sum())}
            rows.append(row | {name: f"{value:.2f}" for name, value in found.items()})
    return pd.DataFrame(rows)
