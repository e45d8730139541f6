import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import assert_resumes_bit_for_bit
from workbench.callbacks.baselines.penalties import PenaltyTerms
from workbench.errors import OptionError, StoreError

baselines = wb.baselines
ALL = [baselines.SAM(0.05), baselines.SAM(0.1, "SGD", {"momentum": 0.9}), baselines.Lion(), baselines.LAMB()]


def close(model, other, atol=1e-6):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def loss_of(model, task, step, penalty=None):
    tokens, targets = task.batch(step)
    if penalty is None:
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    terms = PenaltyTerms([penalty], model=model)
    terms.read_anatomy(tokens)
    with terms.watch(step) as penalty_of:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        return loss + penalty_of(loss)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("penalty", [None, baselines.JacobianPenalty(0.5)], ids=["no penalty", "penalty"])
def test_sam_against_an_explicit_loop(make_model, task, clip_norm, penalty):
    # The exact gradient of the bias of keys is 0; Adam would amplify its rounding errors.
    options = {"init_std": 0.2, "has_bias": False}
    reference, rho = make_model("none", **options), 0.1
    parameters = list(reference.parameters())
    optimizer, norms = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4), []
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step, penalty), parameters)
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(rho * gradient / norms[-1])
        optimizer.zero_grad()
        loss_of(reference, task, step, penalty).backward()
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    model = make_model("none", **options)
    settings = {"learning_rate": 1e-2, "clip_norm": clip_norm, "penalties": [] if penalty is None else [penalty]}
    records = list(wb.train(model, task, n_steps=5, optimizer=baselines.SAM(rho, options={"eps": 1e-4}), **settings))
    assert np.allclose([record.grad_norm for record in records], norms, rtol=1e-4)
    assert close(model, reference, atol=1e-5)
    without = make_model("none", **options)
    list(wb.train(without, task, n_steps=5, learning_rate=1e-2, clip_norm=clip_norm))
    assert not close(model, without, atol=1e-3)


def test_lion_against_its_algorithm(make_model, task):
    reference, model = (make_model(has_bias=False, init_std=0.2) for _ in range(2))
    parameters = list(reference.parameters())
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step), parameters)
        with torch.no_grad():
            for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                update = (0.9 * momentum + 0.1 * gradient).sign()
                parameter.sub_(1e-3 * (update + 0.01 * parameter))
                momentum.mul_(0.99).add_(0.01 * gradient)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-3, optimizer=baselines.Lion()))
    assert close(model, reference)


def test_lamb_against_its_algorithm(task):
    """You et al. 2020, Algorithm 2, with decoupled decay, for initial parameters that are not zero."""

    def make():
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3, generator=generator)
        return model

    reference, model = make(), make()
    parameters = list(reference.parameters())
    first, second = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(reference, task, step), parameters)
        with torch.no_grad():
            for parameter, m, v, gradient in zip(parameters, first, second, gradients, strict=True):
                m.mul_(0.9).add_(0.1 * gradient)
                v.mul_(0.999).add_(0.001 * gradient.square())
                update = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
                parameter.mul_(1 - 1e-2 * 0.01)
                parameter.sub_(1e-2 * parameter.norm() / update.norm() * update)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-2, optimizer=baselines.LAMB(eps=1e-12)))
    assert close(model, reference)


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize(
    "optimizer", [pytest.param(one, marks=pytest.mark.slow if "SGD" in str(one) else ()) for one in ALL], ids=str
)
def test_training_reduces_the_loss(make_model, optimizer):
    task = wb.tasks.associative_recall(length=5, vocab_size=12, n_pairs=2, batch_size=32)
    rates = {"Lion": 1e-3, "LAMB": 2e-2}
    rate = rates.get(type(optimizer).__name__, 1e-1 if "SGD" in str(optimizer) else 1e-2)
    model = make_model(vocab_size=12, d_model=32, init_std=0.1)
    records = list(wb.train(model, task, n_steps=120, learning_rate=rate, warmup=10, optimizer=optimizer))
    assert np.mean([record.loss for record in records[-10:]]) < 0.9 * records[0].loss


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(task, tmp_path, optimizer):
    settings = {"n_steps": 7, "optimizer": optimizer, "checkpoint_every": 2, "seed": 5, "warmup": 3}
    settings |= {"learning_rate": 1e-2, "penalties": [baselines.JacobianPenalty()], "clip_norm": 1.0}
    assert_resumes_bit_for_bit(dropout_model, task, tmp_path, **settings)


