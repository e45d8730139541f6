import copy
import math
from itertools import islice

import pytest
import torch

import workbench as wb
from tests.about import says
from workbench.errors import OptionError
from workbench.rates.rate_search import LoopRuns, ModelRuns
from workbench.training.training_plan import TrainingPlan

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
    with pytest.raises(OptionError, check=says("The data can be read only once, but every pilot run reads")):
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
