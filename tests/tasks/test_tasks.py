"""Generated tasks: common properties, and the properties of each."""

import hashlib
import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import about
from workbench.errors import OptionError
from workbench.tasks.images import split_rows
from workbench.tasks.sequences import split_text
from workbench.tasks.task import shuffled_rows

tasks = wb.tasks
MAKERS = [tasks.associative_recall, tasks.text_bytes, tasks.synthetic_lm, tasks.random_tokens, tasks.digits]
TOKEN_MAKERS = MAKERS[:-1]

#: Options of all tasks, in their ranges.
seeds = st.integers(-(2**32), 2**32)
batch_sizes = st.integers(1, 9)
indices = st.integers(0, 10**6)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


# Common properties


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, index=indices, batch_size=batch_sizes)
def test_a_batch_depends_only_on_seed_and_number(make, seed, index, batch_size):
    before = random_states()
    task = make(seed=seed, batch_size=batch_size)
    first = task.batch(index)
    task.batch(index + 1)
    assert equal(first, make(seed=seed, batch_size=batch_size).batch(index))
    assert random_states() == before
    assert len(first[0]) == len(first[1]) == batch_size
    assert first[1].dtype == torch.int64


@pytest.mark.parametrize("make", TOKEN_MAKERS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, index=indices, batch_size=batch_sizes, length=st.integers(9, 40))
def test_tokens_and_targets_are_in_the_vocabulary(make, seed, index, batch_size, length):
    task = make(seed=seed, length=length, batch_size=batch_size)
    tokens, targets = task.batch(index)
    assert tokens.shape == targets.shape == (batch_size, length)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() < task.vocab_size
    predicted = targets[targets != -100]
    assert predicted.min() >= 0
    assert predicted.max() < task.vocab_size


@pytest.mark.parametrize("make", [tasks.text_bytes, tasks.synthetic_lm, tasks.random_tokens])
def test_targets_are_the_next_tokens(make):
    tokens, targets = make(length=30).batch(2)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (targets >= 0).all()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("start", [0, 5])
def test_a_stream_has_the_batches_from_a_number_on(make, start):
    task = make(seed=1, batch_size=3)
    for i, batch in enumerate(islice(task.stream(start), 3)):
        assert equal(batch, task.batch(start + i))
    assert equal(next(iter(task)), task.batch(0))


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=8, deadline=None)
@given(n_tokens=st.integers(1, 3000), batch_size=batch_sizes)
def test_a_probe_has_enough_states_and_is_always_the_same(make, n_tokens, batch_size):
    task = make(seed=4, batch_size=batch_size)
    probe = task.probe(n_tokens)
    task.batch(3)
    assert torch.equal(probe, task.probe(n_tokens))
    assert torch.equal(probe, make(seed=4, batch_size=batch_size + 1).probe(n_tokens))
    per_row = 16 if task.name == "digits" else task.length
    assert n_tokens <= len(probe) * per_row < n_tokens + per_row
    assert probe.shape[1:] == task.batch(0)[0].shape[1:]


@pytest.mark.parametrize("make", [tasks.associative_recall, tasks.random_tokens, tasks.synthetic_lm])
def test_probe_sequences_are_never_used_for_training(make):
    task = make(seed=1)
    probe = {tuple(row) for row in task.probe(100 * task.length).tolist()}
    trained = {tuple(row) for index in range(60) for row in task.batch(index)[0].tolist()}
    assert len(probe) == 100
    assert not probe & trained


def test_the_probe_of_text_is_from_the_validation_split():
    held_out = bytes(split_text("validation").tolist())
    assert all(bytes(row) in held_out for row in tasks.text_bytes(length=60).probe(600).tolist())


def test_a_probe_larger_than_the_validation_split_has_all_its_rows_once():
    images = tasks.digits().probe(10**6)
    assert len(images) == 360
    held_out = tasks.digits(split="validation", batch_size=360).batch(0)[0]
    assert sorted(map(bytes, images.numpy())) == sorted(map(bytes, held_out.numpy()))
    assert len(tasks.synthetic_lm(n_validation_sequences=7).probe(10**6)) == 7


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (tasks.associative_recall, "length", 8),
        (tasks.associative_recall, "vocab_size", 9),
        (tasks.text_bytes, "length", 10**6),
        (tasks.synthetic_lm, "split", "test"),
        (tasks.synthetic_lm, "vocab_size", 24),
        (tasks.digits, "image_size", 28),
        (tasks.reference_passages, "n_passages", 1_000_000),
    ],
)
def test_invalid_options_of_a_task_are_rejected(make, name, value):
    error = about(name, value, ("train", "validation")) if name == "split" else about(name, value)
    with pytest.raises(OptionError, check=error):
        make(**{name: value})


# Epochs


