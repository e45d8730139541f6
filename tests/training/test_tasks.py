import pytest
import torch

import workbench as wb
from workbench.errors import ThresholdError


def test_recall_sequences_answer_their_query():
    task = wb.tasks.associative_recall(seed=5)
    tokens, targets = task.batch(3)
    assert tokens.shape == targets.shape == (32, 64)
    keys, values, query = tokens[:, 0:8:2], tokens[:, 1:8:2], tokens[:, -1:]
    assert (tokens[:, 8:-1] == 0).all()
    assert all(len(set(row.tolist())) == 4 for row in keys)
    assert (values >= 128).all()
    assert ((keys > 0) & (keys < 128)).all()
    assert torch.equal(values[keys == query], targets[:, -1])
    assert (targets[:, :-1] == -100).all()


@pytest.mark.parametrize("make", [wb.tasks.associative_recall, wb.tasks.text_bytes])
def test_batches_follow_from_seed_and_index_alone(make):
    before = torch.get_rng_state()
    assert torch.equal(make(seed=1).batch(7)[0], make(seed=1).batch(7)[0])
    assert not torch.equal(make(seed=1).batch(7)[0], make(seed=2).batch(7)[0])
    assert not torch.equal(make(seed=1).batch(7)[0], make(seed=1).batch(8)[0])
    first, second = (batch for batch, _ in zip(make(seed=1), range(2), strict=False))
    assert torch.equal(first[0], make(seed=1).batch(0)[0])
    assert torch.equal(second[0], make(seed=1).batch(1)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_text_targets_are_the_next_bytes_and_splits_do_not_overlap():
    from workbench.training.tasks import _HELD_OUT, _reference_text

    text = bytes(_reference_text().tolist())
    border = int(len(text) * (1 - _HELD_OUT))
    for split, part in (("train", text[:border]), ("validation", text[border:])):
        tokens, targets = wb.tasks.text_bytes(length=60, split=split).batch(0)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            assert bytes([*row, target[-1]]) in part


def test_passages_are_different_text():
    passages = wb.tasks.reference_passages(40, n_characters=300)
    assert len(set(passages)) == 40
    assert all(len(passage) == 300 for passage in passages)
    with pytest.raises(ThresholdError, match="fewer than 1000000 passages"):
        wb.tasks.reference_passages(1_000_000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wb.tasks.associative_recall(length=8), "length is 8, expected at least 9"),
        (lambda: wb.tasks.associative_recall(vocab_size=8), "vocab_size is 8, too small for 4 different keys"),
        (lambda: wb.tasks.associative_recall(n_pairs=0), "must be at least 1"),
        (lambda: wb.tasks.text_bytes(split="test"), "split is 'test', expected 'train' or 'validation'"),
    ],
)
def test_impossible_tasks_are_refused(make, message):
    with pytest.raises(ThresholdError, match=message):
        make()
