"""The tables of scaling.md, from data/scaling.nc and data/matched_width.nc."""

import numpy as np
import pandas as pd

import workbench as wb
from workbench.formatting import rounded

QUANTITIES = {
    "gain_by_depth": "scale-free gradient gain, per square root of the depth",
    "growth_by_depth": "growth of the residual stream",
    "function_change": "change of the predictions by the first update",
    "loss_over_guess": "initial loss over that of a uniform guess",
}


def edges():
    """Predicted and measured explosion edges."""
    data = wb.samples.open("scaling").sel(quantity="explosion_edge")
    rows = []
    for name in data["architecture"].values:
        of = data.sel(architecture=name)
        along = "width" if len(set(of["width"].values)) > 1 else "depth"
        predicted, measured = float(of["at_target"]), float(of["measured_at_target"])
        ladder = ", ".join(str(size) for size in of[along].values)
        last = float(of["explosion_edge"][-1])
        is_constant = along == "depth" or str(of["parametrization"].values)
        rule = last if is_constant else last * float(of["width"][-1] / of["target_width"])
        interval = f"[{rounded(float(of['at_target_low']))}, {rounded(float(of['at_target_high']))}]"
        rows.append(
            {
                "architecture": name,
                "ladder": f"{along} {ladder} to {int(of[f'target_{along}'])}",
                "largest model of the ladder": rounded(last),
                "predicted": f"{rounded(predicted)} {interval}",
                "measured": rounded(measured),
                "factor": f"{_factor(predicted, measured):.2f}",
                "factor of the rule": f"{_factor(rule, measured):.2f}",
            }
        )
    return pd.DataFrame(rows)


def _factor(predicted, measured):
    return np.exp(abs(np.log(predicted / measured)))


def coverage():
    """For each quantity, how many measured values lie in the interval that was predicted."""
    data = wb.samples.open("scaling")
    value = data["measured_at_target"]
    is_inside = (data["at_target_low"] <= value) & (value <= data["at_target_high"])
    counts = zip(is_inside.sum("architecture").values, value.notnull().sum("architecture").values, strict=True)
    names = [name.replace("_", " ") for name in data["quantity"].values]
    return pd.DataFrame({"quantity": names, "in the 95 % interval": [f"{k} of {n}" for k, n in counts]})


def proxies():
    """Root mean square of the logarithmic errors of narrow models, as factors."""
    data = wb.samples.open("matched_width")
    rows = []
    for name, label in QUANTITIES.items():
        error = np.log(data[name] / data[name].sel(size="target"))
        factor = np.exp(np.sqrt((error**2).mean("design")))
        shown = {size: f"{float(factor.sel(size=size)):.3g}" for size in ("thin", "matched")}
        rows.append({"quantity": label, "unscaled": f"x {shown['thin']}", "scaled": f"x {shown['matched']}"})
    return pd.DataFrame(rows)
