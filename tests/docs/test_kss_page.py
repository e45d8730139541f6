"""The numbers of the page on KSS are recomputed from the recorded runs by code of its own."""

import json

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.data_scripts import load_script
from tests.docs.page_numbers import ROOT, check_page, page_module

pytestmark = pytest.mark.recorded

PAGE = "docs/results/kss.md"
CELL = ["learning_rate", "seed"]
PUBLISHED, BEST = "KSS .15, published", "KSS, best"
FIVE = ["Pre-LN", "RMSNorm", "MoE", "Mamba", "KAN"]


@pytest.fixture(scope="module")
def shaping():
    with xr.open_dataset(ROOT / "data" / "shaping.nc") as data:
        table = data.load().to_dataframe()
        table.attrs = dict(data.attrs)
    return table


@pytest.fixture(scope="module")
def controls(shaping):
    """Control -> its runs of the first study by cell."""
    return {name: of.set_index(CELL) for name, of in shaping.query("study == 'controls'").groupby("control")}


@pytest.fixture(scope="module")
def rates():
    """The runs of the study of useful rates, with their held-out losses at the end and after four fifths."""
    with xr.open_dataset(ROOT / "data" / "kss_rates.nc") as data:
        n_steps, minutes = int(data.attrs["n_steps"]), float(data.attrs["core_minutes"])
        table = data[["architecture", "study", *CELL, "has_diverged"]].load().to_dataframe()
        step, loss = data["evaluation_step"].values, data["held_out_loss"].values
    for name, at in (("loss", n_steps), ("earlier", 0.8 * n_steps)):
        table[name] = np.where((step == at) & np.isfinite(loss), loss, np.inf).min(axis=1)
    table.attrs = {"n_steps": n_steps, "core_hours": minutes / 60}
    return table


def both_converge(ours, other):
    cells = ours.index[~ours["has_diverged"] & ~other.loc[ours.index, "has_diverged"]]
    return ours.loc[cells, "accuracy"].mean(), other.loc[cells, "accuracy"].mean()


def n_of(runs):
    return f"{int(runs['has_diverged'].sum())} of {len(runs)}"


def test_every_number_is_that_of_the_data(shaping, controls, rates):
    none, published, best = controls["none"], controls[PUBLISHED], controls[BEST]
    script, about = load_script("make_shaping"), shaping.attrs
    model, task = json.loads(about["model"]), json.loads(about["task"])
    assert not best["has_diverged"].any()
    assert set(json.loads(about["tuning_seeds"])).isdisjoint(shaping["seed"])
    tried = none.reset_index()["learning_rate"]
    share = none.groupby("learning_rate")["has_diverged"].mean()
    edge = share[(share < 0.2).cummin()].index.max()
    above, up_to = (best.query(f"learning_rate {sign} {edge}")["accuracy"].mean() for sign in (">", "<="))
    own, reference = both_converge(published, none)
    shared = shaping.query("study in ['controls', 'tables']")
    shared = shared[shared["learning_rate"].isin(script.FEWER_RATES) & shared["seed"].isin(script.FEWER_SEEDS)]
    by_control = shared.groupby("control")["has_diverged"]
    n_each, n_diverged = by_control.size().unique().item(), by_control.sum()
    never = [
        "spectral norm",
        "weight norm",
        "LAMB",
        "muP",
        *[name for name in n_diverged.index if "+ KSS, best" in name],
    ]
    assert (n_diverged[never] == 0).all()
    n_dose = shaping.query("study == 'doses'").groupby("control").size().unique().item()
    claims = [
        f"{n_of(published)} runs diverged with it, and {int(none['has_diverged'].sum())} without any control",
        f"prevented it in all {len(best)} runs",
        f"(width {model['d_model']}, {model['n_layers']} blocks) on associative recall, trained for "
        f"{about['n_steps']} steps",
        f"{len(shaping)} runs",
        f"learning rates from {tried.min():g} to {tried.max():g}",
        f"guessing has {2 / task['vocab_size']:.3f}",
        f"its accuracy is {above:.2f} above the largest rate without explosion of training without control, and "
        f"{up_to:.2f} up to it",
        f"the accuracy is {own:.3f} instead of {reference:.3f}",
        f"M is {published['near_unit_mass'].mean():.2f} at the end, and {none['near_unit_mass'].mean():.2f} without "
        "control",
        f"Three learning rates around the explosion edge ({', '.join(map(str, script.FEWER_RATES))}) and three seeds, "
        f"{n_each} runs each",
        f"diverge in none of {n_each} runs",
        f"two other seeds, {n_dose} runs each",
        f"most rows have {n_each} runs",
        f"reaches {100 * 1.96**2 / (n_each + 1.96**2):.0f} % even if none of {n_each} runs",  # Wilson's interval of 0
        *claims_on_useful_rates(rates),
    ]
    settings = (
        f"{page_module(PAGE).published()['runs'].max()} runs per row",
        f"From {wb.KSS.recommended().options.n_snapshots} token states",
        "values below 1:", "p < 0.05", "test (1947)", "*rank 8*", "directions instead of 32", "at width 256",
        "the interval of 95 %",
    )  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def claims_on_useful_rates(rates):
    """By seed: useful edges relative to training without control, and changes of the best loss."""
    edge, best = {}, {}
    for key, of in rates.sort_values("learning_rate").groupby(["architecture", "study", "seed"]):
        without = rates.query(f"architecture == '{key[0]}' and study == 'none' and seed == {key[2]}")
        first = without.loc[without["loss"].idxmin()]
        edge[key] = useful_edge(of, max(first["earlier"], first["loss"] + 0.01))
        best[key] = of["loss"].min()
    names, seeds = rates["architecture"].unique(), sorted(rates["seed"].unique())

    def ratio(name, study, seed):
        return edge[name, study, seed] / edge[name, "none", seed]

    def change(name, study, seed):
        return best[name, study, seed] - best[name, "none", seed]

    def in_both(test):
        return [name for name in names if all(test(name, seed) for seed in seeds)]

    raised = in_both(lambda name, seed: ratio(name, "clipped at 1", seed) > 1)
    assert set(raised) == set(in_both(lambda name, seed: change(name, "clipped at 1", seed) < 0)) == set(FIVE)
    lowered = [-change(name, "clipped at 1", seed) for name in FIVE for seed in seeds]
    assert in_both(lambda name, seed: ratio(name, "KSS, recommended", seed) > 1) == ["ViT"]
    assert all(change(name, "KSS, recommended", seed) == 0 for name in FIVE for seed in seeds)
    assert all(np.mean([change(name, "KSS, published", seed) for seed in seeds]) > 0 for name in names)
    useless = in_both(lambda name, seed: np.isnan(edge[name, "KSS, published", seed]))
    between = [edge[name, "none", 1] / edge[name, "none", 2] for name in names]
    scatter = max(abs(best[name, study, 1] - best[name, study, 2]) for name, study, _ in best)
    tried = np.unique(rates.query("architecture == 'Pre-LN'")["learning_rate"])
    explosion = {study: explosion_edge(rates.query(f"architecture == 'No norm' and study == '{study}'"))
                 for study in ("none", "KSS, recommended")}  # fmt: skip
    assert (len(names), len(tried), len(seeds)) == (7, 8, 2)
    step = np.exp(np.diff(np.log(tried)).mean())
    return [
        f"{rates.attrs['n_steps']} updates, eight learning rates a factor of {step:.2f} apart, two seeds",
        f"{len(rates)} runs, {rates.attrs['core_hours']:.1f} core hours",
        f"a median factor of {np.exp(np.median(np.abs(np.log(between)))):.1f}, and best losses under one control "
        f"by up to {scatter:.2f}",
        f"raises the useful edge for {len(raised)} of {len(names)} architectures ({', '.join(FIVE)})",
        f"same five by {min(lowered):.3f} to {max(lowered):.3f}",
        f"from {explosion['none']:.3f} to {explosion['KSS, recommended']:.3f}",
        f"has no useful rate for {len(useless)} of {len(names)} architectures",
    ]


