"""The numbers of the page on diagnosis are recomputed from the answers for the recorded runs."""

import csv
import json

import numpy as np
import pytest
import xarray as xr

from tests.docs.page_numbers import ROOT, check_page, page_module

pytestmark = pytest.mark.recorded

PAGE = "docs/results/diagnosis.md"


@pytest.fixture(scope="module")
def study():
    return xr.load_dataset(ROOT / "data" / "failures.nc")


@pytest.fixture(scope="module")
def locked(study):
    return study.isel(run=(study["set"] == "locked").values)


@pytest.fixture(scope="module")
def recorded():
    with (ROOT / "data" / "diagnosis_accuracy.csv").open() as file:
        return {(row["set"], row["answer"]): row for row in csv.DictReader(file)}


def nothing(runs):
    return runs["ranked_cause"].values.tolist().index("nothing")


def failed(runs):
    return runs.isel(run=~runs["is_cause"].values[:, nothing(runs)])


def is_right(runs, probability):
    return runs["is_cause"].values[np.arange(runs.sizes["run"]), probability.argmax(1)]


def percent(value):
    return f"{100 * value:.0f} %"


def test_every_number_of_the_page(study, locked, recorded):
    of = failed(locked)
    one = of.sel(view="mechanism")
    truth, inside = of["is_cause"].values, one["is_in_set"].values
    right = is_right(of, one["probability"].values)
    first = one["probability"].values.argmax(1)
    settings_alone = is_right(of, of["probability_by_settings"].values).mean()
    lost = [percent(np.median(of["lost"].values[which])) for which in (~right, right, first == nothing(of))]
    n_steps = study.attrs["n_steps"]
    validation = recorded["choose", "mechanism and one replay"]
    claims = (
        f"the first cause is right in {percent(right.mean())} of {of.sizes['run']} failed runs, and a set of "
        f"{inside.sum(1).mean():.1f} causes on average holds all true causes in "
        f"{percent((inside | ~truth).all(1).mean())}",
        f"The settings alone give {percent(settings_alone)}, always naming the most frequent cause "
        f"{percent(truth.mean(0).max())}",
        f"{sum(json.loads(study.attrs['recorded']).values()):,} runs of {n_steps} updates",
        f"on {len(set(locked['family'].values.tolist()))} families of the test set",
        f"{of.sizes['run']} runs failed while",
        f"and {locked.sizes['run'] - of.sizes['run']} are healthy",
        f"{float(validation['first']):.2f} and {float(validation['healthy']):.2f}).",
        f"relative to the control is {lost[0]} in these runs, {lost[1]} in runs with a right answer, and {lost[2]} in",
        f"small and {n_steps} updates long",
    )
    settings = (
        "cost at most 2 % of the right", "95 % intervals", "in 0.90 of the runs and has a mean size below 2",
        "right in 0.95 after", "and 0.95 of the healthy",
    )  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def test_the_table_of_unknown_kinds_has_the_recorded_answers():
    with (ROOT / "data" / "unknown_causes.csv").open() as file:
        rows = {(row["view"], row["answer"]): row for row in csv.DictReader(file) if row["set"] == "locked"}
    table = page_module(PAGE).unknown().to_dict("records")
    views = [view for view in ("store", "mechanism", "log", "curves") for _ in range(2)]
    for view, row in zip(views, table, strict=True):
        recorded = rows[view, row["answer"]]
        assert row["another cause"] == f"{float(recorded['unknown']):.2f}"
        assert row["nothing"] == f"{float(recorded['nothing']):.2f}"
        assert row["known kinds: first cause is right"] == f"{float(recorded['right']):.2f}"


def test_targets_are_reached_as_stated(recorded):
    read, replayed = recorded["locked", "mechanism"], recorded["locked", "mechanism and one replay"]
    assert float(read["covered"]) >= 0.90
    assert float(read["size"]) < 2
    assert float(replayed["first"]) < 0.95
    assert float(replayed["healthy"]) < 0.95


def test_the_table_of_accuracy_has_the_fractions_of_the_runs(locked):
    """The fractions are recomputed from the answers; the intervals only have to contain them."""
    of = failed(locked)
    sound = locked.isel(run=locked["is_cause"].values[:, nothing(locked)])
    truth = of["is_cause"].values
    table = page_module(PAGE).accuracy()
    answers = ("store", "recorder", "mechanism", "replay", "log", "curves", "settings", "majority")
    for answer, row in zip(answers, table.to_dict("records"), strict=True):
        if answer == "majority":
            assert row["first cause is right"].startswith(f"{truth.mean(0).max():.2f} [")
            continue
        name = {"replay": "probability_after_replay", "settings": "probability_by_settings"}.get(answer, "probability")
        found, healthy = (runs[name] if "view" not in runs[name].dims else runs[name].sel(view=answer)
                          for runs in (of, sound))  # fmt: skip
        first = found.values.argmax(1)
        assert row["first cause is right"].startswith(f"{is_right(of, found.values).mean():.2f} [")
        assert row["failed, called healthy"] == f"{(first == nothing(of)).mean():.2f}"
        called = (healthy.values.argmax(1) == nothing(sound)).mean()
        assert row["healthy, called healthy"].startswith(f"{called:.2f} [")
        if answer == "settings":
            assert row["set holds all causes"] == row["its mean size"] == ""
            continue
        inside = (of["is_in_set_after_replay"] if answer == "replay" else of["is_in_set"].sel(view=answer)).values
        assert row["set holds all causes"].startswith(f"{(inside | ~truth).all(1).mean():.2f} [")
        assert row["its mean size"] == f"{inside.sum(1).mean():.2f}"


def test_the_table_of_causes_has_the_fractions_of_the_runs(locked):
    one = failed(locked).sel(view="mechanism")
    table = page_module(PAGE).causes().to_dict("records")
    names = [name for name in one["ranked_cause"].values.tolist() if name != "nothing"]
    for name, row in zip(names, table, strict=True):
        own = one.isel(run=one["is_cause"].sel(ranked_cause=name).values)
        assert row["failed runs"] == own.sizes["run"]
        named = own["ranked_cause"].values[own["probability"].values.argmax(1)] == name
        assert row["named first"] == f"{named.mean():.2f}"
        assert row["in the set"] == f"{own['is_in_set'].sel(ranked_cause=name).values.mean():.2f}"
