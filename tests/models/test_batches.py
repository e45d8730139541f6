import pytest
import torch

from tests.about import about, says
from workbench.errors import SnapshotError
from workbench.models.batches import Batches, shortened

TOKENS = torch.arange(200 * 64).reshape(200, 64)
IDS = torch.arange(12).reshape(2, 6)


def test_large_inputs_are_split_completely():
    batches = Batches.of(TOKENS).split()
    assert sum(batches.n_examples) == 200
    assert max(batches.n_examples) * 64 <= 4096
    assert torch.equal(torch.cat(list(batches.items)), TOKENS)
    mask = torch.ones_like(TOKENS)
    parts = Batches.of({"input_ids": TOKENS, "attention_mask": mask, "flag": True}).split()
    assert all(part["flag"] is True for part in parts.items)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts.items]), TOKENS)


def test_iterators_are_read_once_and_completely():
    batches = Batches.of(TOKENS[i : i + 3] for i in range(0, 12, 3))
    probe, everything = batches.probe_and_all()
    assert torch.equal(probe, TOKENS[:2])
    assert torch.equal(torch.cat(list(everything.items)), TOKENS[:12])
    assert everything.n_examples is None


@pytest.mark.parametrize("empty", [[], iter(()), TOKENS[:0]])
def test_empty_inputs_are_rejected(empty):
    with pytest.raises(SnapshotError, check=about("inputs")):
        Batches.of(empty).probe_and_all()


def test_unusable_inputs_are_rejected():
    with pytest.raises(SnapshotError, check=says("The inputs are a int, expected a tensor, a mapping, text, a")):
        Batches.of(3)
    with pytest.raises(SnapshotError, check=says("Text needs a tokenizer; open the model with")):
        Batches.of(["a", "b"])
    with pytest.raises(SnapshotError, check=says("A batch holds no tensor; pass token ids, pixel values or")):
        Batches.of({"n": 3})


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, IDS[:, :4]),
        (IDS.float(), None),
        ({"input_ids": IDS, "attention_mask": IDS > 3}, {"input_ids": IDS[:, :4], "attention_mask": IDS[:, :4] > 3}),
        ({"input_ids": IDS, "pixel_values": torch.zeros(2, 3, 8, 8)}, None),
        ({"input_ids": IDS, "labels": "none"}, None),
        ((IDS, IDS), None),
    ],
)
def test_only_certain_axes_of_tokens_are_shortened(batch, expected):
    found = shortened(batch, 4)
    if expected is None:
        assert found is None
    else:
        torch.testing.assert_close(found, expected)