def useful_edge(runs, reference):
    """Largest useful rate of one seed next to the best one, interpolated in the logarithm; NaN if there is none."""
    excess, rate = (runs["loss"] - reference).to_numpy(), np.log(runs["learning_rate"].to_numpy())
    i = int(np.argmin(excess))
    if excess[i] > 0:
        return np.nan
    while i + 1 < len(excess) and excess[i + 1] <= 0:
        i += 1
    if i + 1 == len(excess):
        return np.exp(rate[i])
    share = -excess[i] / (excess[i + 1] - excess[i]) if np.isfinite(excess[i + 1]) else 0.0
    return np.exp(rate[i] + share * (rate[i + 1] - rate[i]))


def explosion_edge(runs):
    """Geometric mean of the smallest rate at which most runs diverge and the rate before."""
    share = runs.groupby("learning_rate")["has_diverged"].mean()
    i = int(np.flatnonzero(share > 0.5)[0])
    return np.sqrt(share.index[i] * share.index[i - 1])


@pytest.mark.medium
def test_the_tables_have_the_values_of_the_data(shaping, controls, rates):
    page = page_module(PAGE)
    assert page.divergence()["diverged"].tolist() == [n_of(controls[name]) for name in page.CONTROLS]
    for table, study in ((page.controls(), "tables"), (page.doses(), "doses")):
        own = shaping[shaping["study"] == study]
        shown = table.set_index(table.columns[0])["diverged"]
        for name, of in own.groupby("control"):
            assert shown[name] == n_of(of), name
    claims = page.claims().set_index("claim")
    ours, other = controls[BEST], controls["clip 1.0"].loc[controls[BEST].index]
    row = claims.loc["recommended KSS saves runs that clipping does not"]
    assert row["saved"] == (other["has_diverged"] & ~ours["has_diverged"]).sum()
    assert row["lost"] == (ours["has_diverged"] & ~other["has_diverged"]).sum()
    mean = rates.groupby(["architecture", "study", "learning_rate"])["loss"].mean()
    best = mean.groupby(["architecture", "study"]).min().unstack()
    useful = page.useful().set_index("architecture")
    for name in useful.index:
        assert useful.loc[name, "none"].endswith(f", {best.loc[name, 'none']:.2f}")
        for control in ("clipped at 1", "KSS, published", "KSS, recommended"):
            assert useful.loc[name, control].endswith(f", {best.loc[name, control] - best.loc[name, 'none']:+.3f}")
