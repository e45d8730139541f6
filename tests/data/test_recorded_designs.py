"""The recorded designs: bands and verdicts follow from their measurements, which a re-run reproduces."""

import importlib
import json
import sys

import numpy as np
import pytest

import workbench as wb
from tests.data_scripts import FOLDER
from workbench.assessment.verdict import healthy_bands
from workbench.schema.statuses import BAD_STATES

pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("make_assessed_designs")
    for name in ("trained_designs", "planted_designs", "make_assessed_designs"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def designs():
    return wb.samples.open("assessed_designs").load()


@pytest.fixture(scope="module")
def rows(script, designs):
    """The recorded measurements in the form that the script evaluates."""
    found = []
    for case in script.cases():
        of = designs.sel(design=case.name)
        names = ("width", "depth", script.BETWEEN, *script.ALL)
        structure = {name: float(of[name]) for name in names}
        if str(of["refused"].values):
            structure = {"refused": str(of["refused"].values)}
        else:
            structure |= {f"{name}_error": float(of[f"{name}_error"]) for name in script.ALL}
        pilot = {name: float(of[name]) for name in script.PILOTED} | {"reason": str(of["reason"].values)}
        has_pilot = np.isfinite(pilot["share_broken"])
        found.append(script.Judged(case, structure, pilot if has_pilot else None, bool(of["fails"])))
    return found


def test_the_study_has_the_stated_size_and_its_sets_share_no_family(script, designs):
    assert designs["design"].values.tolist() == [case.name for case in script.cases()]
    kinds = designs["kind"].values
    published = designs.isel(design=kinds == "published")
    assert published.sizes["design"] >= 60
    assert len(set(published["family"].values)) >= 25
    assert (published["source"].values != "").all()
    assert int(designs["fails"].sum()) >= 30
    families = {name: set(designs["family"].values[designs["set"].values == name]) for name in script.SHARES}
    assert not families["locked"] & (families["fit"] | families["choose"])


def test_failures_follow_from_the_losses(script, designs):
    losses = designs["training_loss"]
    for name in designs["design"].values[designs["kind"].values == "planted"].tolist():
        own, sound = losses.sel(design=name), losses.sel(design=str(designs["base"].sel(design=name).values))
        expected = script.has_failed(own.values.tolist(), sound.values.tolist())
        assert bool(designs["fails"].sel(design=name)) == expected, name


@pytest.mark.slow
def test_the_shipped_bands_and_the_verdicts_follow_from_the_measurements(script, designs, rows):
    open_rows = [row for row in rows if row.case.set_of_family != "locked" and "refused" not in row.structure]
    margin = json.loads(script.SHIPPED.read_text())["margin"]
    bands, shipped = script.bands_of(open_rows, margin), healthy_bands()
    assert set(bands) == set(shipped)
    for name, band in bands.items():
        np.testing.assert_allclose((band.low, band.high), (shipped[name].low, shipped[name].high), rtol=1e-6)
        assert {size: tuple(ends) for size, ends in shipped[name].sizes.items()} == band.sizes
    for row in rows:
        of = designs.sel(design=row.case.name)
        for name, state in script.states_of(row, shipped).items():
            assert str(of[name].values) == state, (row.case.name, name)


@pytest.mark.slow
def test_the_margin_is_the_smallest_that_flags_few_designs_of_held_out_families(script, rows):
    open_rows = [row for row in rows if row.case.set_of_family != "locked" and "refused" not in row.structure]
    assert script.margin_of(open_rows) == json.loads(script.SHIPPED.read_text())["margin"]


@pytest.mark.parametrize("name", ["gpt2", "Llama, 8 blocks", "Pre-LN, 8 blocks; matrices 40 times as large"])
def test_a_repeated_measurement_gives_the_recorded_structure(script, designs, name):
    case = next(case for case in script.cases() if case.name == name)
    found = script.structure_of(case)
    for number in script.ALL:
        recorded = float(designs[number].sel(design=name))
        assert found[number] == pytest.approx(recorded, rel=0.05, nan_ok=True), number


def counted(designs, *, locked, fails):
    """Return the numbers of designs, of those flagged by each column, and of those with verdict "cannot say"."""
    kinds = ["planted"] if fails else ["published", "sound"]
    is_it = ((designs["set"] == "locked") == locked) & (designs["fails"] == fails) & designs["kind"].isin(kinds)
    of = designs.isel(design=is_it.values)
    columns = ("verdict", "structure", "pilot", "settings_state")
    bad = [int(of[name].isin(["refuse", *BAD_STATES]).sum()) for name in columns]
    return (of.sizes["design"], *bad, int((of["verdict"] == "cannot say").sum()))


def test_the_verdicts_are_right_as_often_as_the_readme_states(designs):
    assert counted(designs, locked=True, fails=False) == (44, 1, 0, 1, 13, 2)
    assert counted(designs, locked=True, fails=True) == (11, 9, 7, 7, 8, 0)
    assert counted(designs, locked=False, fails=False) == (117, 5, 0, 5, 32, 5)
    assert counted(designs, locked=False, fails=True) == (24, 18, 14, 9, 17, 1)


def test_published_rates_lie_around_the_transferred_edge(designs):
    published = designs.isel(design=(designs["kind"] == "published").values)
    ratio = (published["learning_rate"] / published["useful_edge"]).values
    assert np.nanmedian(ratio) == pytest.approx(3.1, abs=0.05)
    assert (np.nanmin(ratio), np.nanmax(ratio)) == pytest.approx((0.11, 12.3), rel=0.02)
    assert np.nanmax(published["rate_over_edge"]) < 1
