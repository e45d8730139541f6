"""Assess four published designs under one plan, for notebook 08: built from their configurations, no weights fetched.

    python data/make_assessments.py
    python data/make_assessments.py --again    # concludes again from what was recorded; nothing is measured

Reads ``notebooks/plan.toml``; writes ``data/assessments.nc``, the comparison with the assessment of each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

import workbench as wb
from workbench.assessment.assess import conclude, stands_for_nothing
from workbench.assessment.design_comparison import OF_RISK, dominated
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.plan_risk import plan_risk

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "notebooks" / "plan.toml"
DESIGNS = ("gpt2", "llama-2-7b", "mixtral-8x7b", "mamba-130m")
SEED = 0


def measured() -> xr.DataTree:
    """All designs, assessed."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    return wb.compare_designs({name: name for name in DESIGNS}, plan=PLAN, seed=SEED, progress=say)


def concluded_again(recorded: xr.DataTree) -> xr.DataTree:
    """A comparison of stand-ins whose risks, criteria, verdicts and decisions follow from the recorded numbers."""
    comparison, plan = recorded.copy(deep=True), wb.hardware.read_plan(PLAN)
    table = comparison["designs"].to_dataset()
    rows: dict[str, list] = {name: [] for name in ("verdict", "rate_margin", *OF_RISK)}
    about = {name: dict(table[name].attrs) for name in ("verdict", "rate_margin")}
    for name in table["design"].values.tolist():
        tree = comparison[name].copy()  # so that it is a root with attributes of its own
        case = tree["case"].to_dataset()
        tree["risk"] = xr.DataTree(plan_risk(case, stand_in=stands_for_nothing(Sizes.of(tree))))
        conclude(tree, plan)
        comparison[name] = tree
        risk = tree["risk"].to_dataset().isel(run=0)
        found = {column: float(risk[column]) for column in OF_RISK}
        found["rate_margin"] = found["useful_edge"] / float(case["learning_rate"][0])
        about |= {column: dict(risk[column].attrs) for column in OF_RISK}
        for column, value in ({"verdict": tree.attrs["verdict"]} | found).items():
            rows[column].append(value)
    table = table.assign({name: ("design", np.array(values), about[name]) for name, values in rows.items()})
    comparison["designs"] = xr.DataTree(
        table.assign(is_dominated=("design", dominated(table), table["is_dominated"].attrs))
    )
    return comparison


def main() -> None:
    """Assess, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="conclude again from what was recorded")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tree = concluded_again(wb.samples.assessments().load()) if given.again else measured()
    tree.attrs["call"] = "python data/make_assessments.py" + " --again" * given.again
    wb.export_netcdf(tree, ROOT / "data" / "assessments.nc", overwrite=True)


if __name__ == "__main__":
    main()
