"""The tables of spectra.md, from data/initialization, data/divergence.nc and data/smollm2.nc."""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

import workbench as wb
from workbench.formatting import percent, short

DATA = Path(__file__).resolve().parents[2] / "data"
NAMES = {
    "near_unit_mass": "M",
    "expansive_mass": "expansive mass",
    "contractive_mass": "contractive mass",
    "spectral_radius": "spectral radius",
    "nonlinearity_ratio": "nonlinearity ratio",
    "reliable_fraction": "reliable modes",
}


def norms():
    """Normalizations at initialization, and how many of their runs diverged."""
    table = _initialization("norms", ["near_unit_mass", "expansive_mass", "spectral_radius"])
    diverged = wb.samples.open("divergence_table")["has_diverged"].stack(run=["learning_rate", "seed"])
    published = wb.published.architectures()["divergence_rate"]
    cells = []
    for name in table["architecture"]:
        if name not in diverged["architecture"]:
            cells.append("")
            continue
        own = diverged.sel(architecture=name)
        paper = f" ({percent(float(published.sel(architecture=name)))})" if name in published["architecture"] else ""
        cells.append(f"{int(own.sum())} of {own.size}{paper}")
    return table.assign(diverged=cells)


def architectures():
    """Other architectures at initialization."""
    return _initialization("architectures", [name for name in NAMES if name != "expansive_mass"])


def depth():
    """SmolLM2-135M by thirds of its depth, for different states and ranks."""
    measured = xr.load_dataset(DATA / "smollm2.nc")
    rows = []
    for name in measured["variant"].values[:-1]:  # the last one includes the first token
        of = measured.sel(variant=name)
        thirds = wb.depth_thirds(of)
        rank = " to ".join(dict.fromkeys(f"{float(value):.0f}" for value in (of["rank"].min(), of["rank"].max())))
        rows.append({"states": name, "rank": rank, **_thirds(thirds)})
    for name, of in wb.published.depth_thirds().groupby("model"):
        rows.append({"states": f"{name}, published", "rank": "", **_thirds(of.squeeze("model"))})
    return pd.DataFrame(rows)


def weights():
    """Medians over the weight matrices of the blocks of each model."""
    of = xr.load_dataset(DATA / "smollm2.nc")[["n_spikes", "alpha", "ks_distance", "model"]].to_dataframe()
    medians = of.groupby("model", sort=False).median()
    return pd.DataFrame(
        {
            "model": medians.index,
            "spikes": [f"{value:g}" for value in medians["n_spikes"]],
            "alpha": [f"{value:.1f}" for value in medians["alpha"]],
            "distance D of the fit": [f"{value:.2f}" for value in medians["ks_distance"]],
        }
    )


def _initialization(table, variables):
    """Means over the seeds, with the published figures in brackets."""
    ours = wb.samples.open(f"initialization/{table}").sel(source="ours").mean("seed")
    published = wb.published.architectures().reindex(architecture=ours["published_as"].values)
    columns = {NAMES[each]: list(map(_beside, ours[each].values, published[each].values)) for each in variables}
    return pd.DataFrame({"architecture": ours["architecture"].values, **columns})


def _beside(ours, published):
    paper = "" if np.isnan(published) else f" ({published:.2f})"
    return "" if np.isnan(ours) else f"{ours:.2f}{paper}"


def _thirds(of):
    """The measures of the early, middle and late third."""
    return {
        "M": ", ".join(f"{value:.2f}" for value in of["near_unit_mass"].values),
        "nonlinearity ratio": ", ".join(f"{value:.2f}" for value in of["nonlinearity_ratio"].values),
        "eigenvector condition": ", ".join(short(value, digits=2) for value in of["eigenvector_condition"].values),
    }
