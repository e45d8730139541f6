import copy
import itertools
import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import says
from tests.rates.known_runs import KnownRuns
from workbench.errors import OptionError
from workbench.rates.rate_search import LoopRuns, ModelRuns, RateSearch
from workbench.training.training_plan import TrainingPlan


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


NO_LIMITS = [math.inf] * 3
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}


def task():
    return wb.tasks.synthetic_lm(length=8, vocab_size=32, batch_size=4)


def runs_of(model, source=None, **settings):
    return ModelRuns(
        model, task() if source is None else source, TrainingPlan(n_steps=10, **settings), n_longest=10, n_seeds=1
    )


def test_losses_do_not_depend_on_previous_runs():
    model = wb.zoo.transformer(**SIZE)
    before = copy.deepcopy(model.state_dict())
    first, second = runs_of(model, warmup=2), runs_of(model, warmup=2)
    found = first.losses(1e-2, 0, [6, 8, 10], NO_LIMITS)
    second.losses(3e-2, 0, [4], NO_LIMITS)
    assert second.losses(1e-2, 0, [8, 10], NO_LIMITS) == found[1:]
    assert (first.n_updates, second.n_updates) == (10, 14)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("averages_parameters", [False, True])
def test_the_loss_is_that_of_held_out_examples_after_training(averages_parameters):
    model = wb.zoo.transformer(**SIZE)
    runs = ModelRuns(model, task(), TrainingPlan(n_steps=10, warmup=50), 10, 1, averages_parameters)
    found = runs.losses(1e-2, 0, [8, 10], NO_LIMITS)
    other = copy.deepcopy(model)
    records = wb.train(other, task(), n_steps=10, learning_rate=1e-2, warmup=3)  # a third of the updates
    states = [copy.deepcopy(other.state_dict()) for _ in records]
    inputs, targets = task().held_out(4096)
    for loss, n_done in zip(found, (8, 10), strict=True):
        of_last = states[n_done - 2 : n_done] if averages_parameters else [states[n_done - 1]]
        other.load_state_dict({name: sum(state[name] for state in of_last) / len(of_last) for name in states[0]})
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(other.eval()(inputs).flatten(0, 1), targets.flatten())
        assert loss == pytest.approx(float(expected), rel=1e-5)


def test_the_trivial_loss_is_that_of_the_frequencies():
    runs = runs_of(wb.zoo.transformer(**SIZE))
    _, targets = task().held_out(4096)
    counts = torch.bincount(torch.cat([task().batch(i)[1].flatten() for i in range(100)]), minlength=32) + 1.0
    assert runs.trivial_loss == pytest.approx(float(-(counts / counts.sum()).log()[targets].mean()))
    custom = ModelRuns(
        wb.zoo.transformer(**SIZE), task(), TrainingPlan(n_steps=10), 10, 1, loss=lambda logits, targets: logits.mean()
    )
    assert math.isnan(custom.trivial_loss)


def test_seeds_read_different_batches_and_create_different_models():
    runs = runs_of(wb.zoo.transformer(**SIZE))
    assert runs.losses(1e-2, 0, [4], NO_LIMITS) != runs.losses(1e-2, 1, [4], NO_LIMITS)
    seeds = []

    def make(seed):
        seeds.append(seed)
        return wb.zoo.transformer(**SIZE, seed=seed)

    created = runs_of(make)
    created.losses(1e-2, 0, [2], NO_LIMITS), created.losses(1e-2, 3, [2], NO_LIMITS)
    assert seeds == [0, 3]


@pytest.mark.parametrize("n_batches", [40, 12])
def test_without_held_out_examples_batches_are_held_out(n_batches):
    batches = [task().batch(i) for i in range(n_batches)]
    trained = []

    class Spy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = wb.zoo.transformer(**SIZE)

        def forward(self, tokens):
            if self.training:
                trained.append(tokens)
            return self.inner(tokens)

    runs = runs_of(Spy(), batches)
    runs.losses(1e-2, 0, [10], NO_LIMITS)
    n_aside = 8 if n_batches == 40 else 2
    expected = [batches[n_aside + i % (n_batches - n_aside)][0] for i in range(10)]
    assert all(torch.equal(one, two) for one, two in zip(trained, expected, strict=True))


def test_shuffled_data_hold_out_the_same_examples_in_each_epoch():
    examples = torch.arange(32).reshape(16, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(examples, examples), batch_size=2, shuffle=True)
    runs = runs_of(wb.zoo.transformer(**SIZE), loader)
    held_out = {tuple(example) for inputs, _ in runs._held_out for example in inputs.tolist()}
    trained = {tuple(example) for inputs, _ in islice(runs._data.stream(), 30) for example in inputs.tolist()}
    assert held_out
    assert not held_out & trained


def test_data_that_can_be_read_only_once_or_end_early_are_rejected():
    with pytest.raises(OptionError, check=says("The data can be read only once, but each pilot run reads")):
        runs_of(wb.zoo.transformer(**SIZE), iter([task().batch(0)]))
    with pytest.raises(OptionError, check=says("The data have a single batch, but the pilot holds out at")):
        runs_of(wb.zoo.transformer(**SIZE), [task().batch(0)])

    class FourBatches:
        def stream(self, start=0):
            return islice(task().stream(start), 4)

        def probe(self, n_tokens):
            return task().probe(n_tokens)

        def held_out(self, n_tokens):
            return task().held_out(n_tokens)

        def describe(self):
            return {"task": "four batches"}

    with pytest.raises(OptionError, check=says("batches, but a pilot run needs")):
        runs_of(wb.zoo.transformer(**SIZE), FourBatches()).losses(1e-2, 0, [8], NO_LIMITS)


def test_a_run_that_ends_in_values_that_are_not_finite_has_an_infinite_loss():
    runs = runs_of(wb.zoo.transformer(norm="none", **SIZE))
    assert runs.losses(1e6, 0, [8], NO_LIMITS) == [math.inf]
    assert runs.n_updates < 8


def test_custom_loops_run_only_as_long_as_needed_and_are_closed():
    closed = []

    def loop(rate, seed):
        try:
            for step in range(30):
                yield math.nan if rate > 1 and step == 4 else 1 / (step + 1)
        finally:
            closed.append((rate, seed))

    runs = LoopRuns(loop)
    assert runs.losses(0.1, 0, [10, 20], NO_LIMITS) == pytest.approx([1 / 10, (1 / 19 + 1 / 20) / 2])
    assert runs.losses(2.0, 0, [4, 10], NO_LIMITS) == [0.25, math.inf]
    with pytest.raises(OptionError, check=says("let it continue until it is closed, also at large losses.")):
        runs.losses(0.1, 1, [40], NO_LIMITS)
    assert runs.n_updates == 20 + 5 + 30
    assert closed == [(0.1, 0), (2.0, 0), (0.1, 1)]
    assert LoopRuns(lambda rate, seed: [1.0, 2.0]).losses(0.1, 0, [2], NO_LIMITS) == [2.0]
