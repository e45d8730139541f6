"""Weights of tokens over the passes of an update, and over ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from workbench.contracts import gradients
from workbench.contracts.lab import Lab
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


def lab_of(n_passes=2, between=lambda p, i: None, lengths=(6, 6), mean=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Observer(4) as seen:
        for _ in range(4):
            n_tokens = 4 * lengths[0] if mean else sum(4 * each for each in lengths[:n_passes])
            for i in range(n_passes):
                ids = torch.randint(0, 9, (4, lengths[i] + 1))
                logits = model(ids[:, :-1]).flatten(0, 1)
                (functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / n_tokens).backward()
                for p in model.parameters():
                    between(p, i)
            optimizer.step()
            optimizer.zero_grad()
    return Lab(seen)


def test_a_gradient_that_doubles_between_passes():
    found = gradients.accumulation(lab_of(between=lambda p, i: p.grad.mul_(2)))
    assert found.status is Status.FAILED
    assert "counts 2 times as much" in found.evidence


@pytest.mark.parametrize(("divisor", "status"), [(1, Status.FAILED), (2, Status.PASSED)])
def test_a_sum_of_means_that_is_divided_by_hand(divisor, status):
    lab = lab_of(between=lambda p, i: p.grad.div_(divisor) if i == 1 else None, mean=True)
    assert gradients.accumulation(lab).status is status


@pytest.mark.parametrize(("others", "status"), [(40.0, Status.FAILED), (24.0, Status.PASSED)])
def test_means_of_ranks_with_other_numbers_of_labels(monkeypatch, others, status):
    monkeypatch.setattr(gradients, "of_all_ranks", lambda own, what: [own, [own[0], [others] * len(own[0])]])
    assert gradients.accumulation(lab_of(1)).status is status
