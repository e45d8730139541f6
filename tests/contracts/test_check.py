"""The doors of a check, and that it leaves everything as it found it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

import workbench as wb
from tests.contracts.small import Model, checked, lm_loss, next_token, tokens
from workbench.contracts.check import check
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status
from workbench.errors import OptionError


class Dropping(Model):
    """A model that draws random numbers, has buffers, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, ids, attention_mask=None):
        if self.training:
            self.n_calls += 1
        return self.drop(super().forward(ids, attention_mask))


def train(model, optimizer, n):
    losses = []
    for ids in tokens(n, seed=1):
        loss = lm_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("begun", [0, 3])
def test_the_training_that_follows_is_bit_identical(begun):
    found = {}
    for is_checked in (False, True):
        torch.manual_seed(0)
        model = Dropping()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, begun)
        if is_checked:
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            check(model, optimizer, tokens(), lm_loss)
            for p, before in zip(model.parameters(), gradients, strict=True):
                assert (p.grad is None) == (before is None)
                assert before is None or torch.equal(p.grad, before)
        losses = train(model, optimizer, 4)
        random_numbers = (torch.rand(2).tolist(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
        found[is_checked] = (losses, model.state_dict(), optimizer.state_dict(), random_numbers)
    plain, other = found[False], found[True]
    assert plain[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1].values(), other[1].values(), strict=True))
    assert str(plain[2]) == str(other[2])
    assert plain[3][:2] == other[3][:2]


def everything_that_is_replaced():
    """Return the functions and hooks of torch that an observer may replace, by owner and name."""
    schedules = [each for each in vars(torch.optim.lr_scheduler).values() if isinstance(each, type)]
    owners = [
        *(torch, torch.autograd, torch.distributed, nn.Module, nn.functional, nn.utils, nn.utils.clip_grad),
        *(torch.optim.Optimizer, torch.amp.GradScaler, checkpoint, *schedules),
    ]
    functions = {(owner, name): value for owner in owners for name, value in vars(owner).items() if callable(value)}
    tables = {name: dict(value) for name, value in vars(hooks).items() if name.startswith("_global")
              and isinstance(value, dict)}  # fmt: skip
    return functions, tables


def test_nothing_global_remains():
    checked()  # imports are over
    before = everything_that_is_replaced()
    checked()
    after = everything_that_is_replaced()
    assert [key for key in before[0] if after[0].get(key) is not before[0][key]] == []
    assert after[1] == before[1]
    assert not _get_current_function_mode_stack()


def test_nothing_global_remains_after_an_exception():
    own = torch.autograd.backward

    def loss(model, ids):
        return lm_loss(model, ids) / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        checked(None, loss)
    assert torch.autograd.backward is own
    assert not _get_current_function_mode_stack()


def test_the_loss_of_a_record_is_that_of_the_training():
    """The recorded operations from outputs to loss give the same loss again."""
    torch.manual_seed(0)
    model = Model()
    seen = Observer(2)
    with seen:
        ids = tokens(1)[0]
        logits = model(ids)
        loss = next_token(logits, ids) * 0.5 + 1e-3 * logits.logsumexp(-1).square().mean()
        loss.backward()
    tape = seen.passes[0].tape
    assert tape.is_complete
    assert torch.equal(tape.loss([model(ids)]).detach(), loss.detach())
    assert "cross_entropy" in tape.functions


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda m, o: check(m, o, iter(tokens()), lm_loss), "batches"),
        (lambda m, o: check(m, o, [], lm_loss), "empty"),
        (lambda m, o: check(m, None, tokens(), lm_loss), "optimizer"),
        (lambda m, o: check("model", o, tokens(), lm_loss), "model"),
        (lambda m, o: check(m, o, tokens()), "has no loss"),
        (lambda m, o: check(m, o, tokens(), lm_loss, accept=["causality"]), "accept"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_changes(given, words):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptionError, match=words):
        given(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.framework
@pytest.mark.medium
def test_a_trainer_of_transformers(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(3, 64, (32, 20))
    sound = [{"input_ids": each, "labels": each} for each in ids]
    twice = [{"input_ids": each[:-1], "labels": each[1:]} for each in ids]
    options = {"max_steps": 6, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": []}

    def trainer(data):
        return Trainer(model, TrainingArguments(str(tmp_path / "out"), **options), train_dataset=data)

    before = copy.deepcopy(model.state_dict())
    given = trainer(sound)
    callbacks = list(given.callback_handler.callbacks)
    assert wb.check(given)["labels_aligned"].status is Status.PASSED
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert given.callback_handler.callbacks == callbacks
    assert given.optimizer is None
    assert given.state.global_step == 0
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    found = wb.check(trainer(twice))["labels_aligned"]
    assert "2 positions later" in found.evidence


@pytest.mark.filterwarnings("error:.*global hooks")
def test_a_module_that_is_compiled_in_place():
    model = Model()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    found = checked(model)
    assert found["causal"].status is found["compiled_equals_eager"].status is Status.PASSED
    assert model._compiled_call_impl is compiled


@pytest.mark.framework
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_lightning():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch).softmax(-1), batch[:, :3].argmax(1))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    module, data = Module(), torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2, max_epochs=1)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = wb.check(trainer, module, data, progress=False)
    assert {each.id for each in found.failed} == {"initial_loss"}
    assert found["accumulation"].status is Status.PASSED
    assert "2 passes" in found["accumulation"].evidence
    assert found["order_matters"].status is Status.NOT_APPLICABLE
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert (trainer.global_step, module._trainer) == (0, None)
    with pytest.raises(OptionError, match="wb.check\\(trainer, module, loader\\)"):
        wb.check(trainer, progress=False)


@pytest.mark.framework
def test_objects_that_accelerate_has_prepared():
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    prepare = accelerate.Accelerator(cpu=True).prepare
    model, optimizer, loader = prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(torch.cat(tokens()), batch_size=6)
    )
    found = wb.check(model, optimizer, loader, lm_loss, progress=False)
    assert not found.failed
    assert found["update_as_predicted"].status is found["causal"].status is Status.PASSED


def test_a_schedule_that_the_loop_of_the_check_does_not_step_is_no_failure():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found = check(model, optimizer, tokens(), lm_loss, progress=False)
    assert found["schedule"].status is Status.NOT_APPLICABLE
    assert schedule.last_epoch == 0


def test_derivatives_outside_of_backward_are_no_passes():
    def loss(model, ids):
        embedded = model(ids)
        torch.autograd.grad(embedded.square().mean(), list(model.parameters()), retain_graph=True, allow_unused=True)
        return lm_loss(model, ids)

    report = checked(None, loss)
    assert report["labels_aligned"].status is Status.PASSED
    assert not report.failed


def test_scripted_modules_and_transformed_calls_do_not_stop_a_training():
    from torch.func import functional_call, grad, vmap

    model, x = torch.jit.script(nn.Linear(4, 2)), torch.randn(6, 4)
    plain = nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]

    def one(held, x):
        return functional_call(plain, held, (x[None],)).square().sum()

    done = []
    with Observer(3, done.append) as seen:
        for _ in range(3):
            model(x).square().mean().backward()
            found = vmap(grad(one), in_dims=(None, 0))({n: p.detach() for n, p in plain.named_parameters()}, x)
            for name, p in plain.named_parameters():
                p.grad = found[name].mean(0)
            for each in optimizers:
                each.step()
        seen.finish()
    assert done == [seen]
    assert [call.module for call in seen.calls] == [model] * 3
