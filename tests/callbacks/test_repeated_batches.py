"""Data loaders that repeat themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.callbacks.alarms.probe_alarms import RepeatedBatches


def first_report(shares, size=16.0):
    rule = RepeatedBatches()
    sizes = np.broadcast_to(size, len(shares))
    for step, (share, n) in enumerate(zip(shares, sizes, strict=True)):
        if rule.update({"repeated_examples": np.array(share), "batch_size": np.array(n)}):
            return step
    return None


@pytest.mark.parametrize("start", [260, 400, 3000])
def test_a_loader_that_repeats_itself_is_reported_within_four_batches(start):
    assert start < first_report([0.0] * start + [1.0] * 10) < start + 4


def test_after_batches_that_repeat_by_chance_more_are_needed():
    random = np.random.default_rng(0)
    before = np.where(random.random(1000) < 0.2, 1.0, 0.1)
    before[-1] = 0.1
    assert 1005 < first_report([*before, *[1.0] * 40]) < 1020


@pytest.mark.parametrize("epoch", [1, 10, 63])
def test_small_data_sets_repeat_each_batch(epoch):
    assert first_report([0.0] * epoch + [1.0] * 2000) is None


# Derandomized: for some sizes close to the memory, one order in a hundred raises a false alarm.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), n_examples=st.integers(40, 6000), size=st.sampled_from([4, 16, 32]))
def test_shuffled_epochs_are_not_reported(seed, n_examples, size):
    """The fraction is that of a probe with a memory of 1,024 examples."""
    random, recent, shares = np.random.default_rng(seed), [], []
    while len(shares) < 600:
        order = random.permutation(n_examples)
        for first in range(0, n_examples - size + 1, size):
            batch = order[first : first + size].tolist()
            known = set(recent)
            shares.append(sum(example in known for example in batch) / size)
            recent = [*recent, *batch][-1024:]
    assert first_report(shares, size) is None


def test_batches_of_another_size_and_unknown_ones_are_not_reported():
    shares = [0.0] * 300 + [1.0] * 400
    assert first_report(shares, [16.0] * 300 + [1.0] * 400) is None
    assert first_report([float("nan")] * 400) is None
    assert first_report([0.0] * 400, float("nan")) is None


class Stuck(wb.Callback):
    """From step 260 on the loader repeats three batches."""

    name = "stuck"

    def __init__(self):
        self.kept = []
        self.step = 0

    def begin_step(self, step):
        self.step = step

    def change_batch(self, inputs, targets):
        if self.step < 260:
            return inputs, targets
        if len(self.kept) < 3:
            self.kept.append((inputs, targets))
        return self.kept[(self.step - 260) % 3]


@pytest.mark.medium
def test_a_stuck_loader_raises_an_alarm_and_stops_a_run_with_actions():
    model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2, vocab_size=64, max_length=16, seed=0)
    task = wb.tasks.random_tokens(vocab_size=64, length=16, batch_size=16)
    alarms = wb.Alarms()
    assert wb.Actions().policy["repeated_data"] == ("stop",)
    run = wb.train(
        model, task, n_steps=300, recorder=wb.Recorder(every=None), alarms=alarms,
        actions=wb.Actions(policy={"repeated_data": ("stop",)}, otherwise=()), callbacks=[Stuck()],
    )  # fmt: skip
    records = list(run)
    assert (alarms.raised[0].signal, alarms.raised[0].step) == ("data", records[-1].step)
    assert 263 <= records[-1].step <= 267
    assert "the data loader repeats itself" in alarms.raised[0].message
    assert alarms.attribute().cause == "repeated_data"
