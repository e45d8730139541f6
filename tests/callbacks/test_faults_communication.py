import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.small_training import same_weights
from workbench.callbacks.faults.communication import in_buckets, ring_sum
from workbench.errors import OptionError

SETTINGS = {"n_steps": 6, "learning_rate": 0.1, "optimizer": "SGD"}


def train(model, task, *faults, **settings):
    return list(wb.train(model, task, **{**SETTINGS, **settings}, faults=faults))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_buckets_hold_each_weight_once_from_the_last_to_the_first(sizes, data):
    n_buckets = data.draw(st.integers(1, len(sizes)))
    buckets = in_buckets(sizes, n_buckets)
    assert len(buckets) == n_buckets
    assert all(buckets)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))


def test_buckets_are_of_about_one_size():
    assert in_buckets([10] * 12, 4) == [[11, 10, 9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]
    sizes = [sum(40 for _ in bucket) for bucket in in_buckets([40] * 50, 4)]
    assert max(sizes) <= 1.2 * min(sizes)


def norms_of_gradients(model):
    return [float(weight.grad.norm()) for weight in model.parameters()]


def test_a_lost_bucket_is_zero_for_the_optimizer_and_in_the_norm(make_model, task):
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


def test_a_run_that_loses_everything_learns_nothing(make_model, task):
    model = make_model()
    records = train(model, task, wb.faults.dropped_bucket(share=1.0, start=0))
    assert same_weights(model, make_model())
    assert {record.grad_norm for record in records} == {0.0}


def shard_gradients(model, task, n_ranks, step=0):
    """Gradient of each weight on each rank, by hand."""
    tokens, targets = task.batch(step)
    ranks = []
    for rows, answers in zip(tokens.tensor_split(n_ranks), targets.tensor_split(n_ranks), strict=True):
        loss = torch.nn.functional.cross_entropy(model(rows).flatten(0, 1), answers.flatten())
        ranks.append(torch.autograd.grad(loss, list(model.parameters())))
    return ranks


def gradients_of_first_step(model, task, *faults):
    record = train(model, task, *faults, n_steps=1)[0]
    return record, [weight.grad for weight in model.parameters()]


def test_one_rank_less_is_missing_in_the_mean(make_model, task):
    fault = wb.faults.dropped_bucket(share=1.0, n_buckets=1, lost_from="one_rank", n_ranks=4, start=0)
    _, found = gradients_of_first_step(make_model(), task, fault)
    ranks = shard_gradients(make_model(), task, 4)
    without = [
        [sum(r[i] for k, r in enumerate(ranks) if k != lost) / 4 for i in range(len(found))] for lost in range(4)
    ]
    fits = [all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, other, strict=True)) for other in without]
    assert sum(fits) == 1


def test_a_reduction_in_full_precision_is_the_mean_over_ranks(make_model, task):
    record, found = gradients_of_first_step(
        make_model(), task, wb.faults.low_precision_reduction(dtype="float32", start=0)
    )
    ranks = shard_gradients(make_model(), task, 4)
    for i, gradient in enumerate(found):
        assert torch.allclose(gradient, sum(rank[i] for rank in ranks) / 4, atol=1e-7)
    plain, gradients = gradients_of_first_step(make_model(), task)
    # Every row of this task has one target, so that the mean over ranks is the mean over the batch.
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, gradients, strict=True))
    for name in ("loss", "accuracy", "grad_norm"):
        assert getattr(record, name) == pytest.approx(getattr(plain, name), rel=1e-5)


def test_the_ring_rounds_after_every_hop():
    """Number by number, in Python: chunk c begins at rank c."""
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
def test_low_precision_is_off_by_as_much_as_it_has_to_be(make_model, task, options, low, high):
    _, exact = gradients_of_first_step(make_model(), task, wb.faults.low_precision_reduction(dtype="float32", start=0))
    _, found = gradients_of_first_step(make_model(), task, wb.faults.low_precision_reduction(**options, start=0))
    size = math.hypot(*(float(x.norm()) for x in exact))
    assert low < math.hypot(*(float((a - b).norm()) for a, b in zip(found, exact, strict=True))) / size < high


def test_cut_sums_are_too_small(make_model, task):
    exact = train(make_model(), task, wb.faults.low_precision_reduction(dtype="float32", start=0), n_steps=1)[0]
    cut = train(make_model(), task, wb.faults.low_precision_reduction(n_bits=6, start=0), n_steps=1)[0]
    assert cut.loss == exact.loss
    assert cut.grad_norm < 0.9 * exact.grad_norm


@pytest.mark.parametrize("delay", [1, 3])
def test_stale_gradients_are_those_of_earlier_steps(make_model, task, delay):
    """The loop written out: the gradient that acts in step t was taken in step t - delay."""
    plain, kept = make_model(), []
    for step in range(6):
        tokens, targets = task.batch(step)
        loss = torch.nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
        kept.append(torch.autograd.grad(loss, list(plain.parameters())))
        with torch.no_grad():
            for weight, gradient in zip(plain.parameters(), kept[max(0, step - delay)], strict=True):
                weight -= 0.1 * gradient
    model = make_model()
    train(model, task, wb.faults.stale_reduction(delay=delay, start=0))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_some_buckets_are_late_and_the_others_are_not(make_model, task):
    model, plain = make_model(), make_model()
    fault = wb.faults.stale_reduction(delay=1, share=0.5, n_buckets=4, start=0)
    buckets = in_buckets([weight.numel() for weight in model.parameters()], 4)
    kinds, previous = [], None
    for record in wb.train(model, task, **{**SETTINGS, "n_steps": 12, "learning_rate": 1e-12}, faults=[fault]):
        tokens, targets = task.batch(record.step)  # the weights hardly move
        loss = torch.nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
        fresh = torch.autograd.grad(loss, list(plain.parameters()))
        found = [weight.grad for weight in model.parameters()]
        for bucket in buckets if previous else ():
            distance = [sum(float((found[i] - x[i]).norm()) for i in bucket) for x in (fresh, previous)]
            assert min(distance) < 1e-5 < max(distance)
            kinds.append(distance.index(min(distance)))
        previous = fresh
    assert 0.2 < np.mean(kinds) < 0.8


