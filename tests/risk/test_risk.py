"""Tests of the risk of a planned training: predictions of a fitted model, results of a pilot, printed sentences."""

import math
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from tests.risk.known_designs import EDGES, known_designs
from workbench.errors import OptionError, SchemaError
from workbench.rates import Estimate, FoundRates
from workbench.risk import Probability

pytestmark = pytest.mark.medium

NAN = math.nan
OUTCOMES = ("failure", "too_small", "too_large", "explosion")


@pytest.fixture(scope="module")
def designs():
    return known_designs(n_families=9, n_of_family=6)


@pytest.fixture(scope="module")
def model(designs):
    cases, _, edges, families = designs
    return wb.risk.fit(cases, edges, families, n_bootstrap=4)


@pytest.fixture
def case(designs):
    is_match = (designs[0]["optimizer"].values == "AdamW") & (designs[0]["scale_response"].values > 0.5)
    one = designs[0].isel(run=[int(np.argmax(is_match))])
    return one.assign_coords(learning_rate=("run", [0.01]), n_steps=("run", [480]), d_model=("run", [64]))


def pilot(slow=(1e-3, 5e-4, 2e-3), edge=(0.02, 0.01, 0.05), *, n_steps=480, reason=""):
    """Return a result of `wb.find_rate` without rounds."""
    return FoundRates(
        n_steps,
        Estimate(*slow),
        Estimate(5e-3, 2e-3, 1e-2),
        Estimate(*edge),
        reason,
        900,
        60.0,
        (),
        NAN,
        "AdamW",
        False,
    )


def three(value):
    return value.value, value.low, value.high


# ---- one training


def test_the_risk_is_that_of_the_model(model, case):
    risk, found = wb.risk.predict(case, model=model), model.predict(case)
    assert (risk.learning_rate, risk.n_steps, risk.d_model, risk.reason) == (0.01, 480, 64, "")
    for name in (*OUTCOMES, *EDGES):
        assert three(getattr(risk, name)) == tuple(float(found[f"{name}{end}"][0]) for end in ("", "_low", "_high"))
    assert isinstance(risk.failure, Probability)
    assert isinstance(risk.useful_edge, Estimate)


def test_the_default_is_the_shipped_model(case):
    assert wb.risk.predict(case) == wb.risk.predict(case, model=wb.risk.shipped())
    at = wb.risk.over_rates(case, np.geomspace(1e-7, 100, 30))
    # In every model tiny rates are too small and huge rates too large.
    assert at["too_small"][0] > 0.9
    assert at["too_large"][-1] > 0.9
    assert 1e-6 < float(at["slow_edge"]) < float(at["useful_edge"]) < 10


def test_the_sentence_states_the_risk_and_the_useful_rates():
    known = wb.risk.Risk(
        0.003, 12_000, 64, Probability(0.12, 0.05, 0.31), Probability(0.02, 0.01, 0.1), Probability(0.1, 0.03, 0.2),
        Probability(0.004, 0.001, 0.02), Estimate(1e-3, 5e-4, 2e-3), Estimate(0.02, 0.01, 0.05),
        Estimate(0.1, 0.05, 0.3), "",
    )  # fmt: skip
    assert str(known) == (
        "At a learning rate of 0.003: 12 % (5 to 31 %) risk of not learning well within 12,000 updates at width 64, "
        "< 1 % of an explosion; learns well from 0.001 (0.0005-0.002) up to 0.02 (0.01-0.05)."
    )
    after_pilot = replace(known, failure=Probability(0.12, NAN, NAN), explosion=Probability(NAN, NAN, NAN))
    assert str(after_pilot) == (
        "At a learning rate of 0.003: 12 % risk of not learning well within 12,000 updates at width 64; learns well "
        "from 0.001 (0.0005-0.002) up to 0.02 (0.01-0.05)."
    )


# ---- after a pilot


@pytest.mark.parametrize(
    ("rate", "small", "large"),
    [(1e-3, 0.5, 0.0), (5e-4, 0.9, 0.0), (2e-3, 0.1, 0.0), (0.02, 0.0, 0.5), (0.01, 0.0, 0.1), (0.05, 0.0, 0.9)],
)
def test_the_edges_of_a_pilot_replace_those_of_the_model(model, case, rate, small, large):
    case = case.assign_coords(learning_rate=("run", [rate]))
    before, risk = wb.risk.predict(case, model=model), wb.risk.predict(case, pilot=pilot(), model=model)
    assert before.explosion_edge.value < pilot().useful_edge.value  # the pilot is more accurate
    assert (risk.slow_edge, risk.useful_edge) == (pilot().slow_edge, pilot().useful_edge)
    assert risk.explosion_edge.value == pilot().useful_edge.value
    assert risk.too_small.value == pytest.approx(small, abs=0.01)
    assert risk.too_large.value == pytest.approx(large, abs=0.01)
    assert risk.failure.value == pytest.approx(small + large, abs=0.02)
    assert all(math.isnan(getattr(risk, name).low) for name in ("too_small", "too_large", "failure"))


