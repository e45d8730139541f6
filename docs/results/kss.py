"""The tables of kss.md, from data/shaping.nc and data/kss_rates.nc."""

from pathlib import Path

import numpy as np
import pandas as pd

import workbench as wb
from workbench.formatting import percent

#: Controls of the first table, and the names of the same controls in data/kss_rates.nc.
CONTROLS = {
    "none": "none",
    "clip 1.0": "clipped at 1",
    "KSS .15, published": "KSS, published",
    "KSS, best": "KSS, recommended",
}
#: Claim -> the two controls that it compares.
CLAIMS = {
    "published KSS saves runs": ("KSS .15, published", "none"),
    "clipping saves runs": ("clip 1.0", "none"),
    "recommended KSS saves runs": ("KSS, best", "none"),
    "recommended KSS saves runs that clipping does not": ("KSS, best", "clip 1.0"),
    "recommended KSS saves runs that weight norm does not": ("KSS, best", "weight norm"),
    "a stronger published dose saves more: .20 over .10": ("KSS .20, published", "KSS .10, published"),
    "the near-unit term is needed": ("KSS .15, published", "KSS .15, unstable term only"),
    "the unstable term is needed": ("KSS .15, published", "KSS .15, near-unit term only"),
    "published KSS adds to SAM": ("SAM 0.05 + KSS .15, published", "SAM 0.05"),
    "published KSS adds to LAMB": ("LAMB + KSS .15, published", "LAMB"),
    "published KSS adds to muP": ("muP + KSS .15, published", "muP"),
    "recommended KSS adds to SAM": ("SAM 0.05 + KSS, best", "SAM 0.05"),
    "recommended KSS adds to LAMB": ("LAMB + KSS, best", "LAMB"),
    "recommended KSS adds to muP": ("muP + KSS, best", "muP"),
}


def published():
    """Return the published results of KSS and of other controls on No-Norm at rates from 0.005 to 0.01, as fractions.

    They are those of the tables of KSS in RKSP, empty if not published. It is unknown whether the accuracies include
    runs that diverged. The radius of SAM in the combination is unknown, and muP's overhead of "less than 1 %" is
    entered as 1 %.
    """
    table = pd.read_csv(Path(__file__).parents[2] / "data" / "published_shaping.csv", index_col="control")
    percent_of = {name: table[name] / 100 for name in ("accuracy", "overhead")}
    return table.assign(divergence_rate=table["diverged"] / table["runs"], **percent_of)


def divergence():
    """Outcomes of the four main controls at nine learning rates."""
    runs = wb.samples.open("shaping", "controls")
    rates = wb.outcomes.divergence_rates(runs)
    largest = wb.outcomes.largest_rate_without_explosion(runs)
    rows = []
    for name, label in CONTROLS.items():
        pair = wb.outcomes.accuracy_where_both_converge(runs, name, "none")
        own, edge = rates.sel(control=name), largest.sel(control=name)
        rows.append(
            {
                "control": label,
                **_diverged(rates, name),
                "95 % interval": f"{100 * float(own['low']):.0f} to {100 * float(own['high']):.0f} %",
                "largest rate without explosion": f"{float(edge):g}{' (largest tried)' if edge.is_lower_bound else ''}",
                "accuracy": f"{float(pair['accuracy'].mean()):.3f}",
                "accuracy of *none* in these cells": f"{float(pair['reference_accuracy'].mean()):.3f}",
            }
        )
    return pd.DataFrame(rows)


def useful():
    """Useful edge and best loss of each control relative to no control, by architecture."""
    outcomes = wb.rates.rate_outcomes(wb.samples.open("kss_rates"), against="none").to_dataframe()
    by = outcomes.set_index(["architecture", "study"])[["useful_edge", "best_loss"]]
    rows = []
    for architecture in outcomes["architecture"].unique():
        none = by.loc[architecture, "none"]
        row = {"architecture": architecture, "none": f"{none.useful_edge:.2g}, {none.best_loss:.2f}"}
        for control in list(CONTROLS.values())[1:]:
            own = by.loc[architecture, control]
            ratio = own.useful_edge / none.useful_edge
            edge = "none" if np.isnan(ratio) else f"x {ratio:.2f}"
            row[control] = f"{edge}, {own.best_loss - none.best_loss:+.3f}"
        rows.append(row)
    return pd.DataFrame(rows)


