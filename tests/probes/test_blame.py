"""Passes and rows made by hand: what was planted is blamed, and nobody if nothing was."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from workbench.callbacks.recorder.blame import row_values
from workbench.probes.blame import ROW_VALUES, Passes, PassHistory, Rows, judge

N_PARAMETERS, N_SIGNS = 4, 8
WORDS = "no rank, micro-batch or row departs"


def has(sentence, *words):
    """Return whether a sentence has all words."""
    return all(each in sentence for each in words)


def passes(step, rng, *, shape=(2, 3), change=lambda sketch, loss, weights: None):
    """Return passes of an update, whose losses are alike."""
    vectors = rng.normal(size=(*shape, N_PARAMETERS, N_SIGNS))
    sketch = np.concatenate([vectors, np.linalg.norm(vectors, axis=-1, keepdims=True)], -1)
    # The losses of all passes of an update vary much more than within it.
    loss = 2 * math.exp(0.5 * rng.normal()) * (1 + 0.025 * rng.normal(size=shape))
    weights = np.broadcast_to(np.arange(1.0, 1 + N_SIGNS + 1), (shape[0], N_PARAMETERS, N_SIGNS + 1)).copy()
    change(sketch, loss, weights)
    return Passes(step, sketch, loss, weights)


def history(rng, **options):
    past = PassHistory()
    for step in range(40):
        past.add(passes(step, rng, **options))
    return past


def judged(past, now, groups=()):
    """Return who spoiled an update, which belongs to the past from then on."""
    past.add(now)
    return judge(now, past, groups)


def at(index, value, *, of="sketch"):
    def change(sketch, loss, weights):
        {"sketch": sketch, "loss": loss, "weights": weights}[of][index] = value

    return change


def higher(factor, rank=1):
    def change(sketch, loss, weights):
        loss[rank] *= factor

    return change


def same(sketch, loss, weights):
    """Make the losses of all updates alike."""
    loss[:] *= 2 / loss.mean()


def one_higher(sketch, loss, weights):
    loss[1, 2] *= 2


PLANTED = {
    "loss": (one_higher, "loss", "and in the middle of all"),
    "not finite": (at((1, 2, 0, -1), np.inf), "finite", "its gradient is not finite"),
    "zero": (at((1, 2), 0.0), "zero", "its gradient is zero"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pass_is_blamed(name):
    change, kind, words = PLANTED[name]
    rng = np.random.default_rng(3)
    past = history(rng)
    found = judged(past, passes(40, rng, change=change))
    assert (found.rank, found.micro_batch, found.kind) == (1, 2, kind)
    assert found.score >= 1
    assert has(found.sentence, "rank 1, micro-batch 3 of 3", words)


def test_healthy_passes_are_seldom_blamed_whatever_all_of_them_do_together():
    rng = np.random.default_rng(4)
    past = history(rng)
    scores = [judged(past, passes(step, rng)).score for step in range(40, 240)]
    assert np.mean(np.array(scores) >= 1) <= 0.02


def test_a_rank_that_is_always_different_is_not_blamed_for_it():
    rng = np.random.default_rng(5)
    past = history(rng, change=higher(1.5))
    assert judged(past, passes(40, rng, change=higher(1.5))).score < 1
    assert judged(past, passes(41, rng, change=lambda *of: (higher(1.5)(*of), one_higher(*of)))).micro_batch == 2


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_small_departures_of_a_rank_are_summed_over_updates(n_ranks):
    rng = np.random.default_rng(5)
    past, options = history(rng, shape=(n_ranks, 2)), {"shape": (n_ranks, 2), "change": higher(1.08)}
    found = [judged(past, passes(step, rng, **options)) for step in range(40, 48)]  # by three standard deviations
    assert not found[0].is_found
    assert (found[-1].rank, found[-1].micro_batch, found[-1].kind) == (1, -1, "loss")
    assert has(found[-1].sentence, "rank 1: its loss is", "in the latest")


def test_of_two_passes_the_one_is_blamed_that_departs_from_its_own_past():
    rng = np.random.default_rng(6)
    past = history(rng, shape=(2, 1), change=same)
    found = judged(past, passes(40, rng, shape=(2, 1), change=lambda *of: (same(*of), higher(2)(*of))))
    assert (found.rank, found.micro_batch, found.kind) == (1, 0, "loss")
    assert has(found.sentence, "rank 1: its loss")


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_with_other_parameters_is_named_if_most_ranks_agree(n_ranks):
    now = passes(0, np.random.default_rng(0), shape=(n_ranks, 2), change=at((1, 3, 2), 5.5, of="weights"))
    found = judge(now, PassHistory(), [])
    if n_ranks == 3:
        assert (found.rank, found.kind) == (1, "parameters")
    else:
        assert (found.is_found, found.kind) == (False, "parameters")
        assert has(found.sentence, "the parameters of the ranks differ", "do not show which one is wrong")


def test_gradients_that_are_nowhere_finite_blame_no_pass():
    now = passes(0, np.random.default_rng(0), change=at((..., 0, -1), np.inf))
    found = judge(now, PassHistory(), [])
    assert (found.rank, found.score) == (-1, math.inf)
    assert has(found.sentence, "No gradient is finite")


def rows(rng, *, micro=0, n=12, change=lambda values: None, rank=0, step=0, **options):
    """Return rows of 30 labels each, whose losses are those that the model expects."""
    known = {"loss": 60 + rng.normal(size=n) * 3, "surprise": rng.normal(size=n) * 3, "variance": np.full(n, 8.7)}
    known |= {"labels": np.full(n, 30.0), "weight": np.full(n, 0.01), "inputs": np.exp(0.1 * rng.normal(size=n))}
    known["norm"] = np.exp(0.3 * rng.normal(size=n))
    change(known)
    known["square"] = 0.9 * known["labels"]
    known |= {"product": known["weight"] * known["square"], "given": known["weight"] ** 2 * known["square"]}
    known["bound"] = 0.95 * known["weight"]
    values = np.stack([known[name] for name in ROW_VALUES], 1)
    return Rows(step, rank, micro, values, {5: "8812"}, **options)


def planted(**values):
    def change(known):
        for name, value in values.items():
            known[name][5] = value

    return change


def of_no_labels(known):
    known["surprise"][:] = known["variance"][:] = known["weight"][:] = math.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            planted(surprise=30.0, loss=90.0, norm=3.0),
            "its loss is 3 a label, where the model expects 2; its gradient is",
        ),
        (planted(inputs=80.0, norm=3.0), "its inputs are"),
        (planted(norm=math.inf), "its gradient is not finite"),
        (planted(weight=0.1), "its loss has at least 9.5 times the weight of the others"),
        (planted(norm=math.exp(5)), "its gradient is 1"),
    ],
)
def test_a_planted_row_is_blamed(change, words):
    rng = np.random.default_rng(1)
    is_finite = "finite" not in words
    now = passes(0, rng, shape=(1, 4), change=at((0, 2, 0, -1), 1.0 if is_finite else np.inf))

    def changed(known, is_bad):
        if words == "its gradient is 1":  # the loss is not known to be a cross entropy
            of_no_labels(known)
        if is_bad:
            change(known)

    groups = [rows(rng, micro=m, change=lambda known, m=m: changed(known, m == 2)) for m in range(4)]
    found = judge(now, PassHistory(), groups)
    assert (found.rank, found.micro_batch, found.row, found.row_id) == (0, 2, 5, "8812")
    assert has(found.sentence, "micro-batch 3 of 4, row 5 (id 8812)", words)
    healthy = judge(passes(0, rng, shape=(1, 4)), PassHistory(), [rows(rng, micro=m) for m in range(4)])
    assert has(healthy.sentence, WORDS)
    assert not healthy.is_found


def test_a_row_that_is_unlike_the_others_but_too_small_to_spoil_the_update_is_not_blamed():
    rng = np.random.default_rng(1)
    change = planted(surprise=30.0, loss=90.0, norm=0.1)
    groups = [rows(rng, micro=m, change=change if m == 2 else lambda known: None) for m in range(4)]
    assert not judge(passes(0, rng, shape=(1, 4)), PassHistory(), groups).is_found


def test_many_rows_are_blamed_as_a_micro_batch():
    rng = np.random.default_rng(2)

    def some(known):
        known["surprise"][:5] += 30.0
        known["norm"][:5] *= 3.0

    groups = [rows(rng, micro=m, change=some if m == 2 else lambda known: None) for m in range(4)]
    found = judge(passes(0, rng, shape=(1, 4)), PassHistory(), groups)
    assert (found.micro_batch, found.row) == (2, -1)
    assert has(found.sentence, "5 of its 12 rows depart from those of the others")


def test_a_micro_batch_whose_rows_are_all_a_little_too_surprising_is_blamed():
    rng = np.random.default_rng(2)
    past, groups = history(rng, shape=(1, 4)), []
    for step in range(20, 40):
        groups += [rows(rng, micro=m, step=step) for m in range(4)]

    def higher(known):
        known["surprise"] += 9.0  # three standard deviations of a row, ten of all twelve

    groups += [rows(rng, micro=m, step=40, change=higher if m == 1 else lambda known: None) for m in range(4)]
    found = judged(past, passes(40, rng, shape=(1, 4)), groups)
    assert (found.micro_batch, found.row, found.kind) == (1, -1, "surprise")
    assert has(found.sentence, "standard deviations above what the model expects")


@pytest.mark.parametrize(("n_micro", "shape"), [(1, (1, 4)), (2, (3, 2))])
def test_a_loss_with_another_weight_blames_its_pass_or_its_rank(n_micro, shape):
    rng = np.random.default_rng(2)
    now = passes(0, rng, shape=shape)

    def heavier(known):
        known["weight"] *= 1.5

    bad = [(shape[0] - 1, m) for m in range(n_micro)]
    places = [(r, m) for r in range(shape[0]) for m in range(shape[1])]
    groups = [rows(rng, rank=r, micro=m, change=heavier if (r, m) in bad else lambda known: None) for r, m in places]
    found = judge(now, PassHistory(), groups)
    assert (found.rank, found.micro_batch, found.row, found.kind) == (
        bad[0][0],
        0 if n_micro == 1 else -1,
        -1,
        "weight",
    )
    assert has(found.sentence, "its loss has 1.5 times the weight of the others")
    # Loops that weight each label alike, however many a micro-batch has, are sound, and so are those that average.
    for weight in (0.01, None):

        def counted(known, weight=weight):
            known["labels"] *= rng.integers(1, 9)
            known["weight"][:] = weight or 1 / known["labels"].sum()

        same = [rows(rng, rank=r, micro=m, change=counted) for r, m in places]
        assert not judge(now, PassHistory(), same).is_found


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_gradient_that_its_batch_does_not_give_blames_the_arithmetic_and_no_row(is_turned):
    rng = np.random.default_rng(2)
    now = passes(0, rng, shape=(1, 4))
    bad = {"off": 0.9} if is_turned else {"off": 0.02, "scale": 2.0}
    groups = [
        rows(rng, micro=m, **({"off": 0.02, "scale": 1.0} | (bad if m == 1 else {})), change=planted(surprise=30.0))
        for m in range(4)
    ]
    found = judge(now, PassHistory(), groups)
    assert (found.micro_batch, found.row, found.kind) == (1, -1, "replay")
    words = "its gradient is not the one" if is_turned else "its gradient is 2 times the one that its batch gives"
    assert has(found.sentence, words)
    # If no gradient can be computed again, because the parameters have moved too far, this says nothing.
    apart = [rows(rng, micro=m, off=0.6 + 0.35 * (m == 1), scale=1.0 + 2 * (m == 1)) for m in range(4)]
    assert not judge(now, PassHistory(), apart).is_found


def test_surprises_of_labels_that_are_drawn_from_the_predictions_have_mean_0_and_variance_1():
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.rand(3000, 40, 1, generator=generator) * 4  # sure and unsure predictions
    logits = torch.randn(3000, 40, 20, generator=generator) * sharpness
    labels = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(3000, 40)
    counts = torch.rand(3000, 40, generator=generator) < torch.rand(3000, 1, generator=generator) * 0.9 + 0.1
    labels = labels.where(counts, -100)
    values = np.concatenate([row_values(logits, labels, None).numpy(), np.zeros((3000, 2))], 1)
    alone = np.array([Rows(0, 0, 0, values[i : i + 1]).surprise for i in range(3000)])
    alone = alone[np.isfinite(alone)]  # of rows with labels
    assert abs(alone.mean()) < 0.06
    assert alone.std() == pytest.approx(1, abs=0.06)
    assert abs(Rows(0, 0, 0, values).surprise) < 3
    other = torch.where(counts, torch.randint(20, labels.shape, generator=generator), -100)
    shuffled = row_values(logits[:500], other[:500], None).numpy()
    assert np.median(shuffled[:, 1] / np.sqrt(shuffled[:, 2] + 1e-9)) > 3


def test_the_values_of_rows_are_those_of_their_cross_entropy():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, 9, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(9, (4, 6), generator=generator)
    labels[1, 2:] = -100
    weights = torch.tensor([0.1, 0.1, 0.5, 0.1])
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(4, 6)
    (losses * weights[:, None]).sum().backward()
    found = row_values(logits.detach(), labels, logits.grad)
    p = logits.detach().softmax(-1)
    expected = (p * -p.log()).sum(-1)
    variance = (p * (-p.log() - expected[..., None]).square()).sum(-1)
    counts = labels != -100
    oracle = [losses.detach().sum(1), ((losses.detach() - expected) * counts).sum(1), (variance * counts).sum(1)]
    torch.testing.assert_close(found[:, :3], torch.stack(oracle, 1))
    assert found[:, 3].tolist() == [6, 2, 6, 6]
    torch.testing.assert_close(found[:, 4] / found[:, 5], weights.double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close((found[:, 6] / found[:, 5]).sqrt(), weights.double(), atol=1e-6, rtol=1e-6)
    right = p.gather(-1, labels.clamp_min(0)[..., None])[..., 0].where(counts, torch.ones(()).double())
    torch.testing.assert_close(found[:, 7], weights * (1 - right.amin(1)), atol=1e-6, rtol=1e-6)
