from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about
from tests.data_scripts import load_script
from tests.diagnosis.records import descent, monitors, optimizer, record
from workbench.diagnosis import CAUSES, Rules, find_failure, read_symptoms
from workbench.diagnosis.ranking import view_of
from workbench.errors import StoreError

fitting = load_script("fitting")
SYMPTOMS = ("a", "b", "c")


def examples(n=40, seed=0):
    """Return runs of two causes that symptom "a" distinguishes; "b" is noise, and half of the runs have "c"."""
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


def test_a_decisive_symptom_decides_and_noise_does_not():
    rules = fitting.fit_rules(examples())
    assert next(iter(rules.probabilities({"a": 1.0}))) == "data"
    assert next(iter(rules.probabilities({"a": -1.0}))) == "batch"
    weight = dict(zip(rules.symptoms, np.abs(rules.weight).max(axis=0), strict=True))
    assert weight["a"] > 5 * max(weight["b"], weight["c"])


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(SYMPTOMS), st.floats(-3, 3)))
def test_evidence_adds_up_to_the_log_odds(strengths):
    rules = fitting.fit_rules(examples())
    probability = rules.probabilities(strengths)
    assert sum(probability.values()) == pytest.approx(1)
    assert list(probability.values()) == sorted(probability.values(), reverse=True)
    own = rules.evidence(strengths).sum(axis=1) + rules.bias
    log = np.log([probability[cause] for cause in rules.causes])
    np.testing.assert_allclose(log - log.mean(), own - own.mean(), atol=1e-9)


def test_a_missing_symptom_is_no_evidence():
    rules = fitting.fit_rules(examples())
    usual = dict(zip(rules.symptoms, rules.usual.tolist(), strict=True))
    assert (rules.evidence({}) == 0).all()
    assert rules.probabilities({"a": 0.7}) == pytest.approx(
        rules.probabilities({"a": 0.7, "b": usual["b"], "c": usual["c"]})
    )
    assert rules.probabilities({"a": 0.7, "unheard of": 9.0}) == rules.probabilities({"a": 0.7})


def test_a_run_with_half_of_its_experts_dead_is_not_without_a_fault():
    runs = [({"experts_die": 1.5}, "routing"), ({"experts_die": 0.0}, "nothing")] * 10
    rules = fitting.fit_rules(runs)
    assert rules.probabilities({"experts_die": 0.9})["nothing"] > 0
    assert rules.probabilities({"experts_die": 1.0})["nothing"] == 0
    assert rules.probabilities({"experts_die": 2.0})["nothing"] == 0


def test_a_run_with_two_causes_counts_for_both_of_them():
    both = [({"a": 1.0, "b": 1.0}, ("batch", "data")), *(({"a": 1.0}, "batch"), ({"b": 1.0}, "data")) * 5]
    probability = fitting.fit_rules(both).probabilities({"a": 1.0, "b": 1.0})
    assert probability["batch"] == pytest.approx(0.5, abs=0.05)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_sets_have_the_stated_coverage_for_any_scores(n, seed):
    """A new score of the same distribution reaches the threshold with probability 1 - rank / (n + 1), at least 0.9."""
    draw = np.random.default_rng(seed)
    scores = draw.beta(*draw.uniform(0.3, 3, 2), n)
    least = fitting.smallest_in_sets(scores)
    rank = np.sum(scores <= least)
    assert rank <= 0.1 * (n + 1) + 1e-9
    assert rank + 1 > 0.1 * (n + 1) - 1e-9
    if n < 9:
        assert least == 0  # too few to exclude anything


def test_the_set_contains_causes_above_their_thresholds_and_the_first():
    rules = fitting.fit_rules(examples())
    thresholds = {"store": np.array([0.7, 0.2])}
    rules = Rules(rules.causes, rules.symptoms, rules.weight, rules.usual, rules.bias, thresholds)
    assert rules.causes == ("batch", "data")
    assert rules.set_of({"batch": 0.75, "data": 0.25}, "store") == ("batch", "data")
    assert rules.set_of({"batch": 0.9, "data": 0.1}, "store") == ("batch",)
    assert rules.set_of({"batch": 0.6, "data": 0.4}, "store") == ("batch", "data")
    assert rules.set_of({"data": 0.95, "batch": 0.05}, "another view") == ("data",)
    half = {"batch": 0.375, "unknown": 0.5, "data": 0.125}  # the same as the first one, apart from another cause
    assert rules.set_of(half, "store") == ("batch", "unknown", "data")


def test_a_replay_updates_by_bayes_and_is_most_informative_if_answers_differ():
    rules = fitting.fit_rules(examples())
    answers = np.array([[0.8, 0.4], [0.5, 0.5]])
    rules = Rules(rules.causes, rules.symptoms, rules.weight, rules.usual, rules.bias, answers=answers)
    before = {"batch": 0.5, "data": 0.5}
    assert rules.after(before, "batch", supports=True)["batch"] == pytest.approx(0.8 / 1.2)
    assert rules.after(before, "batch", supports=False)["batch"] == pytest.approx(0.2 / 0.8)
    assert next(iter(rules.after(before, "batch", supports=False))) == "data"
    assert rules.information(before, "data") == pytest.approx(0, abs=1e-12)
    h = lambda p: -p * np.log2(p) - (1 - p) * np.log2(1 - p)  # noqa: E731
    assert rules.information(before, "batch") == pytest.approx(h(0.6) - (h(0.8) + h(0.4)) / 2)
    assert rules.information({"batch": 1.0, "data": 0.0}, "batch") == pytest.approx(0, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(SYMPTOMS), st.floats(-3, 3)), st.floats(-2, 3))
