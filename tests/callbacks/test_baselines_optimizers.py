import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import assert_resumes_to_the_bit
from workbench.errors import OptionError, StoreError

baselines = wb.baselines
ALL = [baselines.SAM(0.05), baselines.SAM(0.1, "SGD", {"momentum": 0.9}), baselines.Lion(), baselines.LAMB()]


def close(model, other, atol=1e-6):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def loss_of(model, task, step, penalty=None):
    tokens, targets = task.batch(step)
    if penalty is None:
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    terms = baselines.PenaltyTerms([penalty], model=model)
    terms.read_anatomy(tokens)
    with terms.watch(step) as penalty_of:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        return loss + penalty_of(loss)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("penalty", [None, baselines.JacobianPenalty(0.5)], ids=["plain", "penalty"])
def test_sam_is_the_two_steps_written_out(make_model, task, clip_norm, penalty):
    options = {
        "init_std": 0.2,
        "has_bias": False,
    }  # a key's bias has no gradient but rounding, which Adam would enlarge
    plain, rho = make_model("none", **options), 0.1
    weights = list(plain.parameters())
    optimizer, norms = torch.optim.AdamW(weights, lr=1e-2, eps=1e-4), []
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(plain, task, step, penalty), weights)
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(rho * gradient / norms[-1])
        optimizer.zero_grad()
        loss_of(plain, task, step, penalty).backward()
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(weights, clip_norm)
        optimizer.step()
    model = make_model("none", **options)
    settings = {"learning_rate": 1e-2, "clip_norm": clip_norm, "penalties": [] if penalty is None else [penalty]}
    records = list(wb.train(model, task, n_steps=5, optimizer=baselines.SAM(rho, options={"eps": 1e-4}), **settings))
    assert np.allclose([record.grad_norm for record in records], norms, rtol=1e-4)
    assert close(model, plain, atol=1e-5)
    without = make_model("none", **options)
    list(wb.train(without, task, n_steps=5, learning_rate=1e-2, clip_norm=clip_norm))
    assert not close(model, without, atol=1e-3)


def test_lion_is_its_algorithm(make_model, task):
    plain, model = (make_model(has_bias=False, init_std=0.2) for _ in range(2))
    weights = list(plain.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(plain, task, step), weights)
        with torch.no_grad():
            for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
                update = (0.9 * momentum + 0.1 * gradient).sign()
                weight.sub_(1e-3 * (update + 0.01 * weight))
                momentum.mul_(0.99).add_(0.01 * gradient)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-3, optimizer=baselines.Lion()))
    assert close(model, plain)


def test_lamb_is_its_algorithm(task):
    """You et al. 2020, Algorithm 2, with decoupled decay, on weights that are not zero at first."""

    def made():
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.3, generator=generator)
        return model

    plain, model = made(), made()
    weights = list(plain.parameters())
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(5):
        gradients = torch.autograd.grad(loss_of(plain, task, step), weights)
        with torch.no_grad():
            for weight, m, v, gradient in zip(weights, first, second, gradients, strict=True):
                m.mul_(0.9).add_(0.1 * gradient)
                v.mul_(0.999).add_(0.001 * gradient.square())
                update = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
                weight.mul_(1 - 1e-2 * 0.01)
                weight.sub_(1e-2 * weight.norm() / update.norm() * update)
    list(wb.train(model, task, n_steps=5, learning_rate=1e-2, optimizer=baselines.LAMB(eps=1e-12)))
    assert close(model, plain)


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize(
    "optimizer", [pytest.param(one, marks=pytest.mark.slow if "SGD" in str(one) else ()) for one in ALL], ids=str
)
def test_they_learn(make_model, optimizer):
    task = wb.tasks.associative_recall(length=5, vocab_size=12, n_pairs=2, batch_size=32)
    rates = {"Lion": 1e-3, "LAMB": 2e-2}
    rate = rates.get(type(optimizer).__name__, 1e-1 if "SGD" in str(optimizer) else 1e-2)
    model = make_model(vocab_size=12, d_model=32, init_std=0.1)
    records = list(wb.train(model, task, n_steps=120, learning_rate=rate, warmup=10, optimizer=optimizer))
    assert np.mean([record.loss for record in records[-10:]]) < 0.9 * records[0].loss


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ALL, ids=str)
def test_stopping_and_resuming_gives_the_bits_of_running_through(task, tmp_path, optimizer):
    settings = {"n_steps": 7, "optimizer": optimizer, "checkpoint_every": 2, "seed": 5, "warmup": 3}
    settings |= {"learning_rate": 1e-2, "penalties": [baselines.JacobianPenalty()], "clip_norm": 1.0}
    assert_resumes_to_the_bit(dropout_model, task, tmp_path, **settings)


def test_another_radius_is_another_configuration(make_model, task, tmp_path):
    settings = {"n_steps": 4, "checkpoints": tmp_path, "checkpoint_every": 2}
    list(wb.train(make_model(), task, optimizer=baselines.SAM(0.05), **settings))
    with pytest.raises(StoreError, match=r"training.optimizer = SAM\(rho=0.05, .*, this call says SAM\(rho=0.1,"):
        wb.train(make_model(), task, optimizer=baselines.SAM(0.1), resume=True, **settings)


def test_a_ready_sam_trains_and_comes_back_with_its_rate(make_model, task):
    model, other = make_model(), make_model()
    ready = baselines.SAM(0.05)(list(model.parameters()))
    ready.param_groups[0]["lr"] = 1e-2
    list(wb.train(model, task, n_steps=4, optimizer=ready, schedule="linear"))
    assert ready.base_optimizer.param_groups[0]["lr"] == 1e-2
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
def test_the_update_is_reachable_by_hooks(make_model, task, optimizer):
    model, seen = make_model(), []
    ready = optimizer(list(model.parameters()))
    inner = getattr(ready, "base_optimizer", ready)
    inner.register_step_pre_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
    list(wb.train(model, task, n_steps=2, optimizer=ready))
    assert len(seen) == 2
    first = all(torch.equal(a, b) for a, b in zip(seen[0], make_model().parameters(), strict=True))
    assert first  # SAM has come back from uphill when the hook runs


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: baselines.SAM(0.0), "rho is 0.0, expected a positive radius"),
        (lambda: baselines.SAM(base="Nothing"), "base is 'Nothing', expected a class of torch.optim that makes one"),
        (lambda: baselines.SAM(base="LBFGS"), "base is 'LBFGS', expected a class of torch.optim that makes one"),
        (lambda: baselines.Lion(betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\), expected two numbers"),
        (lambda: baselines.LAMB(weight_decay=-1.0), "weight_decay is -1.0, expected a number of at least 0"),
        (lambda: baselines.LAMB(eps=0.0), "eps is 0.0, expected a positive number"),
    ],
)
def test_bad_options_are_refused(make, sentence):
    with pytest.raises(OptionError, match=sentence):
        make()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_and_sam_are_refused_and_penalties_train_on_cuda(make_model, task):
    with pytest.raises(OptionError, match="float16 scales one gradient a step, but SAM takes two"):
        wb.train(make_model().cuda(), task, n_steps=1, optimizer=baselines.SAM(), precision="float16")
    penalties = [baselines.GradientPenalty(), baselines.JacobianPenalty(), baselines.RandomL2()]
    for optimizer in ALL:
        for precision in ("float32", "bfloat16"):
            settings = {"optimizer": optimizer, "precision": precision, "penalties": penalties}
            records = list(wb.train(make_model().cuda(), task, n_steps=3, learning_rate=1e-3, **settings))
            assert np.isfinite([record.auxiliary_loss for record in records]).all()
