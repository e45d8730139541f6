"""Every number of docs/results/divergence.md is recomputed from data/ by code of its own."""

import json

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.docs.page_numbers import ROOT, check_page, page_module

DATA = ROOT / "data"

pytestmark = pytest.mark.recorded
PAGE = "docs/results/divergence.md"
PER_RUN = ["study", "architecture", "cell", "learning_rate", "seed", "init_std", "d_model", "n_layers", "has_diverged"]


@pytest.fixture(scope="module")
def runs():
    """All runs as a table; spectral measures are means over the layers."""
    names = ["near_unit_mass", "spectral_radius", "eigenvector_condition", "initial_grad_norm"]
    with xr.open_dataset(DATA / "divergence_sweep.nc") as data:
        table = data[[name for name in PER_RUN if name in data.variables]].load().to_dataframe()
        for name in names:
            values = data[name].load()
            table[name] = values.mean("layer") if "layer" in values.dims else values
        table.attrs["n_steps"] = int(data.attrs["n_steps"])
    table["has_diverged"] = table["has_diverged"].astype(bool)
    return table


def auroc(of, name):
    """Fraction of pairs of a diverged and another run that the score orders; ties count half."""
    known = of[np.isfinite(of[name])]
    yes, no = (known[name][known["has_diverged"] == side].to_numpy() for side in (True, False))
    return (yes[:, None] > no).mean() + 0.5 * (yes[:, None] == no).mean()


def calibration_error(of):
    """Mean distance of the rate of divergence from M, in ten bins of M of equal width, weighted by runs."""
    known = of[np.isfinite(of["near_unit_mass"])]
    bins = known.groupby(np.minimum((10 * known["near_unit_mass"]).astype(int), 9))
    gaps = (bins["has_diverged"].mean() - bins["near_unit_mass"].mean()).abs()
    return (gaps * bins.size()).sum() / bins.size().sum()


def start(name):
    """M before training, and the smallest learning rate at which a recorded architecture diverges."""
    file = DATA / "runs" / f"{name}-diverged.nc"
    configuration = json.loads(xr.load_dataset(file).attrs["configuration"])
    mass = xr.load_dataset(file, group="spectra")["near_unit_mass"]
    return float(mass.isel(step=0).mean()), configuration["training"]["learning_rate"]


def test_every_number_is_that_of_the_data(runs):
    norms, designs = runs.query("study == 'norms'"), runs.query("study == 'held out'")
    five = runs.query("study in ['norms', 'scales']")
    assert set(norms.query("has_diverged")["architecture"]) == {"No-Norm"}
    assert norms.query("architecture == 'No-Norm'")["has_diverged"].all()
    means = norms.groupby("architecture")[["spectral_radius", "initial_grad_norm"]].mean()
    assert (means.idxmin() == "No-Norm").all()
    best = wb.studies.outcomes.PUBLISHED_AUROC["M"][0]
    assert f"{auroc(norms, 'spectral_radius'):.3f}" == f"{auroc(norms, 'initial_grad_norm'):.3f}"
    mamba, none = start("mamba"), start("no_norm")
    assert f"{mamba[0]:.2f}" == f"{none[0]:.2f}"
    assert start("fixup")[1] == start("rezero")[1] == none[1]
    claims = [
        f"its AUROC is {auroc(norms, 'near_unit_mass'):.3f} (published: {best:.3f})",
        f"Among {designs['cell'].nunique()} designs of {designs['architecture'].nunique()} architectures it is "
        f"{auroc(designs, 'near_unit_mass'):.3f}",
        f"{len(runs):,} runs of {runs.attrs['n_steps']} steps at widths {runs['d_model'].min()} to "
        f"{runs['d_model'].max()} and depths {runs['n_layers'].min()} to {runs['n_layers'].max()}",
        f"ten seeds: {len(norms)} runs, of which {norms['has_diverged'].sum()} diverged",
        f"as well, {len(five)} runs",
        f"{len(designs)} runs, of which {designs['has_diverged'].sum()} diverged",
        f"predict the opposite (AUROC {auroc(norms, 'spectral_radius'):.3f})",
        f"starts at M = {mamba[0]:.2f}",
        f"is {mamba[1] / none[1]:.0f} times as large",
        f"a calibration error (ECE) of {calibration_error(designs):.3f} on the designs (published: 0.283)",
    ]
    settings = ("Table 2", "0.5 is chance", "below 0.5", "95 % intervals from 1,000 bootstrap", "initialization 0.02",
                '"at step 100"', "At width 64")  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def test_the_table_has_the_values_of_the_data(runs):
    table = page_module(PAGE).predictors().set_index("predictor")
    rows = {
        "M at initialization": "near_unit_mass", "spectral radius": "spectral_radius",
        "initial gradient norm": "initial_grad_norm",
    }  # fmt: skip
    sets = {"one scale": ["norms"], "five scales": ["norms", "scales"], "designs": ["held out"]}
    for row, name in rows.items():
        for column, studies in sets.items():
            expected = f"{auroc(runs[runs['study'].isin(studies)], name):.3f}"
            assert table.loc[row, column].split()[0] == expected, (row, column)
