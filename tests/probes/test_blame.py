"""Passes and rows made by hand: what was planted is blamed, and nobody if nothing was."""

import math

import numpy as np
import pytest

from workbench.probes.blame import Blame, Passes, PassHistory, Rows, judge_rows, nobody

N_PARAMETERS, N_SIGNS = 4, 8
WORDS = "no rank, micro-batch or row departs"


def has(sentence, *words):
    """Return whether a sentence has all words."""
    return all(each in sentence for each in words)


def passes(step, rng, *, shape=(2, 3), change=lambda sketch, loss, weights: None):
    """Return passes of an update with gradients of one direction and noise, whose norms differ by parameter."""
    common = np.random.default_rng(7).normal(size=(N_PARAMETERS, N_SIGNS))
    noise = rng.normal(size=(*shape, N_PARAMETERS, N_SIGNS))
    vectors = (2 * common + noise) * np.array([1.0, 10.0, 0.1, 3.0])[:, None]
    # The size of all gradients of an update varies much more than that within it.
    vectors *= math.exp(rng.normal()) * np.exp(0.1 * rng.normal(size=(*shape, 1, 1)))
    sketch = np.concatenate([vectors, np.linalg.norm(vectors, axis=-1, keepdims=True)], -1)
    loss = 2 + 0.05 * rng.normal(size=shape)
    weights = np.broadcast_to(np.arange(1.0, 1 + N_SIGNS + 1), (shape[0], N_PARAMETERS, N_SIGNS + 1)).copy()
    change(sketch, loss, weights)
    return Passes(step, sketch, loss, weights)


def history(rng, **options):
    past = PassHistory()
    for step in range(40):
        now = passes(step, rng, **options)
        past.add(now, past.judge(now))
    return past


def scaled(factor):
    def change(sketch, loss, weights):
        sketch[1, 2] *= factor

    return change


def at(index, value, *, of="sketch"):
    def change(sketch, loss, weights):
        {"sketch": sketch, "loss": loss, "weights": weights}[of][index] = value

    return change


def turned(sketch, loss, weights):
    sketch[1, 2, :, :-1] *= -1