@settings(max_examples=60, deadline=None)
@given(n_rows=st.integers(1, 40), batch_size=st.integers(1, 60), start=st.integers(-5, 50), seed=st.integers())
def test_every_epoch_has_each_row_once(n_rows, batch_size, start, seed):
    n_batches = -(-3 * n_rows // batch_size) + 1
    batches = [
        shuffled_rows(n_rows, batch_size=batch_size, index=start + i, key=("test", seed)) for i in range(n_batches)
    ]
    assert {len(batch) for batch in batches} == {batch_size}
    rows = torch.cat(batches)[(-start * batch_size) % n_rows :]  # from the beginning of the next epoch on
    for epoch in (rows[:n_rows], rows[n_rows : 2 * n_rows]):
        assert sorted(epoch.tolist()) == list(range(n_rows))


# Associative recall


@settings(max_examples=30, deadline=None)
@given(n_pairs=st.integers(1, 6), padding=st.integers(0, 5), extra=st.integers(0, 300), index=indices)
def test_recall_sequences_answer_their_query(n_pairs, padding, extra, index):
    task = tasks.associative_recall(
        n_pairs=n_pairs, length=2 * n_pairs + 1 + padding, vocab_size=2 * n_pairs + 2 + extra, seed=5
    )
    tokens, targets = task.batch(index)
    half = task.vocab_size // 2
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[0 : 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2], strict=True))
        assert len(pairs) == n_pairs
        assert all(0 < key < half <= value for key, value in pairs.items())
        assert row[2 * n_pairs : -1] == [0] * padding
        assert target == [-100] * (len(row) - 1) + [pairs[row[-1]]]


def test_recall_has_the_defaults_of_the_paper_and_the_batches_of_recorded_data():
    task = tasks.associative_recall()
    assert (task.length, task.vocab_size, task.n_pairs) == (64, 256, 4)
    digest = hashlib.sha256()
    for part in task.batch(0):
        digest.update(part.numpy().tobytes())
    assert digest.hexdigest() == "5c355a8a6bf31636f5263ed6b0250e0a42ed92151a7d0b887872acaf5f56ba03"


# Text


@pytest.mark.parametrize("split", ["train", "validation"])
def test_text_batches_are_those_of_recorded_data(split):
    """The starts of the windows are drawn from torch's generator, seeded by seed and number."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    border = int(len(text) * 0.9)
    text = text[:border] if split == "train" else text[border:]
    generator = torch.Generator().manual_seed(42 * 1_000_003 + 17)
    starts = torch.randint(len(text) - 61, (32, 1), generator=generator).flatten().tolist()
    tokens, targets = tasks.text_bytes(length=60, seed=42, split=split).batch(17)
    assert [bytes(row) for row in tokens.tolist()] == [text[start : start + 60] for start in starts]
    assert [bytes(row) for row in targets.tolist()] == [text[start + 1 : start + 61] for start in starts]


# Random tokens


def test_random_tokens_are_uniform_and_independent():
    tokens, targets = tasks.random_tokens(vocab_size=10, length=500, batch_size=200).batch(0)
    joint = torch.bincount((tokens * 10 + targets).flatten(), minlength=100)
    chi_square = ((joint - 1000.0) ** 2 / 1000).sum()
    assert 50 < chi_square < 170  # 99 degrees of freedom: mean 99, standard deviation 14


# Digits


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = load_digits()
    images, targets = tasks.digits(batch_size=1437).batch(0)
    held_out, held_out_targets = tasks.digits(batch_size=360, split="validation").batch(0)
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    ours = [
        (*image.flatten().tolist(), int(digit))
        for image, digit in zip(torch.cat([images, held_out]), torch.cat([targets, held_out_targets]), strict=True)
    ]
    theirs = [(*(row / 16).tolist(), digit) for row, digit in zip(data.data, data.target.tolist(), strict=True)]
    assert sorted(ours) == sorted(theirs)
    assert images.min() == 0
    assert images.max() == 1


@pytest.mark.parametrize("seed", [0, 1, -5])
def test_digit_splits_are_disjoint_complete_and_stratified(seed):
    from sklearn.datasets import load_digits

    train, validation = (split_rows(seed, split).tolist() for split in ("train", "validation"))
    assert sorted(train + validation) == list(range(1797))
    assert not torch.equal(split_rows(seed, "train"), split_rows(seed + 1, "train"))
    classes = load_digits().target
    fraction = np.bincount(classes[validation], minlength=10) / np.bincount(classes, minlength=10)
    assert np.allclose(fraction, 0.2, atol=0.005)


def test_larger_digits_repeat_each_pixel():
    small, large = (tasks.digits(image_size=size).batch(3) for size in (8, 24))
    assert large[0].shape == (32, 1, 24, 24)
    assert torch.equal(large[1], small[1])
    assert torch.equal(large[0], torch.kron(small[0], torch.ones(1, 1, 3, 3)))
    assert tasks.digits().n_classes == 10