def controls():
    """All controls on the cells that all of them share, with the published figures."""
    runs = wb.outcomes.shared_cells(wb.samples.open("shaping", "controls", "tables"))
    rates = wb.outcomes.divergence_rates(runs)
    paper = published().reindex(rates["control"].values)
    paper_gain = (paper["accuracy"] - paper["accuracy"]["none"]).where(paper.index != "none")
    rows = []
    for name in rates["control"].values.tolist():
        pair = wb.outcomes.divergence_where_both_ran(runs, name, "none")
        gain = wb.outcomes.accuracy_where_both_converge(runs, name, "none")["gain"]
        rows.append(
            {
                "control": name,
                **_diverged(rates, name),
                "saved, lost": f"{int(pair['n_saved'])}, {int(pair['n_lost'])}",
                "accuracy gained (cells)": f"{float(gain.mean()):+.3f} ({gain.size})" if gain.size else "",
                "published gain": _unless_nan("{:+.3f}", paper_gain[name]),
                "M at the end": _unless_nan("{:.2f}", rates["near_unit_mass"].sel(control=name)),
                "published M": _unless_nan("{:.2f}", paper["near_unit_mass"][name]),
            }
        )
    return pd.DataFrame(rows)


def doses():
    """Forms and doses of KSS."""
    rates = wb.outcomes.divergence_rates(wb.samples.open("shaping", "doses")).to_dataframe()
    return pd.DataFrame(
        {
            "form, strength / interval": rates.index,
            "diverged": [f"{k} of {n}" for k, n in zip(rates["n_diverged"], rates["n_runs"], strict=True)],
            "accuracy of those that converge": [_unless_nan("{:.3f}", value) for value in rates["accuracy"]],
            "M at the end": [_unless_nan("{:.2f}", value) for value in rates["near_unit_mass"]],
        }
    )


def claims():
    """Pairs of controls on the same learning rates and seeds, by an exact test of saved and lost runs."""
    main, shared = (
        wb.samples.open("shaping", "controls"),
        wb.outcomes.shared_cells(wb.samples.open("shaping", "controls", "tables")),
    )
    rows = []
    for claim, (control, other) in CLAIMS.items():
        runs = main if {control, other} <= set(CONTROLS) else shared
        pair = wb.outcomes.divergence_where_both_ran(runs, control, other)
        gain = wb.outcomes.accuracy_where_both_converge(runs, control, other)["gain"].values
        saved, lost, p = int(pair["n_saved"]), int(pair["n_lost"]), float(pair["p_value"])
        error = f" ± {gain.std(ddof=1) / np.sqrt(gain.size):.3f}" if gain.size > 1 else ""
        rows.append(
            {
                "claim": claim,
                "runs each": int(pair["n_cells"]),
                "saved": saved,
                "lost": lost,
                "p": f"{p:.2g}",
                "holds": "undecided" if p >= 0.05 else "yes" if saved > lost else "no, the opposite",
                "accuracy gained": f"{gain.mean():+.3f}{error}" if gain.size else "",
            }
        )
    return pd.DataFrame(rows)


def _diverged(rates, control):
    """Columns of the divergence under a control: the count, and the published fraction."""
    own = rates.sel(control=control)
    theirs = published()["divergence_rate"]
    return {
        "diverged": f"{int(own['n_diverged'])} of {int(own['n_runs'])}",
        "published": percent(theirs[control]) if control in theirs else "",
    }


def _unless_nan(form, value):
    return "" if np.isnan(value) else form.format(float(value))
