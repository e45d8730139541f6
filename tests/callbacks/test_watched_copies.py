"""A watched model can be saved, copied, transformed and exported, and its copies have no part in the record."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, loss_of, task  # noqa: F401
from tests.small_training import same_weights


def update(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def saved(model, path):
    torch.save(model, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=False)


WAYS = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "copy": lambda model, _: copy.copy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_trains_by_itself_and_is_not_recorded(task, tmp_path, way):  # noqa: F811
    model = dense()
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=2, shows=False):
        update(model, optimizer, task.batch(0))
        twin = WAYS[way](model, tmp_path)
        if way != "copy":  # a shallow copy shares its weights
            control = copy.deepcopy(dense())
            control.load_state_dict(model.state_dict())
            for each in (twin, control):
                own = torch.optim.SGD(each.parameters(), lr=0.1)
                for i in range(3):
                    update(each, own, task.batch(i))
            assert same_weights(twin, control)
        else:
            loss_of(twin, task.batch(1))
        update(model, optimizer, task.batch(1))
    assert wb.open_run(tmp_path / "a.zarr")["monitors"]["batch_size"].values.tolist() == [8.0, 8.0]


def test_under_transforms_and_export(task, tmp_path):  # noqa: F811
    model = dense()
    optimizer, (tokens, _) = adam(model), task.batch(0)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=2, shows=False):
        update(model, optimizer, task.batch(0))

        def size(parameters):
            return torch.func.functional_call(model, parameters, (tokens,)).square().mean()

        gradients = torch.func.grad(size)(dict(model.named_parameters()))
        assert gradients.keys() == dict(model.named_parameters()).keys()
        exported = torch.export.export(model, (tokens,))
        assert torch.equal(exported.module()(tokens), model(tokens))
        update(model, optimizer, task.batch(1))
    assert wb.open_run(tmp_path / "a.zarr")["monitors"]["batch_size"].values.tolist()[0] == 8.0


@pytest.mark.subprocess
def test_a_saved_model_needs_no_workbench(tmp_path):
    """The hook of a copy is a function of Python."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['workbench'] = None; "
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 2)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "torch.Size([1, 2])"
