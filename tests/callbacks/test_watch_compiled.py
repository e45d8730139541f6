"""Watching a compiled model causes no graph breaks and no recompilation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, events_of, hooks_of, loss_of, task  # noqa: F401
from tests.small_training import same_weights

pytestmark = pytest.mark.medium

EVERY = {
    "attention": 10, "router": None, "optimizer": 2, "activations": 2, "precision": 2, "reduction": 2, "update": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting_backend():
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("eager")


def entire_model(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def by_blocks(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def trained(make, task, path=None, *, n_steps=8, update=lambda optimizer: optimizer.step):  # noqa: F811
    """Train in a loop, which is watched if there is a path.

    Returns:
        The model; the numbers of graphs and frames after the first step and at the end, and the number of graph breaks.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = counting_backend()
    model = dense()
    optimizer = adam(model)
    called, step = make(model, backend=backend, fullgraph=True), update(optimizer)
    hooks, counts = hooks_of(model, optimizer), []
    with nullcontext() if path is None else wb.watch(called, optimizer, store=path, every=EVERY, shows=False) as watch:
        for i in range(n_steps):
            if watch is not None and i == 4:
                watch.recorder.every.update(precision=1, reduction=3, activations=None)
            optimizer.zero_grad()
            loss_of(called, task.batch(i)).backward()
            counts.append((backend.frame_count, counters["frames"]["total"]))
            step()
    assert hooks_of(model, optimizer) == hooks
    loss_of(called, task.batch(0)).backward()
    counts.append((backend.frame_count, counters["frames"]["total"]))
    return model, (counts[0], counts[-1], sum(counters["graph_break"].values()))


@pytest.mark.parametrize("make", [entire_model, in_place, by_blocks])
def test_no_graph_breaks_and_no_recompilation(make, task, tmp_path):  # noqa: F811
    """Neither measurements, nor a change of the cadence, nor the end of watching cause them."""
    control, expected = trained(make, task)
    with torch._dynamo.config.patch(error_on_recompile=True):
        model, found = trained(make, task, tmp_path / "run.zarr")
    first, last, n_breaks = expected
    assert found == expected
    assert (first, n_breaks) == (last, 0)
    assert first[0] >= 1
    assert same_weights(control, model)
    run = wb.open_run(tmp_path / "run.zarr")
    assert run["precision"]["step"].values.tolist() == [1, 3, 5, 6, 7]  # step 4 was planned before
    assert run["reduction"]["step"].values.tolist() == [1, 3, 5]
    assert run["activations"]["step"].values.tolist() == [1, 3]
    assert run["monitors"]["batch_size"].values.tolist() == [8.0] * 8


@pytest.mark.slow
def test_a_compiled_step_of_the_optimizer(task, tmp_path):  # noqa: F811
    """Hooks of the optimizer are not compiled, and the step remains compiled."""
    backends = []

    def compiled(optimizer):
        backends.append(counting_backend())
        return torch.compile(optimizer.step, backend=backends[-1])

    control, _ = trained(entire_model, task, update=compiled)
    model, _ = trained(entire_model, task, tmp_path / "run.zarr", update=compiled)
    assert same_weights(control, model)
    assert backends[0].frame_count == backends[1].frame_count >= 1
    assert wb.open_run(tmp_path / "run.zarr")["monitors"].sizes["step"] == 8


def compiled_loss(model, optimizer, n_steps, task, **options):  # noqa: F811
    loss = torch.compile(lambda batch: loss_of(model, batch), **options)
    for i in range(n_steps):
        optimizer.zero_grad()
        loss(task.batch(i)).backward()
        optimizer.step()
    return model


def messages_of(path):
    return [event["message"] for event in events_of(path) if event["kind"] == "not recorded"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_calls_the_model_stays_one_graph(task, tmp_path, backend):  # noqa: F811
    """Its batches are not seen, which an event says; weights, gradients and updates are recorded."""
    control = dense()
    compiled_loss(control, adam(control), 4, task, backend=backend, fullgraph=True)
    torch._dynamo.reset()
    model = dense()
    optimizer = adam(model)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=EVERY, shows=False):
        compiled_loss(model, optimizer, 4, task, backend=backend, fullgraph=True)
    assert same_weights(control, model)
    run = wb.open_run(tmp_path / "a.zarr")
    assert run["monitors"].sizes["step"] == 4
    assert run["optimizer"].sizes["step"] == 2
    assert messages_of(tmp_path / "a.zarr")[0].endswith("compile the model instead.")


def tied_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True, use_cache=False)
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_tied_model_stays_one_graph(tmp_path, backend):
    """Its inner model has all parameters too, and a hook on it is within the graph of the outer one."""
    losses = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        model = tied_llama()
        optimizer, called = adam(model), torch.compile(model, backend=backend, fullgraph=True)
        tokens, found = torch.arange(32).reshape(2, 16), []
        store = tmp_path / "a.zarr"
        with wb.watch(called, optimizer, store=store, every=2, shows=False) if is_watched else nullcontext():
            for i in range(3):
                loss = called(input_ids=(tokens + i) % 32, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    monitors = wb.open_run(tmp_path / "a.zarr")["monitors"]
    assert monitors["batch_size"].values.tolist() == [2.0] * 3
    assert monitors["repeated_batch"].values.tolist() == [0.0] * 3  # although several modules receive a batch


def test_a_function_that_was_compiled_before_is_explained_in_an_event(task, tmp_path):  # noqa: F811
    model = dense()
    optimizer = adam(model)
    loss = torch.compile(lambda batch: loss_of(model, batch), backend="eager")
    loss(task.batch(0))
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False):
        for i in range(2):
            optimizer.zero_grad()
            loss(task.batch(i)).backward()
            optimizer.step()
    assert messages_of(tmp_path / "a.zarr")[0].endswith(
        "If a compiled function calls the model, compile the model instead."
    )
