"""The tables of an assessment from planted numbers."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from workbench.assessment.failure_modes import CRITERIA, FAILURE_MODES, HealthyBand, healthy_bands, judged
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.flow_numbers import NUMBERS
from workbench.assessment.verdict import FIRST_STEP, summary_of, verdict_of

BANDS = {c.name: HealthyBand(0.5, 2.0, 0.1, 10.0, 50) for c in CRITERIA if c.band is None}
#: The same, of models of some sizes.
SIZED = {
    name: HealthyBand(0.5, 2.0, 0.1, 10.0, 50, sizes={"width": (24, 96), "blocks": (2, 6), "experts": (4, 8)})
    for name in BANDS
}
INSIDE = Sizes(64, 4, 64, 4, experts=4)
#: Of a design 4,096 wide with 32 blocks.
STAND_IN = Sizes(4096, 32, 64, 4, experts=4, is_stand_in=True)


def planted(*, risk=0.1, broken=0.0, flow=None, rehearsed=None, sizes=None, warning=""):
    numbers = dict.fromkeys(NUMBERS, ((), 1.0)) | {f"{name}_error": ((), 0.0) for name in NUMBERS}
    numbers |= {name: ((), value) for name, value in (flow or {}).items()}
    looks = {
        "attention_entropy_share_min": 1.0,
        "attention_logit_max": 1.0,
        "routing_change": 1.0,
        "max_violation": 1.0,
    }
    start = dict.fromkeys(("loss_over_guess", "logit_std", "stream_rms_last", "initial_grad_norm"), 1.0)
    tree = xr.DataTree.from_dict(
        {
            "/flow_numbers": xr.Dataset(numbers),
            "/spectra": xr.Dataset({n: ("layer", [1.0, 1.5]) for n in ("spectral_radius", "energy_gain")}),
            "/initialization": xr.Dataset(start),
            "/rehearsal": xr.Dataset(
                {n: ("look", [v, v]) for n, v in (looks | (rehearsed or {})).items()} | {"share_broken": ((), broken)}
            ),
            "/risk": xr.Dataset(
                {
                    "failure": ("run", [risk]),
                    "failure_low": ("run", [risk - 0.05]),
                    "failure_high": ("run", [risk + 0.05]),
                },
                attrs={"warning": warning},
            ),
        }
    )
    tree.attrs = {} if sizes is None else sizes.attributes
    return tree


def of(criteria, name):
    return criteria.sel(criterion=name)


def test_healthy_numbers_may_proceed():
    criteria, modes = judged(planted(), BANDS)
    assert verdict_of(criteria, modes) == "proceed"
    assert set(criteria["state"].values) == {"healthy", "not measured"}
    assert list(modes["failure_mode"].values) == list(FAILURE_MODES)
    assert "may proceed" in summary_of("it", "proceed", criteria, modes)


@pytest.mark.parametrize(
    ("plant", "mode", "verdict"),
    [
        ({"risk": 0.9}, "unsuitable_rate", "refuse"),
        ({"risk": 0.75}, "unsuitable_rate", "at risk"),
        ({"broken": 0.5}, "unsuitable_rate", "at risk"),
        ({"broken": 1.0}, "unsuitable_rate", "refuse"),
        ({"broken": 1.0, "risk": math.nan}, "unsuitable_rate", "refuse"),
        ({"broken": 0.5, "risk": math.nan, "sizes": STAND_IN}, "unsuitable_rate", "at risk"),
        ({"flow": {"gradient_gain_total": 1e-4}}, "gradient_flow_collapse", "refuse"),
        ({"flow": {"gradient_gain_total": 4.0}}, "gradient_flow_collapse", "at risk"),
        ({"rehearsed": {"attention_entropy_share_min": 0.01}}, "attention_degeneracy", "refuse"),
        ({"rehearsed": {"max_violation": 5.0}}, "routing_oscillation", "at risk"),
    ],
)
def test_a_planted_number_is_found_in_its_mode(plant, mode, verdict):
    criteria, modes = judged(planted(**plant), BANDS)
    bad = [
        m
        for m, s in zip(modes["failure_mode"].values, modes["state"].values, strict=True)
        if s in ("at risk", "failing")
    ]
    assert bad == [mode]
    assert verdict_of(criteria, modes) == verdict
    assert str(modes.sel(failure_mode=mode)["title"].values).lower() in summary_of("it", verdict, criteria, modes)


def test_every_number_stands_where_the_table_says():
    tree = planted(risk=0.7)
    criteria, _ = judged(tree, BANDS)
    for i in range(criteria.sizes["criterion"]):
        row = criteria.isel(criterion=i)
        if str(row["state"].values) == "not measured":
            assert not str(row["path"].values)
            assert str(row["reason"].values)
            continue
        where = tree[str(row["path"].values)].to_dataset()[str(row["variable"].values)]
        assert float(where.isel(json.loads(str(row["selection"].values)))) == float(row["value"])


def test_an_unsure_state_does_not_decide():
    tree = planted(flow={"gradient_gain_total": 2.1, "gradient_gain_total_error": 3.0})
    criteria, modes = judged(tree, BANDS)
    assert str(of(criteria, "gradient_gain_total")["state"].values) == "at risk"
    assert float(of(criteria, "gradient_gain_total")["confidence"]) < 0.5
    assert str(modes.sel(failure_mode="gradient_flow_collapse")["state"].values) == "healthy"


def test_without_a_healthy_reference_nothing_is_judged():
    criteria, modes = judged(planted(), {})
    assert str(of(criteria, "gradient_gain_total")["state"].values) == "not measured"
    assert "no healthy recorded run" in str(of(criteria, "gradient_gain_total")["reason"].values)
    assert math.isnan(float(of(criteria, "gradient_gain_total")["value"]))
    assert str(modes.sel(failure_mode="gradient_flow_collapse")["state"].values) == "not measured"


def test_a_band_that_holds_everything_judges_nothing():
    criteria, _ = judged(planted(), BANDS | {"attention_logit_rehearsed": HealthyBand(n_reference=50)})
    row = of(criteria, "attention_logit_rehearsed")
    assert str(row["state"].values) == "not measured"
    assert "tells nothing" in str(row["reason"].values)


def test_a_risk_that_is_not_known_leaves_the_verdict_open_and_no_number_anywhere():
    criteria, modes = judged(planted(risk=math.nan, warning="Too little was measured at a width of 16."), BANDS)
    assert verdict_of(criteria, modes) == "cannot say"
    row, mode = of(criteria, "failure_probability"), modes.sel(failure_mode="unsuitable_rate")
    assert str(row["state"].values) == str(mode["state"].values) == "not measured"
    assert str(row["reason"].values) == "too little was measured at a width of 16"
    assert np.isnan([float(row["value"]), float(row["confidence"]), float(mode["confidence"])]).all()
    assert "trials of a few updates that do not break say nothing" in str(mode["reason"].values)
    said = summary_of("it", "cannot say", criteria, modes)
    assert said.startswith(
        "Whether it will train as planned cannot be said: its risk is not known, for too little was measured at a "
        "width of 16. Nothing that was measured failed"
    )
    assert said.endswith(f"for an answer, {FIRST_STEP}.")


def test_trials_that_broke_are_told_with_their_share():
    criteria, modes = judged(planted(broken=0.5, risk=math.nan), BANDS)
    said = summary_of("it", "at risk", criteria, modes)
    assert "unsuitable learning rate (trials of the first updates broke: 50 %, healthy up to 0 %)" in said


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(768, 4, 768, 4, 4), "the healthy models behind this band were 24 to 96 wide, this one is 768 wide"),
        (Sizes(64, 32, 64, 32, 4), "the healthy models behind this band had 2 to 6 blocks, this one has 32"),
        (Sizes(64, 4, 64, 4, 64), "the healthy models behind this band had 4 to 8 experts, this one has 64"),
        (
            Sizes(4096, 32, 64, 4, 4, is_stand_in=True),
            "behind this band were 24 to 96 wide and had 2 to 6 blocks, this one is 4,096 wide and has 32",
        ),
    ],
)
def test_a_band_judges_no_size_but_those_of_the_models_behind_it(sizes, words):
    far = planted(flow={"gradient_gain_total": 1e4, "routing_entropy_share_min": 1e-3}, sizes=sizes)
    criteria, modes = judged(far, SIZED)
    names = [name for name in SIZED if bool(of(criteria, name)["is_outside"])]
    assert "gradient_gain_total" in names
    for name in names:
        row = of(criteria, name)
        assert str(row["state"].values) == "not measured"
        assert words in str(row["reason"].values)
        assert np.isnan(float(row["value"]))
    assert verdict_of(criteria, modes) == "cannot say"
    inside, modes = judged(planted(flow={"gradient_gain_total": 1e4}, sizes=INSIDE), SIZED)
    assert str(of(inside, "gradient_gain_total")["state"].values) == "failing"
    assert verdict_of(inside, modes) == "refuse"


def test_inside_of_the_sizes_healthy_numbers_may_proceed():
    criteria, modes = judged(planted(sizes=INSIDE), SIZED)
    assert verdict_of(criteria, modes) == "proceed"
    assert not criteria["is_outside"].values.any()
    unknown, modes = judged(planted(), SIZED)  # nothing says how large it is
    assert verdict_of(unknown, modes) == "cannot say"
    assert "the size of what was measured is not known" in str(of(unknown, "gradient_gain_total")["reason"].values)


def test_a_plan_that_may_well_not_learn_does_not_proceed():
    criteria, modes = judged(planted(risk=0.45), BANDS)
    assert str(of(criteria, "failure_probability")["state"].values) == "healthy"
    assert verdict_of(criteria, modes) == "cannot say"
    words = summary_of("The model", verdict_of(criteria, modes), criteria, modes)
    assert "its risk of not learning well is 45 %" in words
    assert "wb.find_rate" in words


def test_what_is_not_finite_fails_at_any_size():
    criteria, modes = judged(planted(flow={"gradient_gain_total": math.inf}, sizes=STAND_IN), SIZED)
    row = of(criteria, "gradient_gain_total")
    assert (str(row["state"].values), float(row["confidence"])) == ("failing", 1.0)
    assert verdict_of(criteria, modes) == "refuse"
    said = summary_of("it", "refuse", criteria, modes, STAND_IN)
    assert "measured on a stand-in 64 wide with 4 blocks" in said


def test_a_stand_in_never_proceeds_and_its_health_is_no_confidence():
    """Even where its risk were known and every band judged it."""
    criteria, modes = judged(planted(risk=math.nan, sizes=STAND_IN), BANDS)
    assert verdict_of(criteria, modes) == "cannot say"
    assert set(modes["state"].values) == {"not measured"}
    assert np.isnan(modes["confidence"].values).all()
    assert np.isnan(criteria["confidence"].values).all()
    assert "only a stand-in was measured" in str(modes.sel(failure_mode="attention_degeneracy")["reason"].values)
    said = summary_of("it", "cannot say", criteria, modes, STAND_IN)
    assert "only a stand-in 64 wide with 4 blocks could be tried out, which says nothing about the risk" in said


def test_every_shipped_band_says_the_sizes_of_its_models():
    for name, band in healthy_bands().items():
        criterion = next(c for c in CRITERIA if c.name == name)
        names = {"width", "blocks"} | ({"experts"} if criterion.failure_mode == "routing_oscillation" else set())
        assert set(band.sizes) == names, name
        assert tuple(band.sizes["width"]) == (24, 96) or band.n_reference < 50
        assert all(0 < low <= high for low, high in band.sizes.values())


def test_hazards_are_judged_by_their_own_room():
    hazards = xr.Dataset(
        {
            "title": ("hazard", ["sum", "idle"]),
            "applies": ("hazard", [True, False]),
            "effect": ("hazard", [0.3, 9.0]),
            "unit": ("hazard", ["1", "1"]),
            "healthy_limit": ("hazard", [0.1, 0.1]),
            "failing_limit": ("hazard", [1.0, np.nan]),
            "state": ("hazard", ["at risk", "healthy"]),
            "meaning": ("hazard", ["sums lose digits", ""]),
        },
        {"hazard": ["low_sum", "unused"]},
    )
    tree = planted()
    tree["hardware"] = xr.DataTree(hazards)
    criteria, modes = judged(tree, BANDS)
    assert "hazard_unused" not in criteria["criterion"].values
    assert float(of(criteria, "hazard_low_sum")["high"]) == 0.1
    assert str(modes.sel(failure_mode="precision_headroom")["state"].values) == "at risk"
    assert str(modes.sel(failure_mode="precision_headroom")["worst_criterion"].values) == "hazard_low_sum"
