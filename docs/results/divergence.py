"""The table of divergence.md, from data/divergence_sweep.nc."""

import numpy as np
import pandas as pd

import workbench as wb

#: Column -> studies of the recorded sweep.
SETS = {"one scale": ("norms",), "five scales": ("norms", "scales"), "designs": ("held out",)}
NAMES = {
    "M": "M at initialization",
    "rho": "spectral radius",
    "kappa": "eigenvector condition kappa",
    "initial grad norm": "initial gradient norm",
    "grad norm at step 100": "gradient norm at step 100",
    "grad norm variance": "gradient variance, steps 1 to 100",
    "loss spikes": "loss spikes in 120 steps (published: 500)",
}


def predictors():
    """AUROC of each predictor of divergence on three sets of runs, and the published one."""
    sweep = wb.samples.open("divergence_sweep")
    tables = {
        name: wb.outcomes.predictor_table(sweep.isel(run=np.isin(sweep["study"], studies)))
        for name, studies in SETS.items()
    }
    designs = tables["designs"]
    columns = {
        "predictor": [NAMES.get(name, name) for name in designs["predictor"].values],
        "published": _cells(designs, "published_"),
        **{name: _cells(table) for name, table in tables.items()},
        "designs, within one architecture": [f"{x:.3f}" for x in designs["auroc_within_architecture"].values],
    }
    return pd.DataFrame(columns)


def _cells(table, prefix=""):
    """The values with their intervals, unless an interval is unknown or has no width."""
    values = (table[f"{prefix}{name}"].values for name in ("auroc", "low", "high"))
    return [
        f"{x:.3f}" if np.isnan(low) or low == high else f"{x:.3f} [{low:.3f}, {high:.3f}]"
        for x, low, high in zip(*values, strict=True)
    ]
