"""Synthetic language modeling, compared with a parser that knows only the three kinds of segments of the paper."""

import random
from itertools import islice

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.tasks.sequences import segments
from workbench.tasks.task import mixed_seed

LONGEST = 20  # a pattern of 5 tokens, repeated 4 times


def is_repetition(tokens):
    return any(len(tokens) in (2 * n, 3 * n, 4 * n) and tokens == tokens[:n] * (len(tokens) // n) for n in range(2, 6))


def is_integer_run(tokens):
    return 5 <= len(tokens) <= 15 and tokens == list(range(tokens[0], tokens[0] + len(tokens)))


def is_random_run(tokens):
    return 5 <= len(tokens) <= 15


def is_cut_segment(tokens):
    """Return whether tokens may be the beginning of a segment that was truncated at the end of the sequence."""
    return len(tokens) <= 15 or any(len(tokens) <= 4 * n and tokens == (tokens[:n] * 4)[: len(tokens)] for n in (4, 5))


def most_tokens_with_a_pattern(tokens):
    """Compute the largest number of tokens in complete repetitions and integer runs over all tilings of the sequence.

    Uses dynamic programming over the number of tokens already tiled. None if there is no tiling.
    """
    best = [0] + [None] * len(tokens)
    for start in range(len(tokens)):
        if best[start] is None:
            continue
        for end in range(start + 2, min(start + LONGEST, len(tokens)) + 1):
            piece = tokens[start:end]
            has_pattern = is_repetition(piece) or is_integer_run(piece)
            if has_pattern or is_random_run(piece):
                best[end] = max(best[end] or 0, best[start] + (len(piece) if has_pattern else 0))
        if is_cut_segment(tokens[start:]):
            best[-1] = max(best[-1] or 0, best[start])
    return best[-1]


def sequences(task, n):
    """Return ``n`` sequences, each with the token that follows it."""
    tokens, targets = task.batch(0)
    return torch.cat([tokens, targets[:, -1:]], dim=1)[:n].tolist()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_sequence_is_tiled_by_the_three_kinds(split):
    """The parser finds at least as many tokens in repetitions and integer runs as were generated."""
    task = wb.tasks.synthetic_lm(seed=3, split=split)
    for row in range(12):
        generator = random.Random(mixed_seed("synthetic_lm", split, 3, row))
        generated, n_in_patterns = [], 0  # tokens in complete segments that have a pattern
        for kind, segment in segments(generator):
            kept = segment[: 257 - len(generated)]
            generated += kept
            n_in_patterns += len(kept) if kind != "random_run" and kept == segment else 0
            if len(generated) == 257:
                break
        tokens = task.sequence(row).tolist()
        assert tokens == generated
        assert most_tokens_with_a_pattern(tokens) >= n_in_patterns


@pytest.mark.parametrize("vocab_size", [25, 60, 10_000])
def test_segments_are_those_of_the_paper(vocab_size):
    """Lengths cover their ranges, all kinds are equally likely, ids start at 10 and end below the vocabulary size."""
    generated = list(islice(segments(random.Random(1), vocab_size=vocab_size), 6000))
    by_kind = {
        kind: [tokens for k, tokens in generated if k == kind] for kind in ("repetition", "integer_run", "random_run")
    }
    assert all(abs(len(found) - 2000) < 150 for found in by_kind.values())  # four standard deviations
    assert sum(map(len, by_kind.values())) == 6000
    assert all(map(is_repetition, by_kind["repetition"]))
    assert all(map(is_integer_run, by_kind["integer_run"]))
    assert {len(tokens) for tokens in by_kind["integer_run"]} == set(range(5, 16))
    assert {len(tokens) for tokens in by_kind["random_run"]} == set(range(5, 16))
    assert {len(tokens) for tokens in by_kind["repetition"]} == {n * k for n in range(2, 6) for k in range(2, 5)}
    assert np.mean([len(tokens) for tokens in by_kind["repetition"]]) == pytest.approx(10.5, abs=0.4)
    everything = np.concatenate([tokens for _, tokens in generated])
    assert everything.min() >= 10
    assert everything.max() < vocab_size
    if vocab_size < 100:
        assert everything.min() == 10
        assert everything.max() == vocab_size - 1


def test_fractions_of_predictable_tokens():
    """9 of 30.5 tokens are the previous one plus one, and 7 of 30.5 repeat an earlier one."""
    tokens = np.array(sequences(wb.tasks.synthetic_lm(batch_size=300), 300))
    rises = np.mean(tokens[:, 1:] == tokens[:, :-1] + 1)
    repeats = np.zeros_like(tokens, dtype=bool)
    for lag in range(2, 6):
        repeats[:, lag:] |= tokens[:, lag:] == tokens[:, :-lag]
    assert rises == pytest.approx(9 / 30.5, abs=0.015)
    assert np.mean(repeats) == pytest.approx(7 / 30.5, abs=0.015)


def test_the_defaults_are_those_of_the_paper_and_the_splits_differ():
    task = wb.tasks.synthetic_lm()
    assert (task.length, task.vocab_size, task.n_sequences, task.n_validation_sequences) == (256, 10_000, 20_000, 2_000)
    train, validation = (
        {tuple(row) for index in range(10) for row in wb.tasks.synthetic_lm(split=split).batch(index)[0].tolist()}
        for split in ("train", "validation")
    )
    assert len(train) == len(validation) == 320
    assert not train & validation


def test_an_epoch_has_each_sequence_once():
    task = wb.tasks.synthetic_lm(length=20, n_sequences=21, batch_size=7)
    epochs = [torch.cat([task.batch(i)[0] for i in range(3 * e, 3 * e + 3)]).tolist() for e in range(2)]
    every = sorted(task.sequence(row)[:-1].tolist() for row in range(21))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]
