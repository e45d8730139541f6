"""Update the causes of a diagnosis by the outcome of a replay."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from workbench.diagnosis.diagnose import answer_of
from workbench.diagnosis.experiments import FIXED_COST
from workbench.diagnosis.ranking import REPLAYED

if TYPE_CHECKING:
    import xarray as xr

    from workbench.diagnosis.ranking import Rules


def weigh(tree: xr.DataTree, change: str, *, supports: bool, rules: Rules) -> None:
    """Update the causes of a diagnosis by the outcome of one replay, in place.

    Args:
        tree: Tree from `workbench.diagnose`.
        change: Cause that the replay was for.
        supports: Whether the replay supported that cause.
        rules: Rules of the diagnosis, with the frequencies of outcomes in recorded replays.
    """
    import xarray as xr

    causes = tree["causes"].to_dataset()
    before = dict(zip(map(str, causes["cause"].values), causes["probability"].values.tolist(), strict=True))
    after = rules.after(before, change, supports=supports)
    established = json.loads(tree.attrs.get("established", "[]"))
    possible = established or rules.set_of(after, REPLAYED)
    causes = causes.sel(cause=list(after))
    causes["probability"].values[:] = list(after.values())
    causes["is_possible"].values[:] = [cause in possible for cause in after]
    tree["causes"] = xr.DataTree(causes)
    experiments = tree["experiments"].to_dataset().copy(deep=True)
    information = np.array([rules.information(after, str(cause)) for cause in experiments["cause"].values])
    if "is_done" in experiments:  # repeating an experiment adds no information
        information[experiments["is_done"].values] = 0.0
    experiments["information"].values[:] = information
    worth = information / (experiments["cost"].values + FIXED_COST)
    experiments["order"].values[np.argsort(-worth, kind="stable")] = np.arange(1, len(worth) + 1)
    tree["experiments"] = xr.DataTree(experiments)
    layers = dict(zip(map(str, causes["cause"].values), causes["layer"].values.tolist(), strict=True))
    tree.attrs |= answer_of(tree.attrs, after, layers, possible)
    tree.attrs.pop("coverage", None)  # the coverage was measured without replays
    tree.attrs["n_replays"] = int(tree.attrs.get("n_replays", 0)) + 1
