"""Answers to lesson 6: right ones pass, and each mistake gets the sentence that names it.

Right and wrong answers are computed here with other code than that of the lesson.
"""

import copy

import pytest
import torch

import workbench as wb
from tests.course.answers import is_right, judged, solved
from workbench.course.lesson_6 import FAULTS, gradient

pytestmark = pytest.mark.medium


def training(name):
    return wb.course.miswired(FAULTS[name])


def after(loss, one):
    """Parameters of a copy after a step of plain descent, minus those before."""
    model = copy.deepcopy(one.model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss(model).backward()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer.step()
    return before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.fixture(scope="module")
def gap():
    one = training("C")
    batch = next(iter(one.loader(1)))
    first, second = batch[:8], batch[8:]
    whole = after(lambda model: one.loss(model, batch), one)
    sums = {
        "half": after(lambda model: (one.loss(model, first) + one.loss(model, second)) / 2, one),
        "one": after(lambda model: one.loss(model, first) / 2, one),
        "sum": after(lambda model: one.loss(model, first) + one.loss(model, second), one),
    }
    return {name: float((each - whole).norm() / whole.norm()) for name, each in sums.items()}


@pytest.mark.parametrize("answer", [{"B"}, ["B"]])
def test_the_curve_that_is_too_good(answer):
    assert is_right("6.1", answer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (set(), "reads what it should predict"),
        ({"A", "B"}, "sound model"),
        ({"B", "C"}, "that of A"),
        ({"B", "D"}, "any other seed"),
    ],
)
def test_other_curves(answer, said):
    assert said in judged("6.1", answer)


def test_the_contract_of_a_line():
    broken = wb.course.miswired("cleared before the step")
    assert broken.order() == ["clip", "clear", "step", "follow"]
    assert [each.id for each in broken.check().failed] == ["update_as_predicted"]
    assert is_right("6.2", "update_as_predicted")


@pytest.mark.parametrize(
    ("answer", "said"),
    [("gradients_cleared", "not too late"), ("clipping_order", "as it should"), ("schedule", "once for each update")],
)
def test_other_contracts(answer, said):
    assert said in judged("6.2", answer)


def test_the_reach_of_a_token():
    """A mask that shows one token too many, in each of two blocks, shows two."""
    assert is_right("6.3", 2)


@pytest.mark.parametrize(
    ("answer", "said"), [(10, "Call model.eval()"), (14, "from token 10 on"), (16, "all pos"), (1, "small")]
)
def test_other_reaches(answer, said):
    assert said in judged("6.3", answer)


def test_the_distance_of_two_gradients(gap):
    assert 0.05 < gap["half"] < 1
    assert is_right("6.4", gap["half"])


@pytest.mark.parametrize(("mistake", "said"), [("sum", "without their weights"), ("one", "first micro-batch alone")])
def test_other_distances(gap, mistake, said):
    assert said in judged("6.4", gap[mistake])


def test_the_share_that_mends_it(gap):
    def share(part, batch):
        return (part[:, 1:] > 0).double().sum() / (batch[:, 1:] > 0).double().sum()

    assert is_right("6.5", share)
    one = training("C")
    batch = next(iter(one.loader(1)))
    whole = gradient(one.loss(one.model.eval(), batch), one.model)
    added = sum(gradient(one.loss(one.model, p) * float(share(p, batch)), one.model) for p in batch.chunk(2))
    assert float((added - whole).norm() / whole.norm()) < 1e-5 < gap["half"]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (lambda part, batch: 0.5, "This is the fault"),
        (lambda part, batch: len(part) / len(batch), "share of the texts"),
        (lambda part, batch: float((part != 0).sum() / (batch != 0).sum()), "first column"),
        (lambda part, batch: 1.0, "is right"),
    ],
)
def test_other_shares(share, said):
    assert said in judged("6.5", share)


def test_the_solutions():
    one = training("B")
    ids = next(iter(one.loader(1)))
    assert is_right("6.3", solved("6.3", {"model": one.model, "ids": ids}))
    one = training("C")
    given = {"training": one, "batch": next(iter(one.loader(1))), "gradient": gradient}
    assert is_right("6.4", solved("6.4", given))
    assert is_right("6.5", solved("6.5", {}))