def test_a_run_cannot_be_resumed_with_another_radius(make_model, task, tmp_path):
    settings = {"n_steps": 4, "checkpoints": tmp_path, "checkpoint_every": 2}
    list(wb.train(make_model(), task, optimizer=baselines.SAM(0.05), **settings))
    with pytest.raises(StoreError, check=says("); resume with the same configuration, or start another run.")):
        wb.train(make_model(), task, optimizer=baselines.SAM(0.1), resume=True, **settings)


def test_the_learning_rate_of_a_sam_object_is_restored(make_model, task):
    model, other = make_model(), make_model()
    optimizer = baselines.SAM(0.05)(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 1e-2
    list(wb.train(model, task, n_steps=4, optimizer=optimizer, schedule="linear"))
    assert optimizer.base_optimizer.param_groups[0]["lr"] == 1e-2
    list(wb.train(other, task, n_steps=4, optimizer=baselines.SAM(0.05), learning_rate=1e-2, schedule="linear"))
    assert same_weights(model, other)


def test_the_diverged_step_of_sam_is_not_applied(task):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, tokens):
            return (self.weight * torch.inf).log() + torch.zeros(*tokens.shape, 32)

    model = Failing()
    (record,) = wb.train(model, task, n_steps=3, optimizer=baselines.SAM())
    assert record.cause == "non-finite"
    assert torch.equal(model.weight, torch.ones(32))


@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_hooks_on_the_inner_optimizer_run_at_each_update(make_model, task, optimizer):
    model, seen = make_model(), []
    optimizer = optimizer(list(model.parameters()))
    inner = getattr(optimizer, "base_optimizer", optimizer)
    inner.register_step_pre_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
    list(wb.train(model, task, n_steps=2, optimizer=optimizer))
    assert len(seen) == 2
    # When the hook runs, SAM has restored the parameters.
    assert all(torch.equal(a, b) for a, b in zip(seen[0], make_model().parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: baselines.SAM(0.0), about("rho", 0.0)),
        (lambda: baselines.SAM(base="Nothing"), about("base", "Nothing")),
        (lambda: baselines.SAM(base="LBFGS"), about("base", "LBFGS")),
        (lambda: baselines.Lion(betas=(0.9, 1.0)), about("betas", (0.9, 1.0))),
        (lambda: baselines.LAMB(weight_decay=-1.0), about("weight_decay", -1.0)),
        (lambda: baselines.LAMB(eps=0.0), about("eps", 0.0)),
    ],
)
def test_invalid_options_are_rejected(make, error):
    with pytest.raises(OptionError, check=error):
        make()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sam_in_float16_is_rejected_and_penalties_train_on_cuda(make_model, task):
    with pytest.raises(OptionError, check=about("precision", "float16")):
        wb.train(make_model().cuda(), task, n_steps=1, optimizer=baselines.SAM(), precision="float16")
    penalties = [baselines.GradientPenalty(), baselines.JacobianPenalty(), baselines.RandomL2()]
    for optimizer in ALL:
        for precision in ("float32", "bfloat16"):
            settings = {"optimizer": optimizer, "precision": precision, "penalties": penalties}
            records = list(wb.train(make_model().cuda(), task, n_steps=3, learning_rate=1e-3, **settings))
            assert np.isfinite([record.auxiliary_loss for record in records]).all()
