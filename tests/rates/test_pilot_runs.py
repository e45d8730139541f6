import copy
import math

import pytest
import torch

import workbench as wb
from workbench.rates.pilot_runs import LoopRuns, ModelRuns

FREE = [math.inf] * 3
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 8}


def task():
    return wb.tasks.synthetic_lm(length=8, vocab_size=32, batch_size=4)


def runs_of(model, source=None, **settings):
    return ModelRuns(model, task() if source is None else source, settings, n_longest=10)


def test_losses_are_those_of_one_run_whatever_was_run_before():
    model = wb.zoo.transformer(**SIZE)
    before = copy.deepcopy(model.state_dict())
    first, second = runs_of(model, warmup=2), runs_of(model, warmup=2)
    found = first.losses(1e-2, 0, [2, 5, 8], FREE)
    second.losses(3e-2, 0, [4], FREE)
    assert second.losses(1e-2, 0, [5, 8], FREE) == found[1:]
    assert (first.n_updates, second.n_updates) == (8, 12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loss_is_that_of_held_out_examples_after_plain_training():
    model = wb.zoo.transformer(**SIZE)
    (found,) = runs_of(model, warmup=50).losses(1e-2, 0, [6], FREE)
    other = copy.deepcopy(model)
    list(wb.train(other, task(), n_steps=6, learning_rate=1e-2, warmup=2))  # a third of the updates
    inputs, targets = task().held_out(4096)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(other.eval()(inputs).flatten(0, 1), targets.flatten())
    assert found == pytest.approx(float(loss), rel=1e-6)


def test_the_trivial_loss_is_that_of_the_frequencies():
    runs = runs_of(wb.zoo.transformer(**SIZE))
    _, targets = task().held_out(4096)
    counts = torch.bincount(torch.cat([task().batch(i)[1].flatten() for i in range(32)]), minlength=32) + 1.0
    assert runs.trivial_loss == pytest.approx(float(-(counts / counts.sum()).log()[targets].mean()))
    own = ModelRuns(wb.zoo.transformer(**SIZE), task(), {}, 10, lambda logits, targets: logits.mean())
    assert math.isnan(own.trivial_loss)


def test_seeds_see_other_batches_and_functions_make_other_models():
    runs = runs_of(wb.zoo.transformer(**SIZE))
    assert runs.losses(1e-2, 0, [4], FREE) != runs.losses(1e-2, 1, [4], FREE)
    seeds = []

    def make(seed):
        seeds.append(seed)
        return wb.zoo.transformer(**SIZE, seed=seed)

    made = runs_of(make)
    made.losses(1e-2, 0, [2], FREE), made.losses(1e-2, 3, [2], FREE)
    assert seeds == [0, 3]


def test_without_held_out_examples_batches_are_set_aside():
    batches = [task().batch(i) for i in range(40)]
    seen = []

    class Spy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = wb.zoo.transformer(**SIZE)

        def forward(self, tokens):
            if self.training:
                seen.append(tokens)
            return self.inner(tokens)

    runs = runs_of(Spy(), batches)
    runs.losses(1e-2, 0, [5], FREE)
    assert all(torch.equal(one, two) for one, (two, _) in zip(seen, batches[8:13], strict=True))


def test_a_run_that_ends_in_values_that_are_not_finite_has_an_infinite_loss():
    runs = runs_of(wb.zoo.transformer(norm="none", **SIZE))
    assert runs.losses(1e6, 0, [8], FREE) == [math.inf]
    assert runs.n_updates < 8


def test_loops_of_users_run_as_far_as_needed_and_are_closed():
    closed = []

    def loop(rate, seed):
        try:
            for step in range(30):
                yield math.nan if rate > 1 and step == 4 else 1 / (step + 1)
        finally:
            closed.append((rate, seed))

    runs = LoopRuns(loop)
    assert runs.losses(0.1, 0, [10, 20], FREE) == pytest.approx([1 / 10, (1 / 19 + 1 / 20) / 2])
    assert runs.losses(2.0, 0, [4, 10], FREE) == [0.25, math.inf]
    assert runs.losses(0.1, 1, [40], FREE) == [math.inf]  # it has only 30 updates
    assert runs.n_updates == 20 + 5 + 30
    assert closed == [(0.1, 0), (2.0, 0), (0.1, 1)]
    assert LoopRuns(lambda rate, seed: [1.0, 2.0]).losses(0.1, 0, [2], FREE) == [2.0]
