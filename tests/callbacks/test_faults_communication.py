import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from workbench.callbacks.faults.communication import in_buckets, ring_sum
from workbench.errors import OptionError

SETTINGS = {"n_steps": 6, "learning_rate": 0.1, "optimizer": "SGD"}


def train(model, task, *faults, **settings):
    return list(wb.train(model, task, **{**SETTINGS, **settings}, faults=faults))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_buckets_contain_each_parameter_once_from_the_last_to_the_first(sizes, data):
    n_buckets = data.draw(st.integers(1, len(sizes)))
    buckets = in_buckets(sizes, n_buckets)
    assert len(buckets) == n_buckets
    assert all(buckets)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))


def norms_of_gradients(model):
    return [float(weight.grad.norm()) for weight in model.parameters()]


def test_a_lost_bucket_is_zero_in_the_gradients_and_in_their_norm(make_model, task):
    model = make_model()
    fault = wb.faults.dropped_bucket(share=0.5, n_buckets=4, start=0)
    n_lost, buckets = [], in_buckets([weight.numel() for weight in model.parameters()], 4)
    for record in wb.train(model, task, **{**SETTINGS, "n_steps": 24}, faults=[fault]):
        norms = norms_of_gradients(model)
        is_lost = [all(norms[i] == 0 for i in bucket) for bucket in buckets]
        assert all(lost or any(norms[i] > 0 for i in bucket) for lost, bucket in zip(is_lost, buckets, strict=True))
        assert record.grad_norm == pytest.approx(math.hypot(*norms), rel=1e-5, abs=1e-12)
        n_lost.append(sum(is_lost))
    assert np.mean(n_lost) == pytest.approx(2, abs=0.6)
    assert len(set(n_lost)) > 1  # drawn in each step


def shard_gradients(model, task, n_ranks, step=0):
    """Compute the gradient of each parameter on each rank explicitly."""
    tokens, targets = task.batch(step)
    ranks = []
    for inputs, labels in zip(tokens.tensor_split(n_ranks), targets.tensor_split(n_ranks), strict=True):
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        ranks.append(torch.autograd.grad(loss, list(model.parameters())))
    return ranks


def gradients_of_first_step(model, task, *faults):
    record = train(model, task, *faults, n_steps=1)[0]
    return record, [weight.grad for weight in model.parameters()]


def test_a_bucket_lost_from_one_rank_is_missing_from_the_mean(make_model, task):
    fault = wb.faults.dropped_bucket(share=1.0, n_buckets=1, lost_from="one_rank", n_ranks=4, start=0)
    _, found = gradients_of_first_step(make_model(), task, fault)
    ranks = shard_gradients(make_model(), task, 4)
    without = [
        [sum(r[i] for k, r in enumerate(ranks) if k != lost) / 4 for i in range(len(found))] for lost in range(4)
    ]
    matches = [all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, other, strict=True)) for other in without]
    assert sum(matches) == 1


def test_a_reduction_in_full_precision_is_the_mean_over_ranks(make_model, task):
    record, found = gradients_of_first_step(
        make_model(), task, wb.faults.low_precision_reduction(dtype="float32", start=0)
    )
    ranks = shard_gradients(make_model(), task, 4)
    for i, gradient in enumerate(found):
        assert torch.allclose(gradient, sum(rank[i] for rank in ranks) / 4, atol=1e-7)
    without, gradients = gradients_of_first_step(make_model(), task)
    # All examples of this task have one target, so that the mean over ranks equals the mean over the batch.
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, gradients, strict=True))
    for name in ("loss", "accuracy", "grad_norm"):
        assert getattr(record, name) == pytest.approx(getattr(without, name), rel=1e-5)


def test_the_ring_rounds_after_every_addition():
    """The reference is computed number by number; chunk c begins at rank c."""
    ranks, fault = draw(3, 7), wb.faults.low_precision_reduction(n_ranks=3)

    def rounded(x):
        return torch.tensor(x).bfloat16().float().item()

    chunk_of = [0, 0, 0, 1, 1, 2, 2]
    for i, total in enumerate(ring_sum(list(ranks), fault).tolist()):
        order = [(chunk_of[i] + hop) % 3 for hop in range(3)]
        expected = rounded(ranks[order[0], i].item())
        for rank in order[1:]:
            expected = rounded(expected + rounded(ranks[rank, i].item()))
        assert total == expected


@pytest.mark.parametrize(
    ("options", "low", "high"), [({}, 1e-4, 5e-3), ({"n_bits": 6}, 0.1, 0.6), ({"dtype": "float16"}, 1e-6, 1e-3)]
)
def test_the_relative_error_of_the_reduction_matches_the_precision(make_model, task, options, low, high):
    _, exact = gradients_of_first_step(make_model(), task, wb.faults.low_precision_reduction(dtype="float32", start=0))
    _, found = gradients_of_first_step(make_model(), task, wb.faults.low_precision_reduction(**options, start=0))
    size = math.hypot(*(float(x.norm()) for x in exact))
    assert low < math.hypot(*(float((a - b).norm()) for a, b in zip(found, exact, strict=True))) / size < high


