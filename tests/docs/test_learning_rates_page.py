"""The numbers of the page on learning rates are recomputed from the recorded runs and tables."""

import csv
import json

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.docs.page_numbers import ROOT, check_page, page_module
from workbench.rates.outcomes import design_key
from workbench.risk.edge_model import groups_of

pytestmark = [pytest.mark.recorded, pytest.mark.medium]

PAGE = "docs/results/learning_rates.md"
OF_TITLE = {"training": "fit", "validation": "choose", "test": "locked"}


@pytest.fixture(scope="module")
def runs():
    return wb.samples.open("rate_study").load()


def read(name):
    with (ROOT / "data" / name).open() as file:
        return list(csv.DictReader(file))


def accuracy(name, horizon, budget="1000", kind="model"):
    wanted = (name, str(horizon), str(budget), kind)
    (row,) = [r for r in read("rate_accuracy.csv") if (r["set"], r["horizon"], r["budget"], r["kind"]) == wanted]
    return row


def counts(row, before=""):
    return " and ".join(f"{float(row[before + factor]) * int(row['designs']):.0f}" for factor in ("1.6", "2.5"))


def edges(runs):
    """Ratio of explosion and useful edge of the designs that learn; the largest tried rate if none explodes."""
    runs = runs.isel(window=slice(1))  # the training losses only count spikes, which takes long
    is_rate = np.isin(runs["stage"].values, ["coarse", "fine", "wider"])
    shorter, measured = (runs.isel(run=(runs["stage"] == name).values) for name in ("shorter", "measures"))
    outcomes = wb.rates.rate_outcomes(runs.isel(run=is_rate), shorter=shorter)
    first = runs.isel(run=is_rate)
    settings = zip(first["cell"].values, first["settings"].values, strict=True)
    keys = {cell: design_key(json.loads(text)) for cell, text in settings}
    of_group = zip(measured["settings"].values, groups_of(measured), strict=True)
    groups = {design_key(json.loads(text)): group for text, group in of_group}
    has_norm = np.array([groups[keys[cell]].endswith("with norm") for cell in outcomes["cell"].values])
    edge = outcomes["explosion_edge"].values
    ratio = np.where(np.isnan(edge), outcomes["largest_rate"].values, edge) / outcomes["useful_edge"].values
    return xr.Dataset(
        {"ratio": ("design", ratio), "explodes": ("design", np.isfinite(edge)), "has_norm": ("design", has_norm),
         "learns": ("design", outcomes["is_learned"].values), "study": ("design", outcomes["study"].values)}
    )  # fmt: skip


