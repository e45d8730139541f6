import math
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

from tests.contracts.small import fails
from workbench.contracts import between_ranks, observer, ranks
from workbench.contracts.lab import Lab, NotTestedError
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


def rank_of(rank, *, seed=None, first=0, share=lambda model: None, data=None, mean=True, split=False):
    """Run a loop as one rank of two does, with given gradients of the other rank, and return its lab."""
    torch.manual_seed(first)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    if split:
        with torch.no_grad():
            model[2].weight += rank
    torch.manual_seed(10 + rank if seed is None else seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Observer(3) as seen:
        for i in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i + 100 * (rank if data is None else data)))
            y = torch.arange(8) % 3
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y, reduction="mean" if mean else "sum").backward()
            share(model)
            optimizer.step()
    return Lab(seen)


@pytest.fixture
def compared(monkeypatch):
    for module in (observer, ranks):
        monkeypatch.setattr(module, "is_shared", lambda: True)

    def compare(contract, *labs):
        found = [ranks._own(lab) for lab in labs]
        for lab in labs:
            lab.of_ranks = found
        return contract(labs[0])

    return compare


def same_gradient(factor=1.0):
    def share(model):
        for i, p in enumerate(model.parameters()):
            p.grad.copy_(factor * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))

    return share


def test_sound_ranks_keep_all(compared):
    labs = [rank_of(i, share=same_gradient(0.01)) for i in range(2)]
    for each in (ranks.ranks_see_different_data, ranks.gradients_reduced, ranks.replicas_equal, ranks.random_states):
        assert compared(each, *labs).status is Status.PASSED
    assert compared(ranks.shards_equal, *labs).status is Status.NOT_APPLICABLE


def test_ranks_with_the_same_data(compared):
    assert fails(compared(ranks.ranks_see_different_data, *(rank_of(i, data=0) for i in range(2))), "all 3 passes")


def test_gradients_that_stay_on_their_rank(compared):
    labs = [rank_of(i) for i in range(2)]
    assert fails(compared(ranks.gradients_reduced, *labs), "4 of 4 parameters", "test_ranks.py")
    assert fails(compared(ranks.replicas_equal, *labs), "although none did")


@pytest.mark.parametrize(("mean", "status"), [(True, Status.FAILED), (False, Status.PASSED)])
def test_gradients_of_means_that_are_summed(compared, mean, status):
    labs = [rank_of(i, share=same_gradient(10.0), mean=mean) for i in range(2)]
    assert compared(ranks.gradients_reduced, *labs).status is status


def test_parameters_that_were_not_broadcast(compared):
    labs = [rank_of(i, first=i, share=same_gradient(0.01)) for i in range(2)]
    assert fails(compared(ranks.replicas_equal, *labs), "broadcast")


def test_parts_of_one_model_read_the_same_data(compared):
    def share(model):
        for i, p in enumerate(model[:1].parameters()):
            p.grad.copy_(torch.full_like(p, 0.1 * i))

    labs = [rank_of(i, data=0, split=True, share=share) for i in range(2)]
    assert compared(ranks.ranks_see_different_data, *labs).status is Status.NOT_APPLICABLE
    assert compared(ranks.replicas_equal, *labs).status is Status.NOT_APPLICABLE


def test_whole_parameters_beside_parts_drift(compared):
    def share(model):  # the gradient of the first layer is partial
        model[0].weight.grad *= 1 + float(model[2].weight.mean().round())

    labs = [rank_of(i, data=0, split=True, share=share) for i in range(2)]
    assert fails(compared(ranks.shards_equal, *labs), "although none did", "; 0.", "the whole model")


def test_one_seed_for_dropout(compared):
    assert fails(compared(ranks.random_states, *(rank_of(i, seed=3) for i in range(2))), "the same units", "1 draws")


def test_one_process_has_no_ranks():
    assert ranks.replicas_equal(rank_of(0)).status is Status.NOT_APPLICABLE


def test_messages_of_two_ranks():
    store = distributed.HashStore()
    with (
        mock.patch.object(between_ranks, "is_shared", return_value=True),
        mock.patch.object(distributed.distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(distributed, "get_rank", return_value=0),
        mock.patch.object(distributed, "get_world_size", return_value=2),
        mock.patch.object(between_ranks, "PATIENCE", 0.2),
    ):
        store.set("workbench/contracts 1 of 1", '{"norm": NaN}')
        store.add("workbench/contracts 1 were read", 1)
        own, other = between_ranks.of_all_ranks({"norm": math.inf}, "contracts")
        assert own == {"norm": math.inf}
        assert math.isnan(other["norm"])
        # The other does not come again.
        assert between_ranks.of_all_ranks({"norm": 1.0}, "contracts") == [{"norm": 1.0}]


def test_a_rank_that_does_not_come_is_no_failure(monkeypatch):
    lab = rank_of(0)
    for module in (between_ranks, ranks):
        monkeypatch.setattr(module, "is_shared", lambda: True)
    with pytest.raises(NotTestedError, match="could not exchange"):
        ranks.replicas_equal(lab)


class ReducingSGD(torch.optim.Optimizer):
    """Takes the gradient of all ranks within its step, as optimizers do that hold shards."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=-0.01)


def test_gradients_that_the_optimizer_reduces(compared, monkeypatch):
    monkeypatch.setattr(torch.optim, "SGD", lambda params, lr: ReducingSGD(params))
    found = compared(ranks.gradients_reduced, *(rank_of(i) for i in range(2)))
    assert found.status is Status.PASSED
    assert "within step()" in found.evidence


def test_values_of_all_ranks_are_those_of_one_without_others():
    assert between_ranks.of_all_ranks([1.0], "tokens") == [[1.0]]


def test_memory_that_was_released_is_not_read():
    whole = nn.Parameter(torch.ones(3))
    assert not observer._is_released(whole)
    whole.untyped_storage().resize_(0)
    assert observer._is_released(whole)
    assert observer.fingerprint(whole) == (0.0, 0.0)
