"""The tables of moe_routing.md, from data/routing.nc."""

from pathlib import Path

import pandas as pd
import xarray as xr

DATA = Path(__file__).resolve().parents[2] / "data" / "routing.nc"
#: First of the steps over which the measurements are averaged.
TAIL = 200
NAMES = {
    "router_similarity": "router similarity",
    "routing_entropy_share": "normalized routing entropy",
    "max_violation": "MaxVio",
    "loss": "loss (nat)",
}
#: Fault, symptom and the sign of its published change.
PUBLISHED = [
    ("rate x 10", "routing_entropy_share", -1),
    ("rate x 10", "router_similarity", 1),
    ("rate x 40", "routing_entropy_share", -1),
    ("rate x 40", "router_similarity", 1),
    ("batch of 2", "routing_entropy_share", -1),
    ("batch of 2", "max_violation", 1),
    ("no auxiliary loss", "routing_entropy_share", -1),
    ("no auxiliary loss", "max_violation", 1),
    ("batch of 2, no auxiliary loss", "routing_entropy_share", -1),
    ("batch of 2, no auxiliary loss", "max_violation", 1),
]


def values():
    """Means over the last steps by run and seed."""
    mean, _ = _tail()
    return _table(mean[list(NAMES)], "{:.2f}")


def changes():
    """Differences from the balanced run in standard deviations of its measurements."""
    _, change = _tail()
    return _table(change[list(NAMES)].drop_sel(case="balanced"), "{:+.1f}")


def published():
    """In how many seeds the published change is clear."""
    _, change = _tail()
    rows = []
    for case, symptom, sign in PUBLISHED:
        found = change[symptom].sel(case=case) * sign
        rows.append(
            {
                "run": case,
                "published": f"{NAMES[symptom]} {'increases' if sign > 0 else 'decreases'}",
                "seeds in which it is clear": f"{int((found > 2).sum())} of {found.size}",
            }
        )
    return pd.DataFrame(rows)


def _tail():
    """Means over the last steps, and their differences from the balanced run over its standard deviation."""
    tail = xr.load_dataset(DATA).sel(step=slice(TAIL, None))
    mean, balanced = tail.mean("step"), tail.sel(case="balanced")
    return mean, (mean - balanced.mean("step")) / balanced.std("step", ddof=1)


def _table(of, form):
    cells = {
        NAMES[name]: [", ".join(form.format(value) for value in row) for row in of[name].values]
        for name in of.data_vars
    }
    return pd.DataFrame({f"run, seeds {', '.join(map(str, of['seed'].values))}": of["case"].values, **cells})
