"""The flow along a run equals that of `measure` at each checkpoint."""

import inspect

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about
from tests.zoo.zoo_models import TEXT, inputs_for
from workbench.errors import CheckpointError
from workbench.flow import along_run, summarize
from workbench.flow.flow_measurement import measure
from workbench.models.run_checkpoints import list_checkpoints, load_weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the store of a run with checkpoints after 2 and 4 updates."""
    store = tmp_path_factory.mktemp("run") / "mine.zarr"
    task = wb.tasks.random_tokens(vocab_size=32, length=8, batch_size=4)
    model = wb.zoo.transformer(**TEXT)
    for _ in wb.train(model, task, n_steps=4, learning_rate=1e-2, store=store, checkpoint_every=2):
        pass
    return store


def test_each_step_is_the_flow_of_its_checkpoint(run):
    model = wb.zoo.transformer(**TEXT)
    before = model.head.weight.clone()
    tokens = inputs_for(model)
    flow = along_run(run, model, tokens, n_jacobian_tokens=3)
    places = list_checkpoints(run.with_suffix(".checkpoints"))
    assert list(flow["step"]) == list(places)
    assert len(places) > 1
    assert torch.equal(model.head.weight, before)
    for step, place in places.items():
        load_weights(model, place)
        alone = measure(model, tokens, n_jacobian_tokens=3)
        for name in alone.data_vars:
            np.testing.assert_array_equal(flow[name].sel(step=step), alone[name])
    assert flow["sublayer_name"].dims == ("layer", "sublayer")
    assert flow.attrs["store"] == str(run)
    rows = summarize(flow)
    assert rows["total_signal_gain"].dims == ("step",)
    assert float(rows["total_signal_gain"][-1]) == float(summarize(alone)["total_signal_gain"])
    last = along_run(run, model, tokens, steps=[max(places)], jacobian=False)
    np.testing.assert_array_equal(last["state_rms"][0], alone["state_rms"])


def test_missing_checkpoints_are_named(run, tmp_path):
    model = wb.zoo.transformer(**TEXT)
    with pytest.raises(CheckpointError, check=about("store", str(tmp_path / "other.zarr"))):
        along_run(tmp_path / "other.zarr", model, inputs_for(model))
    with pytest.raises(CheckpointError, check=about("steps", 3, (2, 4))):
        along_run(run, model, inputs_for(model), steps=[3])
    first = run.with_suffix(".checkpoints") / "step-00000002" / "model.safetensors"
    with pytest.raises(CheckpointError, check=about(str(first))):
        along_run(run, wb.zoo.transformer(**{**TEXT, "d_model": 8}), inputs_for(model))


def test_along_run_takes_the_options_of_measure():
    of_run = dict(inspect.signature(along_run).parameters)
    of_measure = dict(inspect.signature(wb.flow.measure).parameters)
    del of_measure["subject"], of_measure["anatomy"]  # each checkpoint is another model
    for name in ("store", "model", "steps", "progress"):
        del of_run[name]
    assert list(of_run.values()) == list(of_measure.values())