@pytest.mark.parametrize("delay", [1, 3])
def test_stale_gradients_are_those_of_earlier_steps(make_model, task, delay):
    """The reference is an explicit loop, in which step t applies the gradient of step t - delay."""
    reference, kept = make_model(), []
    for step in range(6):
        tokens, targets = task.batch(step)
        loss = torch.nn.functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
        kept.append(torch.autograd.grad(loss, list(reference.parameters())))
        with torch.no_grad():
            for parameter, gradient in zip(reference.parameters(), kept[max(0, step - delay)], strict=True):
                parameter -= 0.1 * gradient
    model = make_model()
    train(model, task, wb.faults.stale_reduction(delay=delay, start=0))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_only_some_buckets_are_delayed(make_model, task):
    model, reference = make_model(), make_model()
    fault = wb.faults.stale_reduction(delay=1, share=0.5, n_buckets=4, start=0)
    buckets = in_buckets([weight.numel() for weight in model.parameters()], 4)
    kinds, previous = [], None
    for record in wb.train(model, task, **{**SETTINGS, "n_steps": 12, "learning_rate": 1e-12}, faults=[fault]):
        tokens, targets = task.batch(record.step)  # the parameters are almost constant
        loss = torch.nn.functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
        current = torch.autograd.grad(loss, list(reference.parameters()))
        found = [parameter.grad for parameter in model.parameters()]
        for bucket in buckets if previous else ():
            distance = [sum(float((found[i] - x[i]).norm()) for i in bucket) for x in (current, previous)]
            assert min(distance) < 1e-5 < max(distance)
            kinds.append(distance.index(min(distance)))
        previous = current
    assert 0.2 < np.mean(kinds) < 0.8


def test_switching_off_discards_the_stored_gradients(make_model, task):
    """After it is switched on again, the fault does not use gradients from before."""
    model, fault = make_model(), wb.faults.stale_reduction(delay=2, start=0)
    run = wb.train(model, task, **{**SETTINGS, "n_steps": 10}, faults=[fault])
    for _ in range(3):
        next(run)
    fault.enabled = False
    next(run)
    fault.enabled = True
    before = [parameter.detach().clone() for parameter in model.parameters()]
    record = next(run)
    tokens, targets = task.batch(record.step)
    reference = make_model()
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), before, strict=True):
            parameter.copy_(value)
    loss = torch.nn.functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(loss, list(reference.parameters()))
    assert all(torch.allclose(p.grad, g, atol=1e-7) for p, g in zip(model.parameters(), expected, strict=True))
    run.close()


def test_faults_of_communication_can_be_combined(make_model, task):
    """The gradient of one rank is lost, the others are summed in a ring, and the sum is delayed."""
    faults = [
        wb.faults.stale_reduction(delay=1, start=0),
        wb.faults.low_precision_reduction(n_ranks=2, dtype="float32", start=0),
        wb.faults.dropped_bucket(share=1.0, n_buckets=1, lost_from="one_rank", n_ranks=2, start=0),
    ]
    record, found = gradients_of_first_step(make_model(), task, *faults)
    ranks = shard_gradients(make_model(), task, 2)
    matches = [all(torch.allclose(a, b / 2, atol=1e-7) for a, b in zip(found, rank, strict=True)) for rank in ranks]
    assert sum(matches) == 1
    assert len(record.active_faults) == 3
    records = train(make_model(), task, *faults, wb.faults.large_rate())
    assert np.isfinite([record.loss for record in records]).all()


def test_a_batch_with_too_few_examples_to_split_raises(make_model, task):
    faults = [wb.faults.small_batch(n_rows=2, start=0), wb.faults.low_precision_reduction(n_ranks=4, start=0)]
    with pytest.raises(OptionError, check=about("n_ranks", 4)):
        train(make_model(), task, *faults)


def test_a_rank_that_diverges_ends_the_run(make_model, task):
    def without_labels_in_one_batch():
        for i in range(4):
            yield task.batch(i)[0], (task.batch(i)[1], torch.full_like(task.batch(i)[1], -100))[i == 2]

    fault = wb.faults.low_precision_reduction(n_ranks=2, start=0)
    records = train(make_model(), list(without_labels_in_one_batch()), fault, n_steps=4)
    assert [record.cause for record in records] == ["", "", "non-finite"]


@pytest.mark.parametrize(
    "make", [wb.faults.dropped_bucket, wb.faults.stale_reduction, wb.faults.low_precision_reduction]
)
@pytest.mark.parametrize("optimizer", ["LBFGS", "SAM"])
def test_optimizers_with_several_passes_per_step_are_rejected(make_model, task, make, optimizer):
    chosen = optimizer if optimizer == "LBFGS" else wb.baselines.SAM(0.05)
    with pytest.raises(OptionError, check=about("optimizer", optimizer)):
        train(make_model(), task, make(), optimizer=chosen)


def test_contradictions_are_rejected_before_training_begins(make_model, task):
    one_rank = wb.faults.dropped_bucket(lost_from="one_rank", n_ranks=2)
    with pytest.raises(OptionError, check=says("but low_precision_reduction has")):
        wb.train(make_model(), task, n_steps=1, faults=[one_rank, wb.faults.low_precision_reduction(n_ranks=4)])
    with pytest.raises(OptionError, check=about("n_buckets", 500)):
        wb.train(make_model(), task, n_steps=1, faults=[wb.faults.stale_reduction(n_buckets=500)])
    with pytest.raises(OptionError, check=about("dtype", "float16")):
        wb.faults.low_precision_reduction(n_bits=2, dtype="float16")
