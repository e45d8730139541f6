"""Alarms wait for the end of the warm-up in every kind of loop."""

import math

import pytest
import torch

import workbench as wb
from tests.callbacks.test_kss_integrations import fit, lightning, trainer  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.callbacks.test_recorder_alarms import EVERY, alarms_on, parts  # noqa: F401
from tests.data_scripts import load_script
from workbench.callbacks.alarms.replaying import replay

#: The options of `alarms_on` settle for 4 steps.
WARM_UP = 12
SETTLES = {"n_steps": 18, "learning_rate": 1e-3, "warmup": WARM_UP}


def settled_at(alarms, store):
    """As it was heard, and as the record has it."""
    replay(wb.open_run(store), again := alarms_on("update_ratio"))
    assert again.settled_at == alarms.settled_at
    return alarms.settled_at


@pytest.mark.medium
def test_in_train(parts, tmp_path):  # noqa: F811
    alarms, store = alarms_on("update_ratio"), tmp_path / "run.zarr"
    list(
        wb.train(
            parts["model"], parts["task"], recorder=wb.Recorder(every=EVERY), alarms=alarms, store=store, **SETTLES
        )
    )
    assert settled_at(alarms, store) == WARM_UP


@pytest.mark.medium
def test_in_train_resumed_within_the_warm_up(parts, tmp_path):  # noqa: F811
    settings = {**SETTLES, "store": tmp_path / "run.zarr", "checkpoint_every": 7}
    run = wb.train(
        parts["model"], parts["task"], recorder=wb.Recorder(every=EVERY), alarms=alarms_on("loss"), **settings
    )
    for record in run:
        if record.step == 8:
            break
    run.close()
    alarms = alarms_on("update_ratio")
    again = wb.train(
        parts["model"], parts["task"], recorder=wb.Recorder(every=EVERY), alarms=alarms, resume=True, **settings
    )
    next(again)
    assert alarms.settled_at == 10
    list(again)
    assert settled_at(alarms, tmp_path / "run.zarr") == WARM_UP


def from_zero(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARM_UP))


@pytest.mark.medium
@pytest.mark.parametrize("resumed_at", [None, 6])
def test_in_a_loop_of_ones_own(parts, tmp_path, resumed_at):  # noqa: F811
    """With a scheduler that begins at zero: the rate is full at step WARM_UP, one later."""
    model, optimizer, batches = parts["model"], parts["optimizer"], parts["task"].stream(0)
    scheduler, store = from_zero(optimizer), tmp_path / "run.zarr"
    for first, last in [(0, 20)] if resumed_at is None else [(0, resumed_at), (resumed_at, 20)]:
        alarms = alarms_on("update_ratio")
        recorder = wb.Recorder(store, every=EVERY, alarms=alarms, resume=first > 0)
        with recorder.attach(model, optimizer, step=first or None):
            for _ in range(first, last):
                inputs, targets = next(batches)
                loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert settled_at(alarms, store) == WARM_UP + 1


@pytest.mark.framework
@pytest.mark.usefixtures("quiet")
def test_in_a_trainer(tmp_path):
    alarms, store = alarms_on("update_ratio"), tmp_path / "run.zarr"
    recorder = wb.Recorder(store, every=EVERY, alarms=alarms)
    options = {"max_steps": 18, "warmup_steps": WARM_UP, "lr_scheduler_type": "cosine"}
    trainer(gpt2(), tmp_path, wb.trainer_callback(recorder), **options).train()
    assert settled_at(alarms, store) == WARM_UP + 1


@pytest.mark.framework
@pytest.mark.usefixtures("quiet")
def test_in_lightning(lightning, parts, tmp_path):  # noqa: F811
    alarms, store = alarms_on("update_ratio"), tmp_path / "run.zarr"
    recorder = wb.Recorder(store, every=EVERY, alarms=alarms)

    class Shell(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = parts["model"]

        def training_step(self, batch, batch_idx):
            inputs, targets = batch
            return torch.nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [{"scheduler": from_zero(optimizer), "interval": "step"}]

    fit(lightning, Shell(), wb.lightning_callback(recorder), n_steps=18, n_batches=18, task=parts["task"])
    assert settled_at(alarms, store) == WARM_UP + 1


@pytest.mark.slow
@pytest.mark.recorded
def test_a_healthy_run_with_a_warm_up_of_200_steps_is_left_alone(one_thread):
    """A run of the recorded study but for its warm-up; its updates were too large at step 204, compared with steps 100
    to 200, in which the learning rate had still been rising."""
    script = load_script("make_early_warning")
    case = script.Case("pre_ln", 0.008, "", 3)
    model, task = script.model_and_task(case)
    recorder = wb.Recorder(every={"attention": None, "router": None, "optimizer": 5, "activations": None})
    alarms = wb.Alarms()
    settings = {**script.run_settings(case), "warmup": 200, "n_steps": 320}
    *_, last = wb.train(model, task, recorder=recorder, alarms=alarms, **settings)
    assert not last.diverged
    assert alarms.raised == []
    assert alarms.settled_at == 200
    assert all(math.isfinite(score) for name, score in alarms.scores().items() if name in ("loss", "update_ratio"))
