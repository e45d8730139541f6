import pytest
import torch

import workbench as wb

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "seed": 1}


@pytest.fixture
def make_model():
    """A small transformer, with the same parameters each time."""

    def make(norm="pre_ln", **options):
        return wb.zoo.transformer(norm, **{**SMALL, **options})

    return make


@pytest.fixture
def task():
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)


def same_weights(one, other):
    """Return whether two modules have bitwise identical state."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