def test_after_a_pilot_an_explosion_is_not_more_probable_than_a_rate_that_is_too_large(model, case):
    for rate in (1e-3, 1e-2, 0.1, 1.0):
        at = case.assign_coords(learning_rate=("run", [rate]))
        before, risk = (wb.risk.predict(at, pilot=of, model=model) for of in (None, pilot()))
        assert risk.explosion.value == min(before.explosion.value, risk.too_large.value)
        assert risk.explosion.low <= risk.explosion.value <= risk.explosion.high <= 1


def test_a_pilot_is_used_outside_of_the_fit(model, case):
    risk = wb.risk.predict(case.assign_coords(d_model=("run", [4096])), pilot=pilot(), model=model)
    assert risk.reason == ""
    assert risk.failure.value == pytest.approx(0.1, abs=0.01)
    assert math.isnan(risk.explosion.value)
    assert str(risk) == (
        "At a learning rate of 0.01: 10 % risk of not learning well within 480 updates at width 4096; learns well from "
        "0.001 (0.0005-0.002) up to 0.02 (0.01-0.05)."
    )


def test_a_pilot_of_another_training_or_without_estimates_is_rejected(model, case):
    with pytest.raises(OptionError, check=says("run a pilot for as many.")):
        wb.risk.predict(case, pilot=pilot(n_steps=1000), model=model)
    with pytest.raises(OptionError, check=says("The pilot has no estimates: No rate tried was too large.")):
        wb.risk.predict(case, pilot=pilot(reason="No rate tried was too large."), model=model)


# ---- over rates


@pytest.mark.parametrize("given", [None, pilot()])
def test_over_rates_equals_the_risk_at_each_rate(model, case, given):
    rates = [1e-4, 1e-2, 1.0]
    found = wb.risk.over_rates(case, rates, pilot=given, model=model)
    assert found["learning_rate"].values.tolist() == rates
    assert found.attrs | {"sentence": ""} == {"sentence": "", "n_steps": 480, "d_model": 64, "reason": ""}
    best = rates[int(found["failure"].values.argmin())]
    assert found.attrs["sentence"].startswith(
        f"The risk of not learning well within 480 updates is smallest at a learning rate of {best:g}: "
    )
    assert next(iter(found.attrs)) == "sentence"
    for i, rate in enumerate(rates):
        risk = wb.risk.predict(case.assign_coords(learning_rate=("run", [rate])), pilot=given, model=model)
        for name in (*OUTCOMES, *EDGES):
            at_rate = found if name in EDGES else found.isel(learning_rate=i)
            np.testing.assert_allclose(
                [float(at_rate[f"{name}{end}"]) for end in ("", "_low", "_high")], three(getattr(risk, name)), rtol=1e-9
            )
    assert found["useful_edge"].dims == ()


def test_the_risk_of_a_new_model_from_measurement_to_prediction():
    network = wb.zoo.transformer(d_model=64, n_layers=2, n_heads=2, vocab_size=16, max_length=16)
    task = wb.tasks.associative_recall(length=16, vocab_size=16, n_pairs=3, batch_size=8)
    case = wb.sweeps.measure_case(network, task, learning_rate=1e-3, n_steps=300, takes_gradients=False)
    risk = wb.risk.predict(case)
    assert (risk.reason, risk.n_steps, risk.d_model) == ("", 300, 64)
    assert 0 <= risk.failure.value <= 1


# ---- errors


@pytest.mark.parametrize(
    ("call", "error", "name", "value"),
    [
        (lambda c: wb.risk.predict(c.isel(run=[0, 0])), SchemaError, "case", 2),
        (lambda c: wb.risk.over_rates(c, []), OptionError, "rates", ()),
        (lambda c: wb.risk.over_rates(c, [0.1, -0.1]), OptionError, "learning_rate", -0.1),
        (
            lambda c: wb.risk.predict(c.assign_coords(learning_rate=("run", [0.0]))),
            OptionError,
            "learning_rate",
            0.0,
        ),
        (lambda c: wb.risk.predict(c.drop_vars("scale_response")), SchemaError, "scale_response", None),
    ],
)
def test_invalid_cases_are_rejected(case, call, error, name, value):
    with pytest.raises(error, check=about(name, value)):
        call(case)
