import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rates.known_runs import KnownRuns
from workbench.rates.rate_search import RateSearch, power_of, rate_of


def searched(runs, *, start=3e-3, budget=1000, n_steps=10_000, n_seeds=2):
    return list(RateSearch(runs, budget, n_steps, n_seeds).rounds(start))


@given(
    best=st.floats(-6, 0), start=st.floats(-1.5, 1.5), half_width=st.floats(0.5, 2.0), n_seeds=st.integers(1, 2),
    budget=st.integers(800, 4000),
)  # fmt: skip
def test_a_known_edge_is_found_from_a_start_nearby(best, start, half_width, n_seeds, budget):
    runs = KnownRuns(best=10.0**best, half_width=half_width)
    rounds = searched(runs, start=10.0 ** (best + start), budget=budget, n_seeds=n_seeds)
    last = [one for one in rounds if math.isfinite(one.useful_edge)][-1]
    assert runs.n_updates <= budget
    assert abs(math.log(last.useful_edge / (runs.best * math.exp(half_width)))) < 0.55
    assert abs(math.log(last.best_rate / runs.best)) < 0.85 * 3 * math.log(1.5)  # below it rates are 3 powers apart


def test_the_second_round_is_longer_and_repeats_the_decisive_rates():
    rounds = searched(KnownRuns(), n_steps=150, budget=1600)
    first, second, repeated = rounds
    assert first.is_coarse
    assert not second.is_coarse
    assert first.n_updates == 58 < second.n_updates == repeated.n_updates
    assert np.isnan(second.loss[:, 1]).all()
    decided = repeated.rate[~np.isnan(repeated.loss[:, 1])]
    near = [second.best_rate, second.useful_edge]
    assert len(decided) >= 2
    assert all(np.isclose(np.log(rate), np.log(near), atol=2 * math.log(1.5)).any() for rate in decided)


def test_a_seed_is_repeated_at_all_decisive_rates_or_none():
    for budget in range(300, 2000, 50):
        runs = KnownRuns(half_width=0.6)
        last = searched(runs, budget=budget)[-1]
        best, repeated = last.rate[np.nanargmin(last.loss[:, 0])], last.rate[~np.isnan(last.loss[:, 1])]
        assert len(repeated) == 0 or best in repeated
        assert len(repeated) in (0, 2, 3)


def test_runs_that_are_clearly_worse_are_stopped():
    runs = KnownRuns(half_width=0.5)  # a rate that differs by 1.5 squared from the best is 0.58 nat worse
    rounds = searched(runs, start=3e-3, n_seeds=1)
    n_tried = len(rounds[0].rate), len(rounds[-1].rate)
    assert runs.n_updates < n_tried[0] * 36 + n_tried[1] * 200
    assert np.isfinite(rounds[-1].loss).all()
    expected = [runs.loss_at(rate, 0, 200) for rate in rounds[-1].rate]
    assert rounds[-1].loss[:, 0] == pytest.approx(expected, abs=1e-6)  # all losses decrease at the same rate


def test_a_better_rate_below_an_early_one_is_found():
    """Early losses favor large rates: the best rate decreases from 0.03 in the first round to 0.003."""

    @dataclass
    class Drifting(KnownRuns):
        def loss_at(self, rate, seed, n_steps):
            self.best = 0.03 if n_steps < 120 else 0.003
            return super().loss_at(rate, seed, n_steps)

    last = searched(Drifting(), budget=1800)[-1]
    assert 0.0015 < last.best_rate < 0.006
    assert last.useful_edge == pytest.approx(0.006, rel=0.3)


def test_smaller_rates_are_tried_while_only_the_frequencies_are_learned():
    """Above 0.02 the loss stays at the trivial one; a small difference makes 0.1 the best rate of the first round."""

    @dataclass
    class Plateau(KnownRuns):
        trivial_loss: float = 4.0

        def loss_at(self, rate, seed, n_steps):
            if rate > 0.5:
                return math.inf
            if n_steps < 60 or rate > 0.02:
                return 4.0 + 0.002 * abs(math.log(rate / 0.1)) + 1e-4 * (1000 - n_steps)
            return min(4.0, super().loss_at(rate, seed, n_steps))

    rounds = searched(Plateau(), budget=1600, start=0.1)
    assert rounds[0].best_rate > 0.02
    assert 0.0015 < rounds[-1].best_rate < 0.006
    assert 0.003 < rounds[-1].useful_edge < 0.02


@given(
    start=st.floats(-8.9, 5.9), best=st.floats(-12, 9), budget=st.integers(200, 1000), limit=st.floats(-4, 9),
)  # fmt: skip
def test_the_budget_is_never_exceeded(start, best, budget, limit):
    runs = KnownRuns(best=10.0**best, diverges_above=10.0**limit)
    rounds = searched(runs, start=10.0**start, budget=budget)
    assert runs.n_updates <= budget
    assert all(one.n_updates <= two.n_updates for one, two in itertools.pairwise(rounds))


def test_an_edge_at_a_divergence_lies_between_the_two_rates():
    runs = KnownRuns(half_width=4.0, diverges_above=0.02)
    last = [one for one in searched(runs) if math.isfinite(one.useful_edge)][-1]
    assert 0.02 / 1.5 <= last.useful_edge <= 0.02 * 1.5


def test_without_a_finite_loss_there_is_no_round():
    assert searched(KnownRuns(diverges_above=1e-12), budget=200) == []


def test_runs_are_no_longer_than_the_plan():
    runs = KnownRuns()
    rounds = searched(runs, n_steps=40)
    assert {one.n_updates for one in rounds} == {36, 40}
    assert runs.longest == 40


@pytest.mark.parametrize("k", [-20, 0, 1, 17])
def test_powers_and_rates_are_inverse(k):
    assert power_of(rate_of(k)) == pytest.approx(k, abs=2e-3)
