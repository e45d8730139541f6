"""The numbers of the page on assessments are recomputed from the recorded designs and tables."""

import csv

import numpy as np
import pytest
import xarray as xr

from tests.docs.page_numbers import ROOT, check_page, page_module
from workbench.assessment.decisions import STOP_MARGIN
from workbench.schema.statuses import Verdict

pytestmark = pytest.mark.recorded

PAGE = "docs/results/assessment.md"
BAD = {"at risk", "failing", "refuse"}


@pytest.fixture(scope="module")
def designs():
    with xr.open_dataset(ROOT / "data" / "assessed_designs.nc") as data:
        return data.drop_dims("window").load().to_dataframe()


@pytest.fixture(scope="module")
def rows(designs):
    """The designs that count, as dictionaries."""
    found = designs[designs["fails"] | (designs["kind"] != "planted")]
    return found.reset_index().to_dict("records")


def n_flagged(rows, column="verdict"):
    return sum(row[column] in BAD for row in rows)


def part(rows, *, is_test, fails):
    return [row for row in rows if (row["set"] == "locked") == is_test and row["fails"] == fails]


def test_every_number_of_the_page(designs, rows):
    fails, trains = part(rows, is_test=True, fails=True), part(rows, is_test=True, fails=False)
    published = designs[designs["kind"] == "published"]
    ratio = (published["learning_rate"] / published["useful_edge"]).dropna()
    failing = [row for row in rows if row["fails"]]
    missed = [row for row in failing if row["verdict"] not in BAD]
    of_rates = [row for row in missed if "the rate" in row["fault"]]
    bare = [row for row in missed if row["fault"] == "no normalization"]
    assert all(row["pilot"] == "healthy" for row in of_rates)
    assert all("12 blocks" in row["base"] for row in bare)
    claims = (
        f"{n_flagged(fails)} of {len(fails)} that fail are flagged, and {n_flagged(trains)} of {len(trains)} that",
        f"{len(published)} published designs of {published['family'].nunique()} families",
        f"{(designs['kind'] == 'sound').sum()} small designs",
        f"{ratio.min():.1f} to {ratio.max():.0f} times the estimated useful edge (median {ratio.median():.1f})",
        f"Of {len(failing)} designs with an injected fault that fail, {len(missed)} are not flagged.",
        f"{len(of_rates)} of these have learning rates",
        f"{len(bare)} are stacks of 12 blocks",
    )
    settings = (
        "at most 5 % flagged and at most 10 % \"cannot say\"", "that fail, 90 % flagged", "60 % by structure alone",
        "to flag 90 % of", "interval of 95 %", "of width 64", "as 1 / width", "within 480 updates",
        "target: 80 % ranked correctly, from pilots of 300 updates", f"by {STOP_MARGIN} nat",
        "is for 80 updates", "runs of 2,000 updates",
        "3 means that the input is invalid, and 5 that", "Status 0 is", "status 4 is",
        ", ".join(f"{verdict.exit_status} {verdict}" for verdict in sorted(Verdict, key=lambda one: one.exit_status)),
    )  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def test_targets_are_reached_as_stated(rows):
    for is_test in (True, False):
        trains = part(rows, is_test=is_test, fails=False)
        assert n_flagged(trains) / len(trains) <= 0.05
        assert sum(row["verdict"] == "cannot say" for row in trains) / len(trains) <= 0.1
    fails = part(rows, is_test=True, fails=True)
    assert n_flagged(fails, "structure") / len(fails) >= 0.6
    assert n_flagged(fails) / len(fails) < 0.9


def test_the_table_of_verdicts_has_the_counts_of_the_designs(rows):
    table = page_module(PAGE).verdicts().to_dict("records")
    cases = [(True, False), (True, True), (False, False), (False, True)]
    for row, (is_test, fails) in zip(table, cases, strict=True):
        own = part(rows, is_test=is_test, fails=fails)
        assert row["designs"] == len(own)
        n = n_flagged(own)
        assert row["flagged"].startswith(f"{n} ({100 * n / len(own):.0f} %; ")
        assert row["by structure"] == n_flagged(own, "structure")
        assert row["by pilot"] == n_flagged(own, "pilot")
        assert row["by settings alone"] == sum(one["settings_state"] != "healthy" for one in own)
        assert row["cannot say"] == sum(one["verdict"] == "cannot say" for one in own)


def test_the_other_tables_have_the_recorded_values(rows):
    module = page_module(PAGE)
    missed = module.missed()
    failing = [row for row in rows if row["fails"]]
    assert missed["designs that fail"].sum() == len(failing)
    assert missed["flagged"].sum() == n_flagged(failing)
    with (ROOT / "data" / "ranking_accuracy.csv").open() as file:
        right = [row["right"] for row in csv.DictReader(file) if row["optimizers"] == "any"]
    shown = module.ranking()["ranked correctly"].str.extract(r"^(\d+) %")[0].astype(float)
    np.testing.assert_allclose(shown, [100 * float(value) for value in right], atol=0.51)
    with (ROOT / "data" / "stop_rules.csv").open() as file:
        stops = [row for row in csv.DictReader(file) if (row["after"], float(row["margin"])) == ("80", STOP_MARGIN)]
    shown = module.stopping()["bad runs stopped"].str.extract(r"^(\d+) %")[0].astype(float)
    np.testing.assert_allclose(shown, [100 * float(row["bad stopped"]) for row in stops], atol=0.51)
