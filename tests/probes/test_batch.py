"""Contents of batches compared with counts in pure Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.about import about
from tests.launches import Launches
from workbench.errors import OptionError
from workbench.models.losses import largest_losses
from workbench.probes.batch import BatchProbe, lookahead


def entropy(ids):
    counts = Counter(ids)
    n = sum(counts.values())
    return -sum(c / n * math.log(c / n) for c in counts.values()) if n else math.nan


rows = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=8)
)


@given(st.lists(rows, min_size=1, max_size=3), st.integers(0, 5))
def test_tokens_and_repetitions(batches, n_recent):
    width = len(batches[0][0])
    batches = [[(row * 6)[:width] for row in batch] for batch in batches]
    probe, earlier = BatchProbe(n_recent), []
    for batch in batches:
        found = probe.take(torch.tensor(batch))
        assert float(found["token_entropy"]) == pytest.approx(
            entropy([token for row in batch for token in row]), abs=1e-9
        )
        known = earlier[max(0, len(earlier) - n_recent) :] if n_recent else []
        repeated = [row in known + batch[:i] for i, row in enumerate(batch)]
        assert float(found["repeated_examples"]) == pytest.approx(sum(repeated) / len(batch))
        earlier += batch


def test_masked_tokens_and_ignored_labels_are_excluded():
    inputs = {
        "input_ids": torch.tensor([[1, 2, 0, 0], [1, 3, 3, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
        "labels": torch.tensor([[2, -100, -100, -100], [5, 5, 2, -100]]),
    }
    found = BatchProbe().take(inputs)
    assert float(found["token_entropy"]) == pytest.approx(entropy([1, 2, 1, 3, 3]))
    assert float(found["label_entropy"]) == pytest.approx(entropy([2, 5, 5, 2]))
    assert float(BatchProbe().take(inputs, torch.tensor([1, 1]))["label_entropy"]) == pytest.approx(0)
    nothing = BatchProbe().take(inputs["input_ids"], torch.tensor([-100, -100]))["label_entropy"]
    assert math.isnan(nothing)


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_of_language_models_are_tokens_of_their_inputs(shift):
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    inputs, labels = ids[:, : 9 - shift], ids[:, shift:].clone()
    labels[0, 0] = -100
    assert float(BatchProbe().take(inputs, labels)["label_agreement"]) == 1
    labels[2, 3] = 50
    n_compared = 4 * (9 - 2 * shift) - 1
    assert float(BatchProbe().take(inputs, labels)["label_agreement"]) == pytest.approx(1 - 1 / n_compared)
    assert "label_agreement" not in BatchProbe().take(inputs, labels[:, 0])


def test_images_have_no_tokens_but_are_recognized():
    images = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    probe = BatchProbe()
    assert sorted(probe.take(images, torch.tensor([0, 1, 2]))) == [
        "ignored_labels",
        "label_entropy",
        "repeated_batch",
        "repeated_examples",
    ]
    assert float(probe.take(images[:1] + 1e-6)["repeated_examples"]) == 0
    assert float(probe.take(torch.cat([images[1:], images[:1] + 1]))["repeated_examples"]) == pytest.approx(2 / 3)


def test_batches_without_tensors_and_bad_options():
    assert BatchProbe().take(["text"]) == {}
    with pytest.raises(OptionError, check=about("n_recent", -1)):
        BatchProbe(-1)


def test_a_batch_that_comes_again_after_a_resume_is_seen():
    batches = torch.arange(4 * 3 * 5).reshape(4, 3, 5)
    before, after = BatchProbe(), BatchProbe()
    for batch in batches:
        before.take(batch)
    after.load_state_dict(before.state_dict())
    for batch, expected in ((batches[2], 1), (batches[3].flip(0), 0), (batches[0] + 99, 0)):
        assert float(after.take(batch)["repeated_batch"]) == expected


def test_batches_of_single_numbers_are_told_apart():
    probe = BatchProbe()
    batches = [torch.tensor(each) for each in ([3, 0], [0, 1], [3, 0], [0, 3], [6, 6], [0, 8])]
    assert [float(probe.take(batch)["repeated_batch"]) for batch in batches] == [0, 0, 1, 0, 0, 0]


labels_like = st.lists(st.sampled_from([-100, 0, 1, 2, 3]), min_size=48, max_size=48)


@given(rows, labels_like, labels_like, st.booleans(), st.integers(1, 3))
def test_labels_and_tokens(batch, values, marks, is_language, n_batches):
    """Labels are as many as the tokens, or one for each example."""
    ids = torch.tensor(batch)
    labels = torch.tensor(values[: ids.numel()]).view(ids.shape) if is_language else torch.tensor(values[: len(ids)])
    mask = torch.tensor(marks[: ids.numel()]).view(ids.shape).clamp(min=0)
    probe = BatchProbe()
    for _ in range(n_batches):
        found = probe.take({"input_ids": ids, "attention_mask": mask}, labels)
    kept = labels[labels != -100]
    expected = {
        "token_entropy": entropy(ids[mask != 0].tolist()),
        "label_entropy": entropy(kept.tolist()),
        "ignored_labels": 1 - len(kept) / labels.numel(),
        "repeated_batch": float(n_batches > 1),
    }
    if is_language:
        pairs = ((ids, labels), (ids[:, 1:], labels[:, :-1]))
        fractions = [(a == b)[b != -100].double().mean() for a, b in pairs]
        expected["label_agreement"] = torch.fmax(*fractions).item()
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_few_operations_and_no_wait():
    probe, ids, logits = BatchProbe(), torch.arange(80).view(4, 20) % 7, torch.randn(4, 20, 7)
    with Launches() as first:
        probe.take(ids, ids)
        lookahead(ids, logits)
        largest_losses(logits, ids)
    with Launches() as launches:
        probe.take(ids, ids)
    assert not first.waits | launches.waits
    assert launches.operations["sort"] == 2  # of tokens and labels together, and of examples
    assert launches.n_operations < 50


def averages(ids, *, is_causal):
    """Outputs that are means of a table's rows of the tokens so far, or of all tokens."""
    rows = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))[ids]
    n = torch.arange(1, ids.shape[1] + 1)[:, None]
    return rows.cumsum(1) / n if is_causal else (rows + rows.mean(1, keepdim=True)) / 2


