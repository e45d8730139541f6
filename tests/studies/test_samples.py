"""Samples by name, and their byte-level tokenizers."""

import json

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import says
from workbench.errors import CheckpointError, SnapshotError

TEXTS = ["A residual stream of bytes, long enough to be cut at the longest sequence that the model takes.", "Short é."]


@pytest.fixture(scope="module")
def sample():
    return wb.samples.load("pre_ln")


def test_every_shipped_model_is_opened_by_its_name():
    assert wb.samples.names() == ["no_norm", "pre_ln", "smollm2"]
    for name in ("no_norm", "pre_ln"):
        subject = wb.samples.load(name)
        assert subject.name == name
        assert subject.folder == wb.samples.embedded(name)
        assert isinstance(subject.tokenizer, wb.ByteTokenizer)


@pytest.mark.parametrize(("name", "hint"), [("pre-ln", "'pre_ln'"), ("smolm2", "'smollm2'")])
def test_the_nearest_name_is_suggested_for_an_unknown_one(name, hint):
    with pytest.raises(CheckpointError, match=f"did you mean {hint}.*choose from no_norm, pre_ln, smollm2"):
        wb.samples.load(name)
    with pytest.raises(CheckpointError, check=says("choose from no_norm, pre_ln")):
        wb.samples.load("x")


def test_texts_are_the_bytes_that_the_models_were_trained_on(sample):
    found = sample.tokenize(TEXTS)
    assert found["input_ids"].shape == (2, 64)
    assert found["input_ids"][0].tolist() == list(TEXTS[0].encode()[:64])
    short = list(TEXTS[1].encode())
    assert found["input_ids"][1, : len(short)].tolist() == short
    assert found["attention_mask"].sum(1).tolist() == [64, len(short)]
    assert sample.tokenizer.decode(found["input_ids"][1, : len(short)]) == TEXTS[1]
    with pytest.raises(SnapshotError, check=says("The texts are empty; pass at least one that is not.")):
        sample.tokenize(["", ""])


def test_a_profile_of_texts_is_the_profile_of_their_bytes(sample):
    passages = wb.tasks.reference_passages(24, n_characters=64)
    of_text = wb.profile(sample, passages, n_snapshots=None, progress=False)
    of_bytes = wb.profile(
        sample, torch.tensor([list(passage.encode()[:64]) for passage in passages]), n_snapshots=None, progress=False
    )
    np.testing.assert_array_equal(of_text.eigenvalue.values, of_bytes.eigenvalue.values)


def test_padding_is_excluded(sample):
    texts = [passage[:n] for n, passage in zip(range(20, 64, 2), wb.tasks.reference_passages(22), strict=True)]
    n_bytes = sum(min(len(text.encode()), 64) for text in texts)
    assert wb.profile(sample, texts, n_snapshots=None, progress=False).attrs["n_snapshots"] == n_bytes


def test_the_note_on_bytes_is_saved_and_old_folders_have_none(sample, tmp_path):
    again = wb.open_checkpoint(wb.save_checkpoint(sample, tmp_path / "again"))
    assert again.tokenizer.model_max_length == 64
    without = wb.save_checkpoint(sample.model, tmp_path / "without")
    assert "tokenizer" not in json.loads((without / "config.json").read_text())
    with pytest.raises(CheckpointError, check=says("without has no tokenizer; pass token ids instead of text,")):
        wb.open_checkpoint(without).tokenize("text")
    config = json.loads((without / "config.json").read_text()) | {"tokenizer": "words"}
    (without / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, check=says("which this version does not know; update the workbench, or")):
        wb.open_checkpoint(without)
