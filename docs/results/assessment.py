"""Tables of the page on assessments, from the recorded designs."""

from pathlib import Path

import pandas as pd
from scipy.stats import binomtest

import workbench as wb
from workbench.assessment.decisions import STOP_MARGIN
from workbench.formatting import percent

BAD = ("at risk", "failing", "refuse")
GROUPS = {
    "test families, train": (True, False),
    "test families, fail": (True, True),
    "other families, train": (False, False),
    "other families, fail": (False, True),
}


def verdicts():
    """Return how many designs that train and that fail are flagged, by part of the assessment."""
    designs = wb.samples.open("assessed_designs").drop_dims("window").to_dataframe()
    # A design with an injected fault that did no harm counts neither as failing nor as sound.
    designs = designs[designs["fails"] | (designs["kind"] != "planted")]
    rows = []
    for name, (is_test, fails) in GROUPS.items():
        of = designs[((designs["set"] == "locked") == is_test) & (designs["fails"] == fails)]
        flagged = {column: int(of[column].isin(BAD).sum()) for column in ("verdict", "structure", "pilot")}
        ends = binomtest(flagged["verdict"], len(of)).proportion_ci(method="exact")
        interval = f"{100 * ends.low:.0f} to {100 * ends.high:.0f} %"
        rows.append({
            "": name,
            "designs": len(of),
            "flagged": f"{flagged['verdict']} ({percent(flagged['verdict'] / len(of))}; {interval})",
            "by structure": flagged["structure"],
            "by pilot": flagged["pilot"],
            "by settings alone": int(of["settings_state"].isin(BAD).sum()),
            "cannot say": int((of["verdict"] == "cannot say").sum()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def missed():
    """Return the faults that fail, and how many of their designs are flagged."""
    designs = wb.samples.open("assessed_designs").drop_dims("window").to_dataframe()
    failing = designs[(designs["kind"] == "planted") & designs["fails"]]
    counts = failing.assign(flagged=failing["verdict"].isin(BAD)).groupby("fault")["flagged"].agg(["size", "sum"])
    counts = counts.sort_values(["size", "sum"], ascending=False).reset_index()
    return counts.rename(columns={"fault": "fault", "size": "designs that fail", "sum": "flagged"})


def ranking():
    """Return how often pilots rank two designs correctly, by their budget."""
    rows = read("ranking_accuracy.csv").query("optimizers == 'any'")
    return pd.DataFrame({
        "set": [set_name(name) for name in rows["set"]],
        "updates of a pilot": rows["budget"].values,
        "pairs": rows["pairs"].values,
        "ranked correctly": [
            f"{percent(row.right)} ({100 * row.low:.0f} to {100 * row.high:.0f} %)" for row in rows.itertuples()
        ],
        "by number of parameters": rows["more weights"].map(percent).values,
    })  # fmt: skip


def stopping():
    """Return the fractions of runs that the rule of the pilot and the simplest rule stop after 80 updates."""
    rows = read("stop_rules.csv")
    rows = rows[(rows["after"] == 80) & (rows["margin"] == STOP_MARGIN)]
    columns = {
        "bad stopped": "bad runs stopped", "good stopped": "good runs stopped", "saved": "updates saved",
        "bad stopped, plainest": "bad runs, simplest rule", "good stopped, plainest": "good runs, simplest rule",
    }  # fmt: skip
    about = pd.DataFrame({"training": rows["updates"].values, "set": [set_name(name) for name in rows["set"]]})
    return about.join(rows[[*columns]].map(percent).rename(columns=columns).reset_index(drop=True))


def set_name(name):
    """Return the name of a set for readers."""
    return "test" if name == "locked" else "training and validation"


def read(name):
    """Return a recorded table."""
    return pd.read_csv(Path(wb.__file__).parent / "data" / name)
