"""The numbers of the explanations are constants of the library or follow from the data; no other page has results."""

import inspect
import json
import re

import pytest
import xarray as xr
from scipy.stats import chi2

import workbench as wb
from tests.docs.page_numbers import ROOT, check_page, text_of, visible
from workbench.callbacks.alarms import Alarms
from workbench.callbacks.recorder.settings import _EVERY
from workbench.koopman.measures import Thresholds
from workbench.rates.rate_search import LONGEST_SHARE

pytestmark = pytest.mark.recorded

FOLDER = "docs/explanation"
#: Pages whose numbers a test in this folder recomputes.
TESTED = {
    "docs/results": {path.stem for path in (ROOT / "docs" / "results").glob("*.md")},
    FOLDER: {path.stem for path in (ROOT / FOLDER).glob("*.md")},
}
#: Pages that are written when the documentation is built, from docstrings, notebooks and other files.
GENERATED = ("docs/_build", "docs/reference", "docs/tutorials", "docs/gallery", "docs/files.md", "docs/contributing.md",
             "docs/data.md")  # fmt: skip
#: Settings and definitions in the other pages that look like results.
DEFINITIONS = {
    "docs/glossary.md": ("the 99 % quantile", "less than 20 % of the runs"),
}


def default(function, name):
    return inspect.signature(function).parameters[name].default


@pytest.fixture(scope="module")
def bands():
    return json.loads((ROOT / "workbench" / "assessment" / "shipped" / "healthy.json").read_text())["bands"]


def test_spectra():
    limits = Thresholds()
    settings = (
        f"modulus above {limits.near_unit_upper:g}", f"below {limits.contractive_upper:.2f}",
        f"at most {limits.reliable_residual:g}", "spectral radius exceeds 1", "the nonlinearity ratio is 0",
        "all modes lie at 1", "M = 1 says nothing",
    )  # fmt: skip
    page = f"{FOLDER}/spectra.md"
    check_page(page, (), settings=settings)
    assert f"{limits.near_unit_lower:.2f} <= |lambda| <= {limits.near_unit_upper:.2f}" in text_of(page)


def test_learning_rates():
    budget = default(wb.find_rate, "budget")
    longest = f"{LONGEST_SHARE * budget:.0f}"
    settings = (f"at most {budget:,} updates", f"pilot of {budget:,} updates has runs of {longest}", "1 / width")
    check_page(f"{FOLDER}/learning_rates.md", (), settings=settings)


def test_risk():
    check_page(f"{FOLDER}/risk.md", ())


def test_assessment():
    with xr.open_dataset(ROOT / "data" / "assessed_designs.nc") as data:
        designs = data[["set", "kind", "fails", "verdict"]].load().to_dataframe().query("set == 'locked'")
    flagged = designs["verdict"].isin(["at risk", "refuse"])
    fails, trains = designs["fails"], ~designs["fails"] & (designs["kind"] != "planted")
    claims = (
        f"that train, {(flagged & trains).sum()} of {trains.sum()} was flagged",
        f"less reliably, {(flagged & fails).sum()} of {fails.sum()} ",
    )
    check_page(f"{FOLDER}/assessment.md", claims, settings=("of width 64", "1 / width"))


def test_monitors():
    check_page(f"{FOLDER}/monitors.md", ())


def test_alarms():
    with xr.open_dataset(ROOT / "data" / "early_warning.nc") as data:
        runs = data.load().to_dataframe().query("set == 'locked'")
    healthy = runs[runs["kind"] == ""]
    assert set(healthy["first_signal"]) - {""} == {"largest_losses", "loss rise"}  # none of a probe or a setting
    assert healthy["n_alarms"].max() == 1
    n_false = int(healthy["first_signal"].isin(["loss rise", "loss fall"]).sum())
    n_steps = int(healthy["n_steps"].sum())
    most = 1e5 * chi2.ppf(0.975, 2 * n_false + 2) / 2 / n_steps
    claims = (
        f"{n_false} false alarms in {n_steps:,} healthy steps of the test set, so that the rate is at most "
        f"{most:.1f} in 100,000 (95 %)",
    )
    settings = (
        "beyond 10,000", f"in 100,000 healthy steps, {default(Alarms, 'false_alarms'):g} by default", "first 200 steps",
        f"every {_EVERY} updates", "exactly 0", "a power of 2",
    )  # fmt: skip
    check_page(f"{FOLDER}/alarms.md", claims, settings=settings)


def test_kss():
    n_states = wb.KSS.recommended().options.n_snapshots
    check_page(f"{FOLDER}/kss.md", (), settings=(f"From {n_states} token states", "is 1 while KSS does not act"))


def test_diagnosis():
    check_page(f"{FOLDER}/diagnosis.md", ())


def test_limits(bands):
    (low, high), (_, widest) = bands["gain_by_depth"]["sizes"]["blocks"], bands["gain_by_depth"]["sizes"]["width"]
    with xr.open_dataset(ROOT / "data" / "assessed_designs.nc") as data:
        designs = data[["set", "kind", "routing_entropy_share"]].load().to_dataframe()
    known = designs[(designs["kind"] != "planted") & (designs["set"] != "locked")]
    assert known["routing_entropy_share"].notna().sum() == 12
    with xr.open_dataset(ROOT / "data" / "failures.nc") as data:
        n_steps = data.attrs["n_steps"]
    claims = (f"{low} to {high} blocks, and widths up to {widest:,}. Twelve", f"small runs of {n_steps} updates")
    settings = ("radius exceeds 1", "first 200 steps", "one H100", "batches of 8 x 32 tokens", "width 64",
                "1 / width", "above 1 MB", "more than 10,000 entries", "FSDP1", "FSDP2", "1F1B")  # fmt: skip
    check_page(f"{FOLDER}/limits.md", claims, settings=settings)


def test_index():
    check_page(f"{FOLDER}/index.md", ())


def test_a_page_without_a_test_has_no_results():
    """Percentages and counts such as "9 of 11" are results; a page that states some needs a test of its own."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "docs").glob("test_*.py"))
    found = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.relative_to(ROOT).as_posix()
        if page.startswith(GENERATED) or path.stem in TESTED.get(path.parent.relative_to(ROOT).as_posix(), ()):
            continue
        text = visible(page)
        for definition in DEFINITIONS.get(page, ()):
            assert definition in text, (page, definition)
            text = text.replace(definition, " ")
        if results := re.findall(r"\d[\d.,]* ?%|\b\d[\d,]* of \d[\d,]*\b", text):
            found[page] = results
    assert found == {}
    untested = [stem for stem in TESTED["docs/results"] if not re.search(rf'results/{stem}\.md|"{stem}"', tests)]
    assert untested == []
