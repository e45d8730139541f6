"""A watched training is asked who spoiled an update; ranks are those of ranked_blame.py."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from workbench.callbacks.recorder.blame import BlameSearch
from workbench.diagnosis import find_failure, read_facts, read_record
from workbench.errors import OptionError

N_STEPS, N_ROWS = 24, 8
EVERY = {"precision": None, "activations": None, "attention": None, "router": None, "update": None, "optimizer": None}


class Model(nn.Module):
    """A classifier that is called with keywords and may return its own loss; it does not use the ids."""

    def __init__(self, *, has_loss=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.has_loss = has_loss

    def forward(self, x, labels=None, id=None):
        logits = self.body(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits} if self.has_loss else logits


def batch(i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(N_ROWS, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), torch.arange(N_ROWS) + 1000 * i


def train(folder, *, has_loss=False, n_micro=4, spoil=lambda i, m, x, y: None, ask=(), is_watched=True, factor=None):
    """Train with accumulation; returns losses, weights, answers and the store."""
    model = Model(has_loss=has_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, answers, watched = [], {}, None
    path = folder / "run.zarr"
    if is_watched:
        watched = wb.watch(model, optimizer, store=path, shows=False, budget=None, every=EVERY)
    for i in range(N_STEPS):
        for m in range(n_micro):
            x, y, ids = batch(n_micro * i + m)
            spoil(i, m, x, y)
            if has_loss:
                loss = model(x=x, labels=y, id=ids)["loss"] / n_micro
            else:
                loss = cross_entropy(model(x=x, id=ids), y) / n_micro
            loss = loss if factor is None else loss * factor(i, m)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if i in ask:
            answers[i] = watched.blame()
    if watched is not None:
        watched.close()
    return losses, [weight.detach() for weight in model.parameters()], answers, path


def huge(i, m, x, y):
    if (i, m) == (20, 2):
        x[5] *= 100


def lost(i, m, x, y):
    if (i, m) == (20, 1):
        x[3, 0] = torch.nan


@pytest.mark.parametrize(("has_loss", "n_micro"), [(False, 1), (True, 4)])
def test_a_planted_row_is_found_and_the_training_is_bitwise_identical(tmp_path, has_loss, n_micro):
    at = min(2, n_micro - 1)

    def spoil(i, m, x, y):
        if (i, m) == (20, at):
            x[5] *= 100

    options = {"has_loss": has_loss, "n_micro": n_micro, "spoil": spoil}
    losses, weights, answers, _ = train(tmp_path, ask=(18, 20), **options)
    assert not answers[18].is_found
    found = answers[20]
    assert (found.step, found.rank, found.micro_batch, found.row) == (20, 0, at, 5)
    assert found.row_id == str(1000 * (20 * n_micro + at) + 5)
    assert f"ow 5 (id {found.row_id})" in found.sentence
    control = train(tmp_path, is_watched=False, **options)
    assert losses == control[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, control[1], strict=True))


def test_a_row_that_is_not_finite_is_reported_before_it_spoils_the_parameters(tmp_path):
    *_, path = train(tmp_path, spoil=lost)
    events = wb.open_run(path)["events"].to_dataset()
    told = [str(m) for k, m in zip(events["kind"].values, events["message"].values, strict=True) if k == "blame"]
    assert told[:1] == [f"Micro-batch 2 of 4, row 3 (id {1000 * 81 + 3}): its gradient is not finite."]
    record = read_record(path)
    facts = [each for each in read_facts(record, find_failure(record)) if each.name == "blame"]
    assert facts[0].sentence == f"{told[0]} (step 20)"


def test_a_micro_batch_with_another_weight_is_found(tmp_path):
    _, _, answers, _ = train(tmp_path, factor=lambda i, m: 1.5 if (i, m) == (20, 3) else 1.0, ask=(19, 20))
    assert not answers[19].is_found
    assert (answers[20].micro_batch, answers[20].row, answers[20].kind) == (3, -1, "weight")


def test_overwritten_inputs_are_not_read_as_those_of_the_pass(tmp_path):
    kept = []

    def spoil(i, m, x, y):
        if kept:
            kept[-1].zero_()  # as in a loader that uses its buffers again
        kept.append(x)

    _, _, answers, _ = train(tmp_path, spoil=spoil, ask=(20,))
    assert "overwritten" in answers[20].sentence
    assert not answers[20].is_found


def test_a_step_that_is_not_kept_and_a_watch_that_has_ended_are_said(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = wb.watch(model, optimizer, store=tmp_path / "run.zarr", shows=False, budget=None, every=EVERY)
    with pytest.raises(OptionError, match="at least two updates"):
        watched.blame()
    for i in range(3):
        x, y, _ = batch(i)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watched.blame(0).sentence == "Step 0: its passes are not kept any more, those of steps 1, 2 are."
    watched.close()
    with pytest.raises(OptionError, match="has not ended"):
        watched.blame()


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    held = []
    take = BlameSearch.take

    def taken(self, step):
        take(self, step)
        kept = (*self._earlier, *self._kept)
        held.append(sum(call.n_bytes for u in kept for p in u.passes for call in p.calls))

    monkeypatch.setattr(BlameSearch, "take", taken)
    monkeypatch.setattr("workbench.callbacks.recorder.blame._MOST_BYTES", 4000)
    train(tmp_path)
    assert 0 < max(held) <= 4000


def test_one_row_of_many_is_found_though_not_all_are_computed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "N_ROWS", 150)

    def spoil(i, m, x, y):
        if (i, m) == (20, 1):
            x[137] *= 20
            y[137] = (y[137] + 1) % 4

    _, _, answers, _ = train(tmp_path, spoil=spoil, ask=(18, 20))
    assert not answers[18].is_found
    assert (answers[20].micro_batch, answers[20].row) == (1, 137)
    assert "a label, where the model expects" in answers[20].sentence or "its inputs are" in answers[20].sentence


def test_a_micro_batch_of_wrong_labels_is_named(tmp_path):
    def spoil(i, m, x, y):
        if (i, m) == (20, 1):
            y[:] = (y + 1) % 4

    _, _, answers, _ = train(tmp_path, spoil=spoil, ask=(18, 20))
    assert not answers[18].is_found
    assert (answers[20].micro_batch, answers[20].row, answers[20].kind) == (1, -1, "surprise")


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_planted_rank_micro_batch_and_row_are_found_on_all_ranks(tmp_path, kind):
    command = [sys.executable, "-m", "tests.callbacks.ranked_blame", str(tmp_path), kind]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    for rank in ranks:
        answers = rank["answers"]
        assert answers == ranks[0]["answers"]
        assert not answers[30].is_found
        assert (answers[34].rank, answers[34].micro_batch, answers[34].row) == (1, 1, 5)
        assert (answers[36].rank, answers[36].micro_batch, answers[36].row) == (1, 0, -1)
        assert (answers[38].rank, answers[38].micro_batch, answers[38].kind) == (0, 1, "finite")
        assert rank["losses"] == rank["losses not watched"]
        pairs = zip(rank["weights"], rank["weights not watched"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
