"""The tables of an assessment from planted numbers."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from workbench.assessment.failure_modes import CRITERIA, FAILURE_MODES, Band, judged
from workbench.assessment.flow_numbers import NUMBERS
from workbench.assessment.verdict import summary_of, verdict_of

BANDS = {c.name: Band(0.5, 2.0, 0.1, 10.0, 50) for c in CRITERIA if c.band is None}


def planted(*, risk=0.1, flow=None, rehearsed=None):
    numbers = dict.fromkeys(NUMBERS, ((), 1.0)) | {f"{name}_error": ((), 0.0) for name in NUMBERS}
    numbers |= {name: ((), value) for name, value in (flow or {}).items()}
    looks = {
        "attention_entropy_share_min": 1.0,
        "attention_logit_max": 1.0,
        "routing_change": 1.0,
        "max_violation": 1.0,
    }
    start = dict.fromkeys(("loss_over_guess", "logit_std", "stream_rms_last", "initial_grad_norm"), 1.0)
    return xr.DataTree.from_dict(
        {
            "/flow_numbers": xr.Dataset(numbers),
            "/spectra": xr.Dataset({n: ("layer", [1.0, 1.5]) for n in ("spectral_radius", "energy_gain")}),
            "/initialization": xr.Dataset(start),
            "/rehearsal": xr.Dataset({n: ("look", [v, v]) for n, v in (looks | (rehearsed or {})).items()}),
            "/risk": xr.Dataset(
                {
                    "tried_probability": ("run", [risk]),
                    "tried_low": ("run", [risk - 0.05]),
                    "tried_high": ("run", [risk + 0.05]),
                }
            ),
        }
    )


def of(criteria, name):
    return criteria.sel(criterion=name)


def test_healthy_numbers_may_proceed():
    criteria, modes = judged(planted(), BANDS)
    assert verdict_of(modes) == "proceed"
    assert set(criteria["state"].values) == {"healthy", "not measured"}
    assert list(modes["failure_mode"].values) == list(FAILURE_MODES)
    assert "may proceed" in summary_of("it", "proceed", criteria, modes)


@pytest.mark.parametrize(
    ("plant", "mode", "verdict"),
    [
        ({"risk": 0.97}, "divergence_risk", "refuse"),
        ({"risk": 0.7}, "divergence_risk", "at risk"),
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
    assert verdict_of(modes) == verdict
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
    criteria, _ = judged(planted(), BANDS | {"attention_logit_rehearsed": Band(n_reference=50)})
    row = of(criteria, "attention_logit_rehearsed")
    assert str(row["state"].values) == "not measured"
    assert "tells nothing" in str(row["reason"].values)


def test_a_summary_says_what_a_thin_model_leaves_open():
    criteria, modes = judged(planted(), BANDS)
    assert summary_of("it", "proceed", criteria, modes, thin="it was run thin").endswith("; but it was run thin.")


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
