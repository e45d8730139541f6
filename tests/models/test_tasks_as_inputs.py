"""All functions that take inputs also accept a task, of which they use the held-out inputs."""

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.models.batches import Batches, take_examples

TASK = wb.tasks.text_bytes(length=16, batch_size=4)


@pytest.fixture(scope="module")
def model():
    return wb.zoo.transformer("pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=256, max_length=16).eval()


@pytest.fixture(scope="module")
def mixture():
    return wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=256, max_length=16, n_experts=4, top_k=1)


def equal(found, expected):
    for name in expected.data_vars:
        np.testing.assert_array_equal(found[name].values, expected[name].values, err_msg=str(name))


def test_profile(model):
    found = wb.profile(model, TASK, n_snapshots=2000, progress=False)
    equal(found, wb.profile(model, TASK.probe(2000), n_snapshots=2000, progress=False))
    assert found.attrs["n_snapshots"] == 2000


def test_flow(model):
    options = {"n_tokens": 64, "n_jacobian_tokens": 4, "n_singular": 2}
    equal(wb.flow.measure(model, TASK, **options), wb.flow.measure(model, TASK.probe(64), **options))


def test_anatomy_and_weights(model, mixture):
    assert wb.read_anatomy(model, TASK).stack == wb.read_anatomy(model, TASK.probe(64)).stack
    assert len(wb.query_key_weights(model, TASK)) == 2
    assert [router.n_experts for router in wb.router_weights(mixture, TASK)] == [4, 4]


def test_a_probe_of_the_model(mixture):
    anatomy = wb.read_anatomy(mixture, TASK)
    found = wb.monitors.ModelProbe(mixture, anatomy, TASK).take()
    expected = wb.monitors.ModelProbe(mixture, anatomy, TASK.probe(1024)).take()
    for part in expected:
        for name, values in expected[part].items():
            np.testing.assert_array_equal(found[part][name], values)


def test_a_recorder_is_prepared_with_a_task(model):
    wb.Recorder().prepare(model, TASK)


def test_examples_and_batches_of_a_task():
    assert torch.equal(take_examples(TASK, slice(0, 2)), TASK.probe(1024)[:2])
    assert torch.equal(Batches.of(TASK, n_tokens=32).first(), TASK.probe(32))
