"""Points for answers to practice cases, from results that are made up here."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_scripts import load_script
from workbench.course import scoring
from workbench.course.case_files import Truth
from workbench.course.cures import CURES, Outcome, recovered_fraction
from workbench.course.failure_runs import Case, Plant
from workbench.course.scoring import in_words, points_for
from workbench.diagnosis import CAUSES

CONTROL = {"start_loss": 4.0, "final_loss": 2.0, "rise": 0.1, "dead_share": 0.0}


def truth(how="learned less", causes=("data",), **result):
    plants = tuple(Plant(cause, "labels", 20, 90) for cause in causes if cause != "nothing")
    return Truth(Case("mamba lm", 0, plants), causes, how, CONTROL | result, CONTROL)


def outcome(final_loss=2.0, rise=0.1, dead_share=0.0):
    return Outcome("a change", "", np.zeros(3), final_loss, rise, dead_share)


@pytest.mark.parametrize(
    ("case", "replay", "expected"),
    [
        (truth(final_loss=3.0), outcome(2.0), 1.0),
        (truth(final_loss=3.0), outcome(2.5), 0.5),
        (truth(final_loss=3.0), outcome(3.0), 0.0),
        (truth(final_loss=3.0), outcome(3.5), 0.0),
        (truth(final_loss=3.0), outcome(1.5), 1.0),
        (truth(final_loss=3.0), outcome(math.nan), 0.0),
        (truth("diverged", final_loss=math.nan), outcome(3.0), 0.5),
        (truth("diverged", final_loss=math.nan, start_loss=math.nan), outcome(3.0), 0.5),
        (truth("diverged", final_loss=math.nan, start_loss=500.0), outcome(3.5), 0.25),
        (truth(final_loss=9.0), outcome(3.0), 0.5),
        (truth(final_loss=9.0), outcome(5.0), 0.0),
        (truth("spike", rise=1.1), outcome(rise=0.1), 1.0),
        (truth("spike", rise=1.1), outcome(rise=0.6), 0.5),
        (truth("spike", rise=1.1), outcome(2.8, rise=0.1), 0.6),
        (truth("experts died", dead_share=0.5), outcome(dead_share=0.25), 0.5),
        (truth("experts died", dead_share=0.5), outcome(3.5, dead_share=0.0), 0.25),
    ],
)
def test_the_recovered_fraction_is_that_of_the_quantity_that_failed(case, replay, expected):
    assert recovered_fraction(case, replay) == pytest.approx(expected)


@given(st.floats(1.5, 6), st.floats(0, 3), st.floats(0, 1), st.sampled_from(["learned less", "spike", "experts died"]))
def test_the_recovered_fraction_is_between_0_and_1_and_falls_with_the_loss(final_loss, rise, dead, how):
    case = truth(how, final_loss=3.0, rise=1.1, dead_share=0.5)
    found = recovered_fraction(case, outcome(final_loss, rise, dead))
    assert 0 <= found <= 1
    assert recovered_fraction(case, outcome(final_loss + 0.5, rise, dead)) <= found


def test_a_complete_answer_has_100_points_and_parts_add_up():
    best = points_for(truth(final_loss=3.0), ["data"], "data", outcome(2.0), 1.0)
    assert best.total == 100
    assert (best.causes, best.cure, best.budget) == (50, 30, 20)
    assert points_for(truth("", ("nothing",)), ["nothing"], None, None, 1.0).total == 100


def test_wrong_answers_earn_less():
    failed, sound = truth(final_loss=3.0), truth("", ("nothing",))
    assert points_for(failed, ["nothing"], None, None, 1.0).total == 0
    assert points_for(failed, ["batch"], "data", outcome(3.0), 1.0).total == 0
    assert points_for(failed, ["data", "batch"], "data", outcome(2.0), 0.0).total == 50 / 2 + 30
    assert points_for(sound, ["data"], "data", outcome(2.0), 1.0).total == 0
    assert points_for(sound, ["nothing"], "data", outcome(2.0), 0.0).total == 50


def test_with_two_causes_half_of_the_progress_is_a_complete_cure():
    case = truth(causes=("data", "batch"), final_loss=3.0)
    assert points_for(case, ["data", "batch"], "data", outcome(2.5), 1.0).total == 100
    assert points_for(case, ["data"], "data", outcome(2.5), 0.0).total == 25 + 30


@given(st.sets(st.sampled_from([*CURES]), min_size=1), st.floats(2, 4), st.floats(0, 1))
def test_points_are_between_0_and_100_and_an_unspent_budget_needs_a_right_cause(named, final_loss, unspent):
    found = points_for(truth(final_loss=3.0), named, "data", outcome(final_loss), unspent)
    assert 0 <= found.total <= 100
    assert (found.budget > 0) <= ("data" in named)


def test_every_fault_and_every_cause_has_words():
    assert set(CURES) == set(CAUSES) - {"nothing"}
    study = load_script("failure_cases")
    kinds = {row[1]: row[0] for row in (*study.PLANTS, *study.STRONG_PLANTS)}
    for kind, cause in kinds.items():
        for block in (-1, 2):
            words = in_words(Plant(cause, kind, 12.0, 30, block))
            assert words.endswith(".")
            assert "{" not in words


def test_a_score_explains_itself_in_one_line():
    import pandas as pd

    table = pd.DataFrame()
    one = scoring.Score(72.5, "Why.", table, ("data",), table, True, 0.7, True)
    assert repr(one) == "Score(72 of 100): Why."
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.points = 100
