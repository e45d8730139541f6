import pytest
import torch
from torch import nn

from tests.contracts.small import Model, checked, next_token, tokens
from tests.contracts.test_modes import Classifier, batches, plainly, results
from workbench.contracts import numbers
from workbench.contracts.lab import Lab, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


class Logarithm(nn.Module):
    def forward(self, x):
        return (x - 10).log()


def test_the_first_module_with_nan_is_named():
    model = Classifier()
    model.body[1] = Logarithm()
    found = results(model, plainly)  # whose updates spoil all parameters
    assert found["finite"].status is Status.FAILED
    assert bool(model.head.weight.isnan().all())
    assert found["finite"].where.startswith("body.1: output of log")


def test_a_rate_that_spoils_the_parameters_is_no_fault_of_the_wiring():
    def test(seen):
        found_in.extend(all_results(seen, (), show_progress(False)))

    torch.manual_seed(0)
    model, found_in = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e25)
    with Observer(4, test) as seen:
        for ids in tokens():
            optimizer.zero_grad()
            next_token(model(ids), ids).backward()
            optimizer.step()
        seen.finish()
    assert bool(model.head.weight.isnan().any())
    found = {each.id: each for each in found_in}
    assert not [each for each in found_in if each.status is Status.FAILED]
    assert "learning rate" in found["finite"].evidence
    assert found["causal"].status is found["order_matters"].status is Status.NOT_TESTED


def test_bad_inputs_whose_update_is_skipped_are_a_question():
    def loop(model, update):
        update(*batches(1)[0])
        model(torch.full((8, 6), torch.nan)).sum().backward()

    assert results(Classifier(), loop)["finite"].status is Status.NOT_TESTED


def test_values_in_half_precision_that_leave_no_room():
    def lab_of(size):
        torch.manual_seed(0)
        model, inputs = nn.Linear(4, 2), size * torch.ones(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        with Observer(2) as seen:
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(inputs).float().mean()
                loss.backward()
                optimizer.step()
        return Lab(seen)

    assert numbers.finite(lab_of(1.0)).status is Status.PASSED
    found = numbers.finite(lab_of(4e4))
    assert found.status is Status.FAILED
    assert "of at most 65,504" in found.evidence


class Rotary(nn.Module):
    """Cosines of angles that grow with the position, computed in a number format."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype

    def forward(self, n):
        positions, frequencies = torch.arange(n), torch.tensor(10.0) ** (-torch.arange(16) / 4)
        return torch.outer(positions.to(self.dtype), frequencies.to(self.dtype)).cos().float()


class Turned(Model):
    """A model with cosines, and a norm whose input may be rounded."""

    def __init__(self, dtype=torch.float32, *, rounds=False):
        super().__init__()
        self.rotary, self.norm, self.rounds = Rotary(dtype), nn.LayerNorm(16), rounds

    def forward(self, ids):
        x = self.embedding(ids)
        x = x * self.rotary(ids.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.bfloat16().float() if self.rounds else x)
        return self.head(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_angles_in_half_precision(autocast):
    def loss(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return next_token(model(ids), ids)

    def found(dtype):
        long = [torch.randint(2, 24, (2, 400), generator=torch.Generator().manual_seed(i)) for i in range(4)]
        return checked(Turned(dtype), loss, long)["precision_by_position"]

    assert found(torch.float32).status is Status.PASSED
    assert found(torch.bfloat16).status is Status.FAILED
    assert found(torch.bfloat16).where == "rotary"
    assert "at the last" in found(torch.bfloat16).evidence


def test_a_norm_with_rounded_inputs():
    found = checked(Turned(rounds=True))["precision_by_position"]
    assert (found.status, found.where) == (Status.FAILED, "norm")


def test_half_precision_between_products_is_a_question():
    class Short(Model):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(24, 24)

        def forward(self, ids):
            return self.last(super().forward(ids).half().float())

    found = checked(Short())["precision_by_position"]
    assert (found.status, found.where) == (Status.NOT_TESTED, "last")
    assert "on purpose" in found.evidence


def test_models_in_bfloat16_are_sound():
    found = checked(Turned().bfloat16(), lambda model, ids: next_token(model(ids).float(), ids))
    assert found["precision_by_position"].status is Status.PASSED


def test_autocast_that_reaches_no_product():
    class Outside(Model):
        def forward(self, ids):
            with torch.autocast("cpu", enabled=False):
                return super().forward(ids)

    def loss(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model(ids), ids)

    found = checked(Outside(), loss)["precision_by_position"]
    assert found.status is Status.FAILED
    assert "all products of its modules are in float32" in found.evidence


def test_random_numbers_in_eval_mode_cannot_be_compared():
    class Noisy(Model):
        def forward(self, ids):
            return super().forward(ids) + 1e-3 * torch.randn(())

    assert checked(Noisy())["precision_by_position"].status is Status.NOT_TESTED