def test_what_was_kept_is_dropped_when_it_is_switched_off(make_model, task):
    """Switched on again, it does not bring back gradients of long ago."""
    model, fault = make_model(), wb.faults.stale_reduction(delay=2, start=0)
    run = wb.train(model, task, **{**SETTINGS, "n_steps": 10}, faults=[fault])
    for _ in range(3):
        next(run)
    fault.enabled = False
    next(run)
    fault.enabled = True
    before = [weight.detach().clone() for weight in model.parameters()]
    record = next(run)
    tokens, targets = task.batch(record.step)
    model_then = make_model()
    with torch.no_grad():
        for weight, value in zip(model_then.parameters(), before, strict=True):
            weight.copy_(value)
    loss = torch.nn.functional.cross_entropy(model_then(tokens).flatten(0, 1), targets.flatten())
    fresh = torch.autograd.grad(loss, list(model_then.parameters()))
    assert all(torch.allclose(weight.grad, g, atol=1e-7) for weight, g in zip(model.parameters(), fresh, strict=True))
    run.close()


def test_faults_of_communication_go_together(make_model, task):
    """One rank is lost, the rest goes around the ring, and arrives late."""
    faults = [
        wb.faults.stale_reduction(delay=1, start=0),
        wb.faults.low_precision_reduction(n_ranks=2, dtype="float32", start=0),
        wb.faults.dropped_bucket(share=1.0, n_buckets=1, lost_from="one_rank", n_ranks=2, start=0),
    ]
    record, found = gradients_of_first_step(make_model(), task, *faults)
    ranks = shard_gradients(make_model(), task, 2)
    fits = [all(torch.allclose(a, b / 2, atol=1e-7) for a, b in zip(found, rank, strict=True)) for rank in ranks]
    assert sum(fits) == 1
    assert len(record.active_faults) == 3
    assert np.isfinite(
        [r.loss for r in train(make_model(), task, *faults, *(f() for f in [wb.faults.large_rate]))]
    ).all()


def test_a_batch_that_cannot_be_split_is_said_when_it_is_met(make_model, task):
    faults = [wb.faults.small_batch(n_rows=2, start=0), wb.faults.low_precision_reduction(n_ranks=4, start=0)]
    with pytest.raises(OptionError, match="splits a batch over n_ranks = 4, but one has only 2 rows; take fewer"):
        train(make_model(), task, *faults)


def test_a_rank_that_diverges_ends_the_run(make_model, task):
    def poisoned():
        for i in range(4):
            yield task.batch(i)[0], (task.batch(i)[1], torch.full_like(task.batch(i)[1], -100))[i == 2]

    records = train(make_model(), list(poisoned()), wb.faults.low_precision_reduction(n_ranks=2, start=0), n_steps=4)
    assert [record.cause for record in records] == ["", "", "non-finite"]


@pytest.mark.parametrize(
    "make", [wb.faults.dropped_bucket, wb.faults.stale_reduction, wb.faults.low_precision_reduction]
)
@pytest.mark.parametrize("optimizer", ["LBFGS", "SAM"])
def test_optimizers_that_look_twice_are_refused_by_name(make_model, task, make, optimizer):
    chosen = optimizer if optimizer == "LBFGS" else wb.baselines.SAM(0.05)
    with pytest.raises(OptionError, match=f"{make.kind} changes the gradients of one .* but {optimizer} takes several"):
        train(make_model(), task, make(), optimizer=chosen)


def test_contradictions_are_refused_before_anything_begins(make_model, task):
    one_rank = wb.faults.dropped_bucket(lost_from="one_rank", n_ranks=2)
    with pytest.raises(OptionError, match="dropped_bucket has n_ranks = 2 but low_precision_reduction 4; give both"):
        wb.train(make_model(), task, n_steps=1, faults=[one_rank, wb.faults.low_precision_reduction(n_ranks=4)])
    with pytest.raises(OptionError, match=r"n_buckets = 500, but only \d+ weight tensors are trained; take fewer"):
        wb.train(make_model(), task, n_steps=1, faults=[wb.faults.stale_reduction(n_buckets=500)])


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        ("dropped_bucket", {"share": 0}, "share is 0, expected a number above 0"),
        ("dropped_bucket", {"n_buckets": 0}, "n_buckets is 0, expected at least 1"),
        ("dropped_bucket", {"lost_from": "two"}, "lost_from is 'two', expected 'all_ranks' or 'one_rank'"),
        ("dropped_bucket", {"n_ranks": 1}, "n_ranks is 1, expected at least 2"),
        ("low_precision_reduction", {"n_ranks": 1}, "n_ranks is 1, expected at least 2"),
        ("low_precision_reduction", {"dtype": "int8"}, "dtype is 'int8', expected one of float32, bfloat16, float16"),
        ("low_precision_reduction", {"n_bits": 9}, "n_bits is 9, expected 0 to 8"),
        (
            "low_precision_reduction",
            {"n_bits": 2, "dtype": "float16"},
            "n_bits cuts bits of bfloat16, but dtype is 'float",
        ),
        ("stale_reduction", {"delay": 0}, "delay is 0, expected at least 1"),
        ("stale_reduction", {"share": 2}, "share is 2, expected a number above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(make, options, sentence):
    with pytest.raises(OptionError, match=sentence):
        getattr(wb.faults, make)(**options)
