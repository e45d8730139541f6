"""The numbers in the list of results are those of the pages of the studies, whose numbers are recomputed by tests."""

import csv
import re

import numpy as np
import pytest
import xarray as xr

from tests.docs.page_numbers import ROOT, check_page
from tests.docs.test_readme import frame

pytestmark = pytest.mark.recorded

PAGE = "docs/results/index.md"


def table(name, **chosen):
    with (ROOT / "data" / name).open() as file:
        (row,) = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in chosen.items())]
    return row


def test_every_number_of_the_page():
    rates = table("rate_accuracy.csv", set="locked", kind="model", budget="1000", horizon="480")
    n = int(rates["designs"])
    alarms = frame("early_warning.nc").query("set == 'locked'")
    harmed = alarms[alarms["start"].notna() & alarms["is_harmful"] & ~alarms["settings_show_it"]]
    soon, of_loss = (
        f"{100 * (harmed[step] - harmed['start']).between(0, 50).mean():.0f} %" for step in ("first_step", "loss_step")
    )
    designs = frame("assessed_designs.nc").query("set == 'locked'")
    flagged = designs["verdict"].isin(["at risk", "refuse"])
    fails, trains = designs["fails"], ~designs["fails"] & (designs["kind"] != "planted")
    runs = xr.load_dataset(ROOT / "data" / "failures.nc")
    nothing = runs["ranked_cause"].values.tolist().index("nothing")
    failed = runs.isel(run=(runs["set"] == "locked").values & ~runs["is_cause"].values[:, nothing])
    first, by_settings = (
        f"{100 * failed['is_cause'].values[np.arange(failed.sizes['run']), values.argmax(1)].mean():.0f} %"
        for values in (failed["probability"].sel(view="mechanism").values, failed["probability_by_settings"].values)
    )
    claims = (
        f"Within a factor of 2.5 for {float(rates['2.5']) * n:.0f} of {n} unseen designs, within 1.6 for "
        f"{float(rates['1.6']) * n:.0f}",
        f"within 50 steps of the onset for {soon} of the harmful faults; the loss alone for {of_loss}",
        f"{(flagged & fails).sum()} of {fails.sum()} in unseen families, with {(flagged & trains).sum()} false alarm "
        f"in {trains.sum()}",
        f"The first cause is right in {first}; from the settings alone in {by_settings}",
    )
    check_page(PAGE, claims)


def test_every_study_has_a_question_and_an_answer():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+)\.md\)", text.split("```")[0]))
    assert listed == {path.stem for path in (ROOT / "docs" / "results").glob("*.md")} - {"index"}
    for line in re.findall(r"^\| \[.*$", text, flags=re.MULTILINE):
        _, _, question, answer, _ = line.split("|")
        assert question.strip().endswith("?")
        assert len(answer.split()) >= 5
