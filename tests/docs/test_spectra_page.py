"""The numbers of the page on spectra are recomputed from the recorded spectra by code of its own."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import workbench as wb
from tests.data_scripts import load_script
from tests.docs.page_numbers import ROOT, check_page, page_module

pytestmark = pytest.mark.recorded

PAGE = "docs/results/spectra.md"
DATA = ROOT / "data"
FIRST = "2,048 states with the first token"


def initialization(table):
    """Means over the seeds of our values; the seeds of M."""
    data = xr.load_dataset(DATA / "initialization" / f"{table}.nc").sel(source="ours")
    return data.mean("seed").to_dataframe(), data["near_unit_mass"].to_pandas()


@pytest.fixture(scope="module")
def smollm2():
    return xr.load_dataset(DATA / "smollm2.nc")


def thirds(of):
    return np.array([part.mean() for part in np.array_split(of.values, 3)])


def training(file):
    return xr.load_dataset(DATA / "runs" / file, group="spectra")["near_unit_mass"].mean("layer").to_series()


def claims_on_initialization():
    """Check what the page states without numbers, and return what it states with numbers."""
    norms, _ = initialization("norms")
    ours, by_seed = initialization("architectures")
    paper = wb.published.architectures().to_dataframe()
    m, radius, eta = (ours[name] for name in ("near_unit_mass", "spectral_radius", "nonlinearity_ratio"))
    off = (norms["near_unit_mass"] - paper["near_unit_mass"]).abs()
    assert off.idxmax() == "No-Norm"
    for name in ("Pre-LN", "No-Norm"):
        assert abs(m[name] - paper.loc[name, "near_unit_mass"]) < 0.02
        assert abs(radius[name] / paper.loc[name, "spectral_radius"] - 1) < 0.03
        assert abs(eta[name] - paper.loc[name, "nonlinearity_ratio"]) > 0.1
    top = ["MoE top-1", "MoE top-2", "MoE top-4"]
    assert paper.loc[top, "near_unit_mass"].is_monotonic_decreasing
    assert all(of[top].is_monotonic_decreasing for _, of in by_seed.iterrows())
    assert (m[top] < paper["near_unit_mass"][top]).all()
    assert paper.loc[top, "nonlinearity_ratio"].is_monotonic_decreasing
    assert eta[["MoE top-1, normalized", *top[1:]]].is_monotonic_decreasing
    assert ours["contractive_mass"].idxmax() != "Mamba"
    assert paper["contractive_mass"].idxmax() == "Mamba"
    assert eta.idxmax() == "Mamba"
    assert eta["Mamba"] > eta["KAN B=4"] > eta["Pre-LN"]
    assert m["ViT Pre-LN"] >= m["ViT RMSNorm"]
    images = ["ViT Pre-LN", "ViT RMSNorm"]
    assert (m[images] < paper["near_unit_mass"][images]).all()
    reliable = ours["reliable_fraction"]
    assert reliable["KAN B=4, small"] > reliable["KAN B=8, small"]
    assert paper.loc["KAN B=4", "reliable_fraction"] > paper.loc["KAN B=8", "reliable_fraction"]
    assert f"{m['KAN B=4, small']:.2f}" == f"{paper.loc['KAN', 'near_unit_mass']:.2f}"
    diverged = xr.load_dataset(DATA / "divergence.nc")["has_diverged"]
    of = diverged.sel(architecture="No-Norm")
    assert int(diverged.sum()) == int(of.sum())
    return [
        f"{int(of.sum())} of {of.size} runs without normalization diverged, and none of the others",
        f"({norms.loc['No-Norm', 'near_unit_mass']:.2f} instead of {paper.loc['No-Norm', 'near_unit_mass']:.2f})",
        f"At width 256 (next table) M is {m['No-Norm']:.2f}",
        f"({norms.loc['SubLN', 'spectral_radius']:.2f} instead of {paper.loc['SubLN', 'spectral_radius']:.2f})",
        f"top-2 exceeds top-4 by {m['MoE top-2'] - m['MoE top-4']:.3f} only",
        f"published value ({m['MoE top-1, normalized']:.2f} instead of {paper.loc['MoE top-1', 'near_unit_mass']:.2f})",
        f"M is that published for KANs ({m['KAN B=4, small']:.2f})",
        f"a mean rank of {initialization_rank('ViT Pre-LN'):.0f} of 192",
    ]


def initialization_rank(name):
    return float(xr.load_dataset(DATA / "initialization" / "architectures.nc")["rank"].sel(architecture=name).mean())


def claims_on_smollm2(data):
    of = {str(name): data.sel(variant=name) for name in data["variant"].values}
    full, first = of["2,048 states"], of[FIRST]
    m = {name: thirds(each["near_unit_mass"]) for name, each in of.items()}
    by_rank, by_states = m["2,048 states, 32 directions"] / m["2,048 states"], m["1,024 states"] / m["2,048 states"]
    for name, variable, sign in (("M", "near_unit_mass", -1), ("eta", "nonlinearity_ratio", 1)):
        published = wb.published.depth_thirds()[variable] * sign
        assert (published.diff("third") > 0).all(), name
        assert not (np.diff(sign * thirds(full[variable])) > 0).all(), name
    eta = of["4 prompts"]["nonlinearity_ratio"].values
    assert np.abs(eta[1:]).max() < 0.005
    jump = (first["spectral_radius"] / full["spectral_radius"]).to_series()
    lost = (full["significant_digits"] - first["significant_digits"]).to_series()
    assert jump.idxmax() == 11
    assert (jump.drop(11) < 1.2).all()
    assert (lost[:11].abs() < 0.5).all()
    radius = full["spectral_radius"].to_series()
    weights = data[["n_spikes", "alpha", "role", "model"]].to_dataframe()
    spikes = weights.groupby("model")["n_spikes"].median()
    alpha = weights.groupby("model")["alpha"].median()
    assert spikes["untrained"] < spikes.drop("untrained").min()
    assert alpha["no_norm"] < alpha["untrained"] < alpha["SmolLM2-135M"]
    heavy = weights.query("model == 'SmolLM2-135M' and alpha < 2")
    assert set(heavy["role"]) == {"attention query", "attention key"}
    return [
        f"All {data.sizes['layer']} blocks of the 4-bit checkpoint",
        f"with 32 directions it is {by_rank.min():.1f} to {by_rank.max():.1f} times as large as with all "
        f"{int(full['rank'].max())} directions",
        f"decreases by at most {100 * (1 - by_states.min()):.0f} %",
        f"the nonlinearity ratio is {np.abs(eta[1:]).max():.0f}",
        f"an exception ({eta[0]:.2f})",
        f"its spectral radius is {radius[0]:.0f}, and the median of all blocks is {radius.median():.1f}",
        f"the spectral radius of block 11 is {jump[11]:.1f} times as large",
        f"lose {lost[12:].min():.1f} to {lost[12:].max():.1f} significant digits",
        f"all {len(heavy)} matrices with an alpha below 2 belong to queries and keys",
    ]


def claims_on_training():
    healthy, diverged = training("pre_ln-healthy.nc"), training("no_norm-diverged.nc")
    events = xr.load_dataset(DATA / "runs" / "no_norm-diverged.nc", group="events").to_dataframe()
    step = events.loc[events["kind"] == "divergence", "step"].item()
    return [
        f"Pre-LN rises from {healthy.iloc[0]:.2f} to {healthy.iloc[-1]:.2f} within {healthy.index[-1] + 1} steps",
        f"decreases from {diverged.iloc[0]:.2f} to {diverged.iloc[-1]:.2f} before it diverges at step {step}",
    ]


def test_every_number_is_that_of_the_data(smollm2):
    table = xr.load_dataset(DATA / "divergence.nc")
    rates = [f"{rate:g}" for rate in table["learning_rate"].values]
    settings = (
        f"learning rates {', '.join(rates[:-1])} and {rates[-1]}, four other seeds, {table.attrs['n_steps']} steps",
        "width 128, 4 blocks, initialization 0.02, 2,048 states", "width 256, 6 blocks", "width 192, 12 blocks",
        "where M = 1", "a weight of 1", "spline coefficients of 0.02", "the 0.1 of the KAN paper", "2 x 2 gray pixels",
        "with 4-bit weights", "SmolLM2", "Top-1", "top-1", "top-2", "top-4",
    )  # fmt: skip
    check_page(
        PAGE, [*claims_on_initialization(), *claims_on_smollm2(smollm2), *claims_on_training()], settings=settings
    )


def test_the_tables_have_the_values_of_the_data(smollm2):
    page = page_module(PAGE)
    for table, shown in (("norms", page.norms()), ("architectures", page.architectures())):
        ours, _ = initialization(table)
        assert shown["architecture"].tolist() == ours.index.tolist()
        for cell, value in zip(shown["M"], ours["near_unit_mass"], strict=True):
            assert cell.split(" ")[0] == ("" if np.isnan(value) else f"{value:.2f}")
    shown = page.depth().set_index("states")["M"]
    for name in smollm2["variant"].values[:-1]:
        expected = thirds(smollm2["near_unit_mass"].sel(variant=name))
        assert shown[name] == ", ".join(f"{value:.2f}" for value in expected)
    medians = smollm2[["n_spikes", "model"]].to_dataframe().groupby("model")["n_spikes"].median()
    pd.testing.assert_series_equal(
        page.weights().set_index("model")["spikes"].astype(float).sort_index(), medians.sort_index(), check_names=False
    )


@pytest.mark.medium
def test_the_recorded_weights_are_those_of_the_shipped_models(smollm2):
    found = wb.weights.weight_spectra(wb.samples.load("no_norm"), progress=False)
    own = smollm2.isel(matrix=smollm2["model"].values == "no_norm")
    for name in ("n_spikes", "alpha", "ks_distance"):
        np.testing.assert_allclose(own[name], found[name].values[found["layer"].values >= 0], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.smollm2
def test_a_block_of_smollm2_has_the_recorded_spectrum(smollm2):
    texts, options = load_script("make_smollm2").variants()["4 prompts, 32 directions"]
    model = wb.open_checkpoint(wb.samples.smollm2())
    found = wb.profile(model, texts, layers=[3], n_workers=1, progress=False, **options)
    own = smollm2.sel(variant="4 prompts, 32 directions", layer=[3])
    assert abs(found["near_unit_mass"] - own["near_unit_mass"]).max() <= 1 / 32
    np.testing.assert_allclose(found["spectral_radius"], own["spectral_radius"], rtol=0.01)