def test_another_cause_is_first_where_no_cause_has_more_evidence(strengths, log_odds):
    rules = fitting.fit_rules(examples())
    without = rules.probabilities(strengths)
    rules = replace(rules, unknown={"log": log_odds})
    assert rules.probabilities(strengths) == rules.probabilities(strengths, "curves") == without
    given = rules.probabilities(strengths, "log")
    own = rules.evidence(strengths).sum(axis=1) + rules.bias
    assert (next(iter(given)) == "unknown") == (log_odds > own.max())
    assert sum(given.values()) == pytest.approx(1)
    rest = {cause: p / (1 - given["unknown"]) for cause, p in given.items() if cause != "unknown"}
    assert rest == pytest.approx(without)
    assert ("unknown" in rules.set_of(given, "log")) == (given["unknown"] >= 0.1 * next(iter(given.values())))


def test_a_replay_keeps_another_cause_possible():
    rules = replace(Rules.shipped(), unknown={"store": 2.0})
    before = rules.probabilities({}, "store")
    for supports in (True, False):
        after = rules.after(before, "schedule", supports=supports)
        assert set(after) == set(before)
        assert (after["schedule"] > before["schedule"]) == supports
        assert 0 < after["unknown"] < 1


def test_routing_is_excluded_without_routers():
    mixed = [({"a": 1.0, "has_routers": 1.0}, "routing"), ({"a": -1.0, "has_routers": 0.0}, "data")] * 10
    rules = fitting.fit_rules(mixed)
    dense = rules.probabilities({"a": 1.0, "has_routers": 0.0})
    assert dense == {"data": 1.0, "routing": 0.0}
    assert rules.set_of(dense, "store") == ("data",)
    assert rules.probabilities({"a": 1.0})["routing"] > 0.5  # a log does not contain the architecture


def test_a_diverged_run_is_never_healthy():
    rules = fitting.fit_rules([({"a": 1.0}, "nothing"), ({"a": -1.0}, "data")] * 10)
    assert rules.probabilities({"a": 1.0})["nothing"] > 0.5
    assert rules.probabilities({"a": 1.0, "diverges": 1.0})["nothing"] == 0


def test_the_view_follows_from_the_record():
    curves = {"monitors": monitors(descent())}
    setting = {"training": {"optimizer": "AdamW", "warmup": 10}}
    for parts, options, view in (
        (curves | {"optimizer": optimizer()}, {"configuration": setting}, "store"),
        (curves | {"optimizer": optimizer()}, {}, "recorder"),
        (curves, {}, "log"),
        ({"monitors": curves["monitors"].drop_vars("learning_rate")}, {}, "curves"),
    ):
        one = record(parts, **options)
        assert view_of(read_symptoms(one, find_failure(one))) == view
    one = record(curves | {"optimizer": optimizer()})
    assert view_of(read_symptoms(one, find_failure(one), kinds=["mechanism"])) == "mechanism"


def test_saved_rules_are_read_back(tmp_path):
    rules = fitting.fit_rules(examples(), about="synthetic")
    least, answers = {"log": np.array([0.25, 0.5])}, np.array([[0.75, 0.25], [0.5, 0.5]])
    given = (rules.causes, rules.symptoms, rules.weight, rules.usual, rules.bias, least, answers, rules.about)
    rules = Rules(*given, {"log": 1.2})
    fitting.save_rules(rules, tmp_path / "rules.json")
    opened = Rules.open(tmp_path / "rules.json")
    assert opened.about == "synthetic"
    assert opened.probabilities({"a": 0.4, "c": 1.0}) == pytest.approx(
        rules.probabilities({"a": 0.4, "c": 1.0}), abs=1e-4
    )
    np.testing.assert_allclose(opened.least["log"], least["log"], rtol=2e-4)
    assert (opened.least["log"] < least["log"]).all()  # rounded down, so that no run at the limit is lost
    np.testing.assert_allclose(opened.answers, answers)
    assert opened.unknown == {"log": 1.2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"causes": ["data"], "symptoms": {"a": {"usual": 0, "weight": [1, 2]}}, "bias": [0]}',
        '{"causes": ["data"], "symptoms": {"a": {"usual": 0, "weight": [1]}}, "bias": [0], "least": {"log": [1, 2]}}',
    ],
)
def test_a_file_without_rules_is_rejected(tmp_path, text):
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(StoreError, check=about("path", tmp_path / "rules.json")):
        Rules.open(tmp_path / "rules.json")


def test_shipped_rules_know_every_cause():
    rules = Rules.shipped()
    assert set(rules.causes) == set(CAUSES) == set(Rules.uniform().causes)
    assert rules.answers.shape == (len(CAUSES), len(CAUSES))
    assert set(Rules.uniform().probabilities({"abrupt": 1.0}).values()) == {1 / len(CAUSES)}
