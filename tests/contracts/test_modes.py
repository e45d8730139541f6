import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contracts.small import Model, checked, next_token
from workbench.contracts import modes
from workbench.contracts.lab import Lab, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


class Classifier(nn.Module):
    def __init__(self, p=0.2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


def batches(n=8):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8) % 3) for _ in range(n)]


def results(model, loop):
    """Run a loop of the training, which calls its second argument for each update, and return its results."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def update(x, y, scores=lambda x: model(x)):
        optimizer.zero_grad()
        functional.cross_entropy(scores(x), y).backward()
        optimizer.step()

    found = {}

    def ready(seen):
        found.update({each.id: each for each in all_results(seen, (), show_progress(False))})

    with Observer(6, ready) as seen:
        loop(model, update)
        seen.finish()
    return found


def plainly(model, update):
    for x, y in batches(6):
        update(x, y)


def test_a_sound_training_keeps_all():
    found = results(Classifier(), plainly)
    for id in ("initial_loss", "train_mode", "eval_deterministic", "finite"):
        assert found[id].status is Status.PASSED, found[id]


def test_first_losses_far_above_a_uniform_guess():
    torch.manual_seed(0)
    model = Model()
    nn.init.normal_(model.head.weight, std=5.0)
    found = checked(model)["initial_loss"]
    assert found.status is Status.FAILED
    assert "24 classes has 3.18" in found.evidence


@pytest.mark.parametrize("is_inside", [False, True])
def test_softmax_before_the_cross_entropy(is_inside):
    model = Model()
    if is_inside:
        model.head = nn.Sequential(model.head, nn.Softmax(-1))
    found = checked(model, lambda model, ids: next_token(model(ids) if is_inside else model(ids).softmax(-1), ids))
    assert found["initial_loss"].status is Status.FAILED
    assert "below 2.25 nats" in found["initial_loss"].evidence


def binary(scores, y):
    return functional.binary_cross_entropy_with_logits(
        scores.mT.reshape(-1), functional.one_hot(y, 3).float().mT.reshape(-1)
    )


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (torch.sigmoid, binary),
        (lambda scores: scores.log_softmax(-1).exp(), functional.cross_entropy),
        (lambda scores: scores.softmax(-1), functional.nll_loss),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_losses_of_logits_that_receive_probabilities(make, loss, is_inside):
    class Inside(Classifier):
        def forward(self, x):
            return make(super().forward(x)) if is_inside else super().forward(x)

    def of(model, batch):
        return loss(model(batch[0]) if is_inside else make(model(batch[0])), batch[1])

    found = checked(Inside(), of, batches(4))["initial_loss"]
    assert found.status is Status.FAILED
    assert "probabilities" in found.evidence
    assert ("the output of Inside" in found.where) == is_inside


def test_log_softmax_before_the_cross_entropy_is_sound():
    found = checked(None, lambda model, ids: next_token(model(ids).log_softmax(-1), ids))
    assert found["initial_loss"].status is Status.PASSED


def test_a_model_that_stays_in_eval_mode():
    model = Classifier()
    model.eval()
    assert "6 of 6 updates" in results(model, plainly)["train_mode"].evidence
    without = Classifier(p=0.0)
    without.eval()
    assert results(without, plainly)["train_mode"].status is Status.PASSED


def left_in_eval(model, update):
    for i, (x, y) in enumerate(batches(6)):
        if i == 4:
            model.eval()
            with torch.no_grad():
                model(x)
        update(x, y)


def test_a_model_that_an_evaluation_leaves_in_eval_mode():
    found = results(Classifier(), left_in_eval)["train_mode"]
    assert found.status is Status.FAILED
    assert "from update 5 on" in found.evidence
    assert "test_modes.py" in found.where


def test_attacks_in_eval_mode_are_sound():
    def attack(model, update):
        for x, y in batches(6):
            model.eval()
            given = x.clone().requires_grad_()
            functional.cross_entropy(model(given), y).backward()
            model.train()
            update(x + 0.1 * given.grad.sign(), y)

    assert results(Classifier(), attack)["train_mode"].status is Status.PASSED


def test_a_part_that_the_script_puts_in_eval_mode_is_a_question():
    def loop(model, update):
        model.train()
        model.body.eval()
        plainly(model, update)

    found = results(Classifier(), loop)["train_mode"]
    assert found.status is Status.NOT_TESTED
    assert found.evidence.startswith("Is it on purpose that body")


def test_a_loaded_part_in_eval_mode(monkeypatch):
    model = Classifier()
    model.body[0].bias.requires_grad_(False)

    def loop(model, update):
        monkeypatch.setattr("workbench.contracts.observer.is_library", lambda name: True)
        model.body.eval()
        monkeypatch.undo()
        plainly(model, update)

    found = results(model, loop)["train_mode"]
    assert found.status is Status.FAILED
    assert found.where.startswith("body (test_modes.py")


def test_a_frozen_part_in_eval_mode_is_sound():
    model = Classifier()
    model.body.requires_grad_(False).eval()
    assert results(model, plainly)["train_mode"].status is Status.PASSED


@pytest.mark.parametrize(("is_eval", "status"), [(False, Status.FAILED), (True, Status.PASSED)])
def test_evaluations_in_train_mode(is_eval, status):
    def loop(model, update):
        for i, (x, y) in enumerate(batches(6)):
            update(x, y)
            if i == 3:
                model.train(not is_eval)
                with torch.no_grad():
                    model(torch.ones(8, 6))
                model.train()

    found = results(Classifier(), loop)["eval_deterministic"]
    assert found.status is status
    assert found.where.startswith("model (test_modes.py" if not is_eval else "")


def test_passes_without_gradient_in_each_update_are_no_evaluation():
    def loop(model, update):
        for x, y in batches(6):
            with torch.no_grad():
                model(x + 1)
            update(x, y)

    assert results(Classifier(), loop)["eval_deterministic"].status is Status.PASSED


@pytest.mark.parametrize("moves", [False, True])
def test_teachers_in_train_mode(moves):
    teacher = Classifier().requires_grad_(False)

    def loop(model, update):
        for x, y in batches(6):
            with torch.no_grad():
                teacher(x)
                if moves:
                    teacher.head.bias.lerp_(model.head.bias, 0.1)
            update(x, y)

    found = results(Classifier(p=0.0), loop)["eval_deterministic"]
    assert found.status is (Status.PASSED if moves else Status.FAILED)


class Functional(Classifier):
    def forward(self, x):
        return self.head(functional.dropout(self.body(x), 0.3, **({"training": True} if self.explicit else {})))


@pytest.mark.parametrize(("explicit", "status"), [(False, Status.FAILED), (True, Status.NOT_TESTED)])
def test_dropout_that_does_not_know_the_mode(explicit, status):
    model = Functional()
    model.explicit = explicit
    assert results(model, plainly)["eval_deterministic"].status is status


def test_nothing_remains():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Observer(2) as seen:
        for x, y in batches(2):
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients, state = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    lab = Lab(seen)
    for each in (modes.initial_loss, modes.train_mode, modes.eval_deterministic):
        each(lab)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), gradients, strict=True))


def test_eval_mode_is_seen_through_autocast():
    def in_half(model, update):
        def scores(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        for x, y in batches(6):
            update(x, y, scores)

    model = Classifier()
    assert results(model, in_half)["train_mode"].status is Status.PASSED
    model.eval()
    assert results(model, in_half)["train_mode"].status is Status.FAILED
