import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.diagnosis import CAUSES, Rules
from workbench.errors import OptionError, StoreError

SIGNS = ("a", "b", "c")


def examples(n=40, seed=0):
    """Two causes that symptom "a" tells apart, "b" is noise, "c" is there for half of the runs."""
    draw = np.random.default_rng(seed)
    found = []
    for i in range(n):
        cause = ("batch", "data")[i % 2]
        strengths = {
            "a": (1.0 if cause == "data" else -1.0) + 0.3 * draw.standard_normal(),
            "b": draw.standard_normal(),
        }
        if i % 4 < 2:
            strengths["c"] = draw.standard_normal()
        found.append((strengths, cause))
    return found


def test_a_planted_sign_decides_and_noise_does_not():
    rules = Rules.fit(examples())
    assert next(iter(rules.probabilities({"a": 1.0}))) == "data"
    assert next(iter(rules.probabilities({"a": -1.0}))) == "batch"
    weight = dict(zip(rules.symptoms, np.abs(rules.weight).max(axis=0), strict=True))
    assert weight["a"] > 5 * max(weight["b"], weight["c"])


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(SIGNS), st.floats(-3, 3)))
def test_evidence_adds_up_to_the_log_odds(strengths):
    rules = Rules.fit(examples())
    probability = rules.probabilities(strengths)
    assert sum(probability.values()) == pytest.approx(1)
    assert list(probability.values()) == sorted(probability.values(), reverse=True)
    own = rules.evidence(strengths).sum(axis=1) + rules.bias
    log = np.log([probability[cause] for cause in rules.causes])
    np.testing.assert_allclose(log - log.mean(), own - own.mean(), atol=1e-9)


def test_a_sign_that_is_not_there_says_nothing():
    rules = Rules.fit(examples())
    usual = dict(zip(rules.symptoms, rules.usual.tolist(), strict=True))
    assert (rules.evidence({}) == 0).all()
    assert rules.probabilities({"a": 0.7}) == pytest.approx(
        rules.probabilities({"a": 0.7, "b": usual["b"], "c": usual["c"]})
    )
    assert rules.probabilities({"a": 0.7, "unheard of": 9.0}) == rules.probabilities({"a": 0.7})


def test_saved_rules_say_the_same(tmp_path):
    rules = Rules.fit(examples(), about="made by hand")
    opened = Rules.open(rules.save(tmp_path / "rules.json"))
    assert opened.about == "made by hand"
    assert opened.probabilities({"a": 0.4, "c": 1.0}) == pytest.approx(
        rules.probabilities({"a": 0.4, "c": 1.0}), abs=1e-4
    )


def test_one_cause_is_not_enough():
    with pytest.raises(OptionError, match="show 1 causes, expected at least 2"):
        Rules.fit([({"a": 1.0}, "data")])


@pytest.mark.parametrize(
    "text", ["", "{}", '{"causes": ["data"], "signs": {"a": {"usual": 0, "weight": [1, 2]}}, "bias": [0]}']
)
def test_what_is_no_rules_is_refused(tmp_path, text):
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(StoreError, match="holds no rules|is damaged"):
        Rules.open(tmp_path / "rules.json")


def test_shipped_rules_know_every_cause():
    assert set(Rules.shipped().causes) == set(CAUSES)
