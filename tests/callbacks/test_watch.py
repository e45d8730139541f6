"""Watching a run in one line, in every kind of loop."""

from __future__ import annotations

import math
import sys
from xml.etree import ElementTree

import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.callbacks.test_kss_integrations import fit, lightning, trainer  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.callbacks.test_recorder import adam, dense, loss_of, task  # noqa: F401
from tests.small_training import same_weights
from workbench.errors import OptionError


def trained(model, task, optimizer, *, n_steps=8, log=lambda **_: None):  # noqa: F811
    for i in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(model, task.batch(i))
        loss.backward()
        log(loss=loss)
        optimizer.step()
    return model


def test_in_a_standard_loop(task, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    model = dense()
    optimizer, received = adam(model), []
    fault = wb.faults.low_precision_attention(n_bits=6, start=4)
    with wb.watch(model, optimizer, every={"precision": 2}, on_alarm=received.append) as watched:
        assert "waiting for the first update" in repr(watched)
        with fault.attach(model, optimizer):
            trained(model, task, optimizer, log=watched.log)
    assert watched.path.parent.name == "runs"
    run = wb.open_run(watched.path)
    assert run["monitors"].sizes["step"] == 8
    assert run.attrs["state"] == "finished"
    assert watched.alarms.raised == received
    assert (received[0].signal, received[0].step) == ("arithmetic", 5)
    shown = capsys.readouterr().err
    assert shown.startswith(f"step 5: {received[0].message}")
    assert shown.count("\n") == len(received)  # a log contains only alarms
    status = watched.status
    assert (status.step, status.is_over, status.checked["precision"]) == (7, True, 7)
    assert "ALARM at step 5 (arithmetic" in repr(watched)
    page = watched._repr_html_()
    ElementTree.fromstring(page)  # well-formed
    assert "Likely cause: low precision attention" in page
    assert str(watched.path) in page


def test_training_is_bitwise_identical_and_hooks_are_removed(task, tmp_path, capsys):  # noqa: F811
    control = dense()
    trained(control, task, adam(control))
    model = dense()
    optimizer = adam(model)
    watched = wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=2)
    trained(model, task, optimizer)
    watched.close()
    watched.close()
    assert same_weights(control, model)
    assert capsys.readouterr().err == ""  # there is no alarm to show
    hooks = (optimizer._optimizer_step_pre_hooks, model._forward_pre_hooks, model._forward_hooks)
    assert [len(each) for each in hooks] == [0, 0, 0]
    assert watched.status.verdict == "no alarm"


def test_in_a_terminal_one_line_is_updated(task, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = dense()
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr") as watched:
        trained(model, task, optimizer, log=watched.log)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.rstrip().split("\r\x1b[2K")[-1] == watched.status.as_text()
    assert f"step 7 · loss {watched.status.loss:.4g} · learning rate 0.01" in shown


def test_a_closed_terminal_does_not_stop_training(task, tmp_path, monkeypatch):  # noqa: F811
    class Closed:
        def isatty(self):
            return True

        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    model = dense()
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr") as watched:
        trained(model, task, optimizer, log=watched.log)
    assert watched.status.step == 7


@pytest.mark.framework
@pytest.mark.usefixtures("quiet")
def test_in_a_trainer(tmp_path):
    subject = trainer(gpt2(), tmp_path, max_steps=6)
    watched = wb.watch(subject, store=tmp_path / "run.zarr", shows=False)
    subject.train()
    assert wb.open_run(watched.path)["monitors"].sizes["step"] == 6
    assert (watched.status.step, watched.status.is_over) == (5, True)
    assert math.isfinite(watched.status.loss)


@pytest.mark.framework
@pytest.mark.usefixtures("quiet")
def test_in_lightning(lightning, task, tmp_path):  # noqa: F811
    class Shell(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = dense()

        def training_step(self, batch, batch_idx):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return adam(self)

    loader = torch.utils.data.DataLoader([task.batch(i) for i in range(5)], batch_size=None)
    subject = lightning.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    watched = wb.watch(subject, store=tmp_path / "run.zarr", shows=False)
    subject.fit(Shell(), loader)
    assert wb.open_run(watched.path)["monitors"].sizes["step"] == 5
    assert watched.status.is_over


def test_invalid_arguments_are_rejected(tmp_path):
    for model, optimizer in ((dense(), None), (3, None), (dense(), 3)):
        with pytest.raises(OptionError, check=about("optimizer", optimizer)):
            wb.watch(model, optimizer, store=tmp_path / "a.zarr")
    with pytest.raises(OptionError, check=says("The optimizer updates no parameter of Transformer, nor a")):
        wb.watch(dense(), adam(torch.nn.Linear(2, 2)), store=tmp_path / "a.zarr")