PLANTED = {
    "scaled": (scaled(8.0), "size", "times what it usually is"),
    "scaled down": (scaled(0.1), "size", "times what it usually is"),
    "turned": (turned, "turn", "the cosine of its gradient with the others"),
    "loss": (at((1, 2), 4.0, of="loss"), "loss", "its loss is 4, and in the middle of all 2"),
    "not finite": (at((1, 2, 0, -1), np.inf), "finite", "its gradient is not finite"),
    "zero": (at((1, 2), 0.0), "zero", "its gradient is zero"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pass_is_blamed(name):
    change, kind, words = PLANTED[name]
    rng = np.random.default_rng(3)
    past = history(rng)
    found = past.judge(passes(40, rng, change=change))
    assert (found.rank, found.micro_batch, found.kind) == (1, 2, kind)
    assert found.score >= 1
    assert has(found.sentence, "rank 1, micro-batch 3 of 3", words)


def test_healthy_passes_are_seldom_blamed_whatever_all_of_them_do_together():
    rng = np.random.default_rng(4)
    past, scores = history(rng), []
    for step in range(40, 240):
        now = passes(step, rng)
        scores.append(past.judge(now).score)
        past.add(now, past.judge(now))
    assert np.mean(np.array(scores) >= 1) <= 0.02


def test_a_rank_that_is_always_different_is_not_blamed_for_it():
    def different(sketch, loss, weights):
        sketch[1] *= 3.0
        loss[1] += 1.0

    rng = np.random.default_rng(5)
    past = history(rng, change=different)
    assert past.judge(passes(40, rng, change=different)).score < 1
    assert past.judge(passes(41, rng, change=lambda *of: (different(*of), scaled(8.0)(*of)))).micro_batch == 2


def test_of_two_passes_the_one_is_blamed_that_departs_from_its_own_past():
    def both(sketch, loss, weights):
        loss[1, 0] = 4.0

    rng = np.random.default_rng(6)
    past = history(rng, shape=(2, 1))
    found = past.judge(passes(40, rng, shape=(2, 1), change=both))
    assert (found.rank, found.micro_batch, found.kind) == (1, 0, "loss")
    assert has(found.sentence, "rank 1: its loss")


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_with_other_parameters_is_named_if_most_ranks_agree(n_ranks):
    now = passes(0, np.random.default_rng(0), shape=(n_ranks, 2), change=at((1, 3, 2), 5.5, of="weights"))
    found = PassHistory().judge(now)
    if n_ranks == 3:
        assert (found.rank, found.kind) == (1, "parameters")
    else:
        assert (found.is_found, found.kind, judge_rows(now, found, [])) == (False, "parameters", found)
        assert has(found.sentence, "the parameters of the ranks differ", "do not show which one is wrong")


def test_gradients_that_are_nowhere_finite_blame_no_pass():
    now = passes(0, np.random.default_rng(0), change=at((..., 0, -1), np.inf))
    found = PassHistory().judge(now)
    assert (found.rank, found.score) == (-1, math.inf)
    assert has(judge_rows(now, found, []).sentence, WORDS)


def rows(rng, *, micro=0, n=12, change=lambda features: None, **options):
    features = {"size": rng.normal(size=n) * 0.3, "loss": 2 + 0.2 * rng.normal(size=n), "scale": 0.2 * rng.random(n)}
    change(features)
    return Rows(0, micro, range(n), features, {5: "8812"}, **options)


def planted(name, value):
    def change(features):
        features[name][5] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (planted("size", math.log(41.0)), "times the median of the others"),
        (planted("loss", 9.0), "its loss is 9"),
        (planted("scale", 8.0), "its inputs are"),
        (planted("size", math.inf), "its gradient is not finite"),
    ],
)
def test_a_planted_row_is_blamed(change, words):
    rng = np.random.default_rng(1)
    now = passes(0, rng, shape=(1, 4))
    groups = [rows(rng, micro=m, change=change if m == 2 else lambda features: None) for m in range(4)]
    found = judge_rows(now, nobody(0), groups)
    assert (found.rank, found.micro_batch, found.row, found.row_id) == (0, 2, 5, "8812")
    assert has(found.sentence, "micro-batch 3 of 4, row 5 (id 8812)", words)
    healthy = judge_rows(now, nobody(0), [rows(rng, micro=m) for m in range(4)])
    assert has(healthy.sentence, WORDS)
    assert not healthy.is_found


def test_many_rows_are_blamed_as_a_micro_batch():
    rng = np.random.default_rng(2)
    now = passes(0, rng, shape=(1, 4))
    pass_ = Blame(0, "micro-batch 3 of 4: its loss is 4", 0, 2, score=2.0, kind="loss")

    def half(features):
        features["size"][::2] += 6.0

    groups = [rows(rng, micro=m, change=half if m == 2 else lambda features: None) for m in range(4)]
    assert judge_rows(now, pass_, groups) == pass_


def test_a_loss_with_another_weight_blames_its_pass():
    rng = np.random.default_rng(2)
    now = passes(0, rng, shape=(1, 4))
    groups = [rows(rng, micro=m, weight=0.25 * (1.5 if m == 3 else 1.0)) for m in range(4)]
    found = judge_rows(now, nobody(0), groups)
    assert (found.micro_batch, found.row, found.kind) == (3, -1, "weight")
    assert has(found.sentence, "its loss has 1.5 times the weight of the others")
    same = [rows(rng, micro=m, weight=0.25) for m in range(4)]
    assert not judge_rows(now, nobody(0), same).is_found


def test_a_gradient_that_its_batch_does_not_give_blames_the_arithmetic_and_no_row():
    rng = np.random.default_rng(2)
    now = passes(0, rng, shape=(1, 4))
    groups = [
        rows(rng, micro=m, off=0.9 if m == 1 else 0.02, scale=2.0 if m == 1 else 1.0, change=planted("size", 5.0))
        for m in range(4)
    ]
    found = judge_rows(now, nobody(0), groups, is_current=True)
    assert judge_rows(now, nobody(0), groups).kind != "replay"  # parameters of a later update give other gradients
    assert (found.micro_batch, found.row, found.kind) == (1, -1, "replay")
    assert has(found.sentence, "its gradient is 2 times the one that its batch gives")
