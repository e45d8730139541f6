"""Tables of the page on early warning, from the recorded runs of the test set."""

from pathlib import Path

import numpy as np
import pandas as pd

import workbench as wb
from workbench.formatting import percent, title_of

DETECTORS = ("all alarms", "loss alone", "gradient norm alone")


def goals():
    """Return the goals, their targets, and how often each detector reaches them."""
    found = wb.early_warning.goals(test_set())
    table = pd.DataFrame({"goal": found["goal"].values, "target": [percent(asked) for asked in found["asked"].values]})
    for name in DETECTORS:
        of = found.sel(detector=name).to_dataframe()
        table[name] = [reached(row) for row in of.itertuples()]
    counts = wb.early_warning.false_alarms(test_set()).to_dataframe()
    false = [f"{row.n_alarms}: {row.rate:.1f} ({row.low:.1f} to {row.high:.1f})" for row in counts.itertuples()]
    table.loc[len(table)] = ["false alarms, and their rate per 100,000 healthy steps", "at most 1", *false]
    return table


def reached(row):
    """Return a count with its percentage and interval, or nothing if the goal does not apply."""
    if np.isnan(row.share):
        return ""
    return f"{row.n_reached:.0f} of {row.n} ({percent(row.share)}; {100 * row.low:.0f} to {100 * row.high:.0f} %)"


def kinds():
    """Return the runs, alarms and median delays by kind of fault."""
    of = wb.early_warning.by_kind(test_set()).to_dataframe().reset_index()
    delays = {"delay": "delay", "delay_of_loss": "delay of the loss", "delay_of_grad_norm": "delay of the norm"}
    of[[*delays]] = of[[*delays]].map(known)
    counts = {"n_runs": "runs", "n_harmful": "harmed", "n_soon": "soon", "n_named": "cause named first"}
    of["first_signal"] = of["first_signal"].map(title_of)
    return of.rename(columns=counts | delays | {"first_signal": "first signal"})


def misses():
    """Return the harmed runs without an alarm within 50 steps, or with another cause named first."""
    runs = test_set()
    is_late = wb.early_warning.delays(runs).fillna(np.inf) > wb.early_warning.SOON
    is_wrong = runs["first_cause"] != runs["expected_cause"]
    of = runs.isel(run=(wb.early_warning.harmful(runs) & (is_late | is_wrong)).values).to_dataframe()
    names = {
        "setup": "setup", "kind": "kind", "dose": "dose", "start": "onset", "harm_step": "visibly worse",
        "first_step": "first alarm", "first_signal": "its signal", "first_cause": "cause named",
        "loss_step": "alarm of the loss alone", "grad_norm_step": "of the gradient norm alone",
    }  # fmt: skip
    return written(of.sort_values(["setup", "kind", "dose"]), names)


def late():
    """Return the decoders that failed late without a fault."""
    runs = test_set()
    of = runs.isel(run=((runs["kind"] == "late") & runs["is_harmful"]).values).to_dataframe()
    of["lead"] = of["harm_step"] - of["first_step"]
    of["name"] = of["name"].str.removeprefix("late_rms_norm_")
    names = {"name": "run", "harm_step": "visibly worse", "first_step": "first alarm", "lead": "steps before"}
    return written(of, names | {"first_signal": "its signal"})


def by_hand():
    """Return the alarms on faults that were written into a training loop, by fault."""
    rows = hand_faults().query("fault.notna()")
    rows = rows.assign(soon=rows["delay"] <= 25, named=rows["cause"] == rows["expected"])
    of = rows.groupby("fault", sort=False).agg(
        runs=("soon", "size"), within=("soon", "sum"), delay=("delay", "median"), longest=("delay", "max"),
        signal=("signal", lambda signals: ", ".join(sorted(set(signals.dropna())))), named=("named", "sum"),
    )  # fmt: skip
    names = {
        "fault": "fault", "runs": "runs", "within": "alarm within 25 steps", "delay": "median delay",
        "longest": "longest delay", "signal": "first signal", "named": "cause right, or unknown if no known fault",
    }  # fmt: skip
    return written(of.reset_index(), names)


def by_hand_locked():
    """Return the alarms on faults that were written by hand in the test set, by fault, beside three baselines."""
    rows = hand_faults("hand_faults_locked").query("kind.notna()")
    rows = rows.assign(any_loss_step=rows[["loss_step", "floor_step"]].min(axis=1))
    delay = rows["first_step"] - rows["start"]
    is_right, is_unknown = rows["first_cause"] == rows["expected_cause"], rows["first_cause"] == "unknown"
    within = {name: rows[f"{name}_step"].notna() for name in ("loss", "any_loss", "grad_norm")}
    rows = rows.assign(
        soon=delay <= 25, found=delay.notna(), delay=delay, right=is_right & ~is_unknown, unknown=is_unknown,
        wrong=rows["first_cause"].notna() & ~is_right & ~is_unknown, **within,
    )  # fmt: skip
    of = rows.groupby("kind", sort=False).agg(
        runs=("soon", "size"), soon=("soon", "sum"), found=("found", "sum"), delay=("delay", "median"),
        signal=("first_signal", lambda signals: ", ".join(sorted(set(signals.dropna())))), right=("right", "sum"),
        unknown=("unknown", "sum"), wrong=("wrong", "sum"), loss=("loss", "sum"), any_loss=("any_loss", "sum"),
        grad_norm=("grad_norm", "sum"),
    )  # fmt: skip
    names = {
        "kind": "fault", "runs": "runs", "soon": "alarm within 25 steps", "found": "within 100 steps",
        "delay": "median delay", "signal": "first signal", "right": "cause named right", "unknown": "unknown",
        "wrong": "wrong", "loss": "loss alone", "any_loss": "loss alone, with its floor",
        "grad_norm": "gradient norm alone",
    }  # fmt: skip
    return written(of.reset_index(), names)


def hand_faults(name="hand_faults"):
    """Return the runs with faults written by hand, and their healthy controls."""
    return pd.read_csv(Path(__file__).parents[2] / "data" / f"{name}.csv")


def written(table, names):
    """Return the named columns as text, with "none" for a step without an alarm."""
    of = table[[*names]].copy()
    for name in of.columns:
        text = of[name].map(lambda value: known(value) or "none") if of[name].dtype.kind == "f" else of[name]
        of[name] = text.astype(str).map(title_of)
    return of.rename(columns=names)


def known(value):
    """Return a number as text, or nothing if it is not defined."""
    return "" if np.isnan(value) else f"{value:g}"


def test_set():
    """Return the runs of the test set."""
    return wb.early_warning.of_set(wb.samples.open("early_warning"), "locked")