@given(rows, st.booleans())
def test_lookahead(batch, is_causal):
    ids = torch.tensor(batch)
    outputs = averages(ids, is_causal=is_causal)
    pairs = [
        (a, b)
        for a in range(len(batch))
        for b in range(len(batch))
        if batch[a][0] == batch[b][0] and batch[a] != batch[b]
    ]
    found = lookahead(ids, outputs)
    if min(ids.shape) < 2:
        assert found is None
    elif not pairs:
        assert math.isnan(found)
    elif is_causal:
        assert not found > 0  # NaN if every second token is the first
    else:
        kept = outputs[:, :2]
        scale = (kept[:, 0] - kept[:, 1]).abs().mean()
        expected = torch.stack([(kept[a, 0] - kept[b, 0]).abs().mean() for a, b in pairs]).mean() / scale
        assert found.item() == pytest.approx(expected.item(), rel=1e-4, nan_ok=True)


def test_lookahead_omits_masked_beginnings_and_other_outputs():
    ids = torch.tensor([[0, 3, 4], [0, 5, 6], [1, 3, 4], [1, 7, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])}
    outputs = averages(ids, is_causal=True)
    outputs[:2, 0] += torch.randn(2, 300, generator=torch.Generator().manual_seed(1))  # those of padding
    assert lookahead(ids, outputs) > 0.1
    assert lookahead(inputs, outputs) == 0
    assert lookahead(ids, outputs[:, :2]) is None
    assert lookahead(ids.float(), outputs) is None
    assert lookahead((ids, (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))), outputs) is None  # a state
    positions = torch.tensor([[0, 1, 2], [5, 6, 7], [0, 1, 2], [0, 1, 2]])  # of rows that are parts of longer texts
    assert lookahead({"input_ids": ids, "position_ids": positions}, outputs) == 0
