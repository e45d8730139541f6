import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contracts.small import Model, checked, next_token
from workbench.contracts import learning
from workbench.contracts.lab import Lab, NotTestedError
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 6, generator=generator), torch.arange(16) % 3


def train(seen, model, optimizer, first=0, n=6, loss=functional.cross_entropy, schedule=None):
    for i in range(first, first + n):
        x, y = batch(i)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def build(rate=0.05, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=rate, **options)


def lab_of(*args, n=6, **options):
    with Observer(n) as seen:
        train(seen, *args, n=n, **options)
    return Lab(seen)


def test_a_sound_training_descends():
    lab = lab_of(*build())
    assert learning.descends(lab).evidence.startswith("6 of 6 updates go down")
    assert learning.rate_in_range(lab).status is Status.PASSED
    assert lab.n_passes == 1
    assert learning.resume(lab).status is Status.NOT_APPLICABLE


def test_updates_that_go_up():
    found = learning.descends(lab_of(*build(maximize=True)))
    assert found.status is Status.FAILED
    assert "test_learning.py" in found.where


def test_rewards_may_be_maximized():
    lab = lab_of(*build(maximize=True), loss=lambda scores, y: scores.softmax(-1)[:, 0].mean())
    with pytest.raises(NotTestedError, match="is the loss to be maximized"):
        learning.descends(lab)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rates_that_are_too_large(momentum):
    model, optimizer = build(rate=40.0, momentum=momentum)
    lab = lab_of(model, optimizer, n=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients, state = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    found = learning.rate_in_range(lab)
    assert found.status is Status.FAILED
    assert found.proof
    assert lab.n_passes <= 6
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), gradients, strict=True))


def test_rates_of_losses_that_are_not_finite_are_unknown():
    lab = lab_of(*build(rate=float("nan")))
    with pytest.raises(NotTestedError, match="not finite"):
        learning.rate_in_range(lab)


def resumed(tmp_path, parts, *, replays=False, n=4, writes=True):
    """Train, save, load the given parts into new objects, and go on."""
    path = tmp_path / "last.pt"

    def make():
        model, optimizer = build(momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model, optimizer, schedule = make()
    held = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state = {name: each.state_dict() for name, each in held.items()} | {"generator": torch.get_rng_state()}
    if not writes:
        train(None, model, optimizer)
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, path)
    with Observer(2 * n) as seen:
        train(seen, model, optimizer, n=n, schedule=schedule)
        if writes:
            state = {name: each.state_dict() for name, each in held.items()}
            torch.save(state | {"generator": torch.get_rng_state()}, path)
        model, optimizer, schedule = make()
        held = {"model": model, "optimizer": optimizer, "schedule": schedule}
        file = torch.load(path)
        for name in parts:
            held[name].load_state_dict(file[name])
        train(seen, model, optimizer, first=0 if replays else n, n=n, schedule=schedule)
    return Lab(seen)


def test_a_resume_that_restores_all(tmp_path):
    assert learning.resume(resumed(tmp_path, ["model", "optimizer", "schedule"])).status is Status.PASSED


@pytest.mark.parametrize("missing", ["optimizer", "schedule"])
def test_a_state_that_is_not_loaded(tmp_path, missing):
    found = learning.resume(resumed(tmp_path, [n for n in ("model", "optimizer", "schedule") if n != missing]))
    assert found.status is Status.FAILED
    assert found.where.startswith(f"the {missing} (test_learning.py")


def test_data_that_is_replayed(tmp_path):
    found = learning.resume(resumed(tmp_path, ["model", "optimizer", "schedule"], replays=True))
    assert found.status is Status.FAILED
    assert found.where.startswith("the data")


def test_weights_of_another_training_are_a_question(tmp_path):
    with pytest.raises(NotTestedError, match="is a new training meant"):
        learning.resume(resumed(tmp_path, ["model"], writes=False))


def test_a_file_of_a_model_that_is_not_trained(tmp_path):
    assert learning.resume(resumed(tmp_path, [])).status is Status.NOT_APPLICABLE


def test_the_negative_of_an_error():
    found = checked(loss=lambda model, ids: -next_token(model(ids), ids))["descends"]
    assert found.status is Status.FAILED
    assert "negative of an error" in found.evidence
    assert "test_learning.py" in found.where


def test_the_logarithm_of_a_density_is_no_negative_of_an_error():
    def loss(model, batch):
        gaps = model(batch[0]).square().sum(1) / 2
        return -(9.0 - gaps).mean()

    data = [(torch.randn(8, 4), None) for _ in range(4)]
    found = checked(nn.Linear(4, 2), loss, data)["descends"]
    assert found.status is Status.PASSED, found


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_steps_down_the_gradient_fit_a_batch():
    found = checked()["overfits_one_batch"]
    assert found.status is Status.PASSED
    assert "take its loss" in found.evidence
    assert "slope is 1" in found.evidence or "slope is 0.99" in found.evidence


def test_a_backward_pass_that_is_no_derivative_is_a_question():
    class Backward(Model):
        def forward(self, ids):
            return Reversed.apply(super().forward(ids))

    found = checked(Backward())["overfits_one_batch"]
    assert (found.status, found.where) == (Status.NOT_TESTED, "Reversed")
    assert "-1 times as fast" in found.evidence


def test_a_loss_that_rises_along_its_gradient():
    def loss(model, ids):
        logits = model(ids)
        return next_token(2 * logits.detach() - logits, ids)  # the same value, with the other sign in the gradient

    found = checked(loss=loss)["overfits_one_batch"]
    assert found.status is Status.FAILED
    assert "wrong sign" in found.evidence

    def partly(model, ids):
        logits = model(ids)
        return next_token(3 * logits.detach() - 2 * logits, ids)

    found = checked(loss=partly)["overfits_one_batch"]
    assert found.status is Status.NOT_TESTED
    assert "is what is detached from the gradient meant to be no derivative?" in found.evidence


def test_a_loss_that_is_as_low_as_it_can_be_is_no_failure():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([1e-5, 0.0]))

        def forward(self, x):
            return self.logits.expand(len(x), 2)

    data = [(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]))] * 4
    found = checked(Constant(), lambda m, batch: functional.cross_entropy(m(batch[0]), batch[1]), data)
    assert found["overfits_one_batch"].status is Status.NOT_TESTED


def test_fitting_a_batch_leaves_the_parameters_as_they_were():
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    checked(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