def test_every_number_of_the_page(runs):
    locked = accuracy("locked", 480)
    designs = edges(runs)
    with_norm = designs.isel(design=(designs["learns"] & designs["has_norm"]).values)
    without = designs.isel(design=(designs["learns"] & ~designs["has_norm"]).values)
    silent = designs["study"].values[~designs["learns"].values].tolist()
    assert silent == ["locked", "locked"]
    sizes = {name: int((designs["study"] == name).sum()) for name in ("fit", "choose", "locked")}
    families = json.loads(runs.attrs["families"])
    pilots = [row for row in read("rate_accuracy.csv") if (row["set"], row["kind"]) == ("locked", "model")]
    tested = [int(row["designs"]) for row in pilots]
    n, (close, far) = locked["designs"], counts(locked).split(" and ")
    claims = (
        f"For {close} of {n} held-out designs within a factor of 1.6, and for {far} of {n} within 2.5",
        f"the same optimizer reaches {counts(locked, 'by optimizer, ')}, one rate for all designs "
        f"{counts(locked, 'one rate, ')}.",
        f"{designs.sizes['design']} designs of {len(set(runs['architecture'].values.tolist()))} architectures in "
        f"{sum(map(len, families.values()))} families",
        f"{runs.sizes['run']:,} runs, {float(runs.attrs['core_minutes']) / 60:.1f} core hours",
        f"a training set ({sizes['fit']} designs), a validation set ({sizes['choose']}) and a test set "
        f"({sizes['locked']})",
        f"Of the {with_norm.sizes['design']} designs with a normalization that learn, only "
        f"{int(with_norm['explodes'].sum())} explode",
        f"median of {float(with_norm['ratio'].median()):.0f} times the useful edge",
        f"explosion edge is {float(without['ratio'].median()):.1f} times the useful edge (median of "
        f"{without.sizes['design']} designs)",
        f"changes a fraction by {100 / max(tested):.0f} to {100 / min(tested):.0f} percentage points",
        f"no training is longer than {int(runs['n_steps'].max()):,} updates",
    )
    settings = (
        "target of 80 % and 95 %", "a factor of 1.5 apart", "within a factor of 1.6 and of 2.5 (target: 0.80 and 0.95)",
        "within 1.6 for trainings of 240 updates", "for 480 updates in one, and for 2,000 in none",
        "(targets: AUROC 0.93, ECE 0.07, at most 10 % without", "within a factor of 5 of each", "from 1e-6 to 30",
        "pilot of 1,000 updates does not apply to trainings of 120 updates", "intervals of 80 %", "helps in 99 % of",
        "after 100 updates", "and 100 further updates",
    )  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def test_what_the_page_says_about_targets_and_baselines():
    better, reached = {}, {}
    for horizon in (240, 480, 2000):
        rows = [accuracy(name, horizon) for name in ("fit", "choose", "locked")]
        better[horizon] = sum(float(row["1.6"]) > float(row["by optimizer, 1.6"]) for row in rows)
        reached[horizon] = [sum(float(row[f]) >= asked for row in rows) for f, asked in (("1.6", 0.8), ("2.5", 0.95))]
    assert better == {240: 2, 480: 1, 2000: 0}
    assert reached == {240: [2, 0], 480: [0, 0], 2000: [0, 0]}
    risk = {(row["predictor"], row["rates"]): row for row in read("risk_accuracy.csv") if row["set"] == "locked"}
    grid, near = risk["table", "grid"], risk["table", "around the edge"]
    assert float(grid["AUROC"]) >= 0.93
    assert float(grid["ECE"]) <= 0.07
    assert float(near["AUROC"]) < 0.93
    assert float(near["ECE"]) > 0.07
    gains = {row["features"]: float(row["share that gains"]) for row in read("risk_gains.csv")}
    kept = [name for name, gain in gains.items() if gain >= 0.99]
    assert kept == ["table, curvature after 100 updates"]


def test_the_tables_have_the_recorded_fractions():
    module = page_module(PAGE)
    for row in module.pilots().to_dict("records"):
        name, horizon = OF_TITLE[row["set"]], row["updates of the training"].replace(",", "")
        for column, budget in (("pilot of 300", 300), ("pilot of 600", 600), ("pilot of 1,000", 1000)):
            of = accuracy(name, horizon, budget)
            assert row[column] == f"{float(of['1.6']):.2f}, {float(of['2.5']):.2f}"
        assert row["designs"] == int(of["designs"])
        assert row["its 80 % interval"] == f"{float(of['in interval']):.2f}"
        assert row["one rate for all"] == f"{float(of['one rate, 1.6']):.2f}, {float(of['one rate, 2.5']):.2f}"
        loop = accuracy(name, horizon, kind="loop")
        assert row["losses of a loop"] == f"{float(loop['1.6']):.2f}, {float(loop['2.5']):.2f}"
    of_seeds = module.seeds()
    assert len(of_seeds) == 9
    longest = of_seeds[of_seeds["updates of each run"] == 480]
    for row in longest.to_dict("records"):
        of = accuracy(OF_TITLE[row["set"]], 480, row["updates together"].replace(",", ""), "one seed")
        assert row["within both factors"] == f"{float(of['1.6']):.2f}, {float(of['2.5']):.2f}"
    risk = {(r["predictor"], r["rates"]): r for r in read("risk_accuracy.csv") if r["set"] == "locked"}
    for row, name in zip(module.risk().to_dict("records"), module.PREDICTORS, strict=True):
        for column, rates in (("AUROC on a grid of rates", "grid"), ("AUROC around the edge", "around the edge")):
            assert row[column].startswith(f"{float(risk[name, rates]['AUROC']):.3f} [")
    assert [float(text.split()[0]) for text in module.gains()["gain, nat for each design"]] == [
        float(row["gain"]) for row in read("risk_gains.csv")
    ]
