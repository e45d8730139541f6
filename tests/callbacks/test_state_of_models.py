"""A watched training is identical although the model draws, counts and advances by itself in each pass."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, events_of, loss_of, task  # noqa: F401
from workbench.models.probing import RepeatedPasses, undisturbed

TOTALS = {"n": 0}
n_calls = 0


class Helper:
    n_made = 0

    def __init__(self):
        self.k, self.values, self.kept = 0, np.zeros(2), torch.zeros(2)

    def grow(self):
        self.k += 1
        self.values += 1
        self.kept.add_(1)
        type(self).n_made += 1
        return self.k + self.values[0] + float(self.kept[0]) + self.n_made


def counted(step=1, _memory=[0]):  # noqa: B006 the state is meant to be in the default
    global n_calls
    n_calls += step
    _memory[0] += step
    return n_calls + _memory[0]


def closure():
    k = 0

    def grow():
        nonlocal k
        k += 1
        return k

    return grow


class Registry(OrderedDict):
    """A table that makes its entries when they are read."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


REGISTRY = Registry(helper=Helper)


def of_registry(_):
    assert REGISTRY["helper"] is not REGISTRY["helper"]
    return 1


def in_total(_):
    TOTALS["n"] += 1
    return TOTALS["n"]


def lru(model):
    model.recent.move_to_end("a" if next(iter(model.recent)) == "a" else "b")
    model.counts["x"] += 1
    model.last.append(model.counts["x"])
    return ord(next(iter(model.recent))) + model.counts["x"] + sum(model.last)


#: What a model does in each pass -> a number.
KINDS = {
    "torch.Generator": lambda m: float(torch.rand((), generator=m.generator)),
    "random.Random": lambda m: m.random.random(),
    "numpy Generator": lambda m: m.numpy.random(),
    "numpy RandomState": lambda m: m.legacy.rand(),
    "iterator of a list": lambda m: next(m.items),
    "counter": lambda m: next(m.count),
    "an object": lambda m: m.helper.grow(),
    "an object in a list": lambda m: m.helpers[0].grow(),
    "a partial": lambda m: m.partial(),
    "a closure": lambda m: m.closure(),
    "globals and defaults": lambda m: counted(),
    "a dictionary of the module": in_total,
    "subclasses of containers": lru,
    "a registry": of_registry,
    "a tensor that is no buffer": lambda m: float(m.plain.add_(1)),
}


class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind, self.plain = dense(), KINDS[kind], torch.zeros(())
        self.generator, self.random = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.legacy = np.random.default_rng(0), np.random.RandomState(0)
        self.items, self.count, self.helper, self.helpers = iter([*range(1000)]), count(), Helper(), [Helper()]
        self.partial, self.closure = partial(Helper().grow), closure()
        self.recent, self.counts, self.last = OrderedDict(a=1, b=2), Counter(), deque(maxlen=3)

    def forward(self, tokens):
        return self.inner(tokens) * (1 + 1e-4 * self.kind(self))


def losses(kind, task, store=None, n_steps=4):  # noqa: F811
    global n_calls
    n_calls, TOTALS["n"], Helper.n_made, counted.__defaults__[1][:] = 0, 0, 0, [0]
    model = Own(kind)
    optimizer, found, calls = adam(model), [], []
    model.inner.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    watched = None if store is None else wb.watch(model, optimizer, store=store, every=2, shows=False)
    for i in range(n_steps):
        loss = loss_of(model, task.batch(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if watched is not None:
        watched.close()
    return found, len(calls)


@pytest.mark.filterwarnings("ignore:Updates of queries")
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_identical_and_own_hooks_run_once_a_pass(kind, task, tmp_path):  # noqa: F811
    expected = losses(kind, task)
    assert losses(kind, task, tmp_path / "a.zarr") == expected
    assert expected[1] == 4
    assert not [event for event in events_of(tmp_path / "a.zarr") if event["kind"] == "not recorded"]
    assert "activations" in wb.open_run(tmp_path / "a.zarr").children


@pytest.mark.filterwarnings("ignore")
def test_an_iterator_that_cannot_be_set_back_is_not_advanced(task, tmp_path, monkeypatch):  # noqa: F811
    """A generator has no copy: the model is not run to be measured, and an event says why."""
    monkeypatch.setitem(KINDS, "generator", lambda m: next(m.stream))
    monkeypatch.setattr(Own, "stream", None, raising=False)

    def trained(store=None):
        Own.stream = (i for i in range(1000))
        return losses("generator", task, store)

    assert trained() == trained(tmp_path / "a.zarr")
    messages = [event["message"] for event in events_of(tmp_path / "a.zarr") if event["kind"] == "not recorded"]
    assert messages
    assert all("The model uses a generator, which cannot be set back" in message for message in messages)
    assert wb.open_run(tmp_path / "a.zarr")["optimizer"].sizes["step"] == 2


def test_state_is_restored_if_a_pass_raises():
    model = Own("an object")

    def stopped_pass():
        with undisturbed(model):
            model(torch.zeros(1, 4, dtype=torch.long))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stopped_pass()
    assert (model.helper.k, model.helper.values.tolist(), model.helper.kept.tolist()) == (0, [0, 0], [0, 0])


class Keeping(nn.Module):
    """A linear map that changes a state in each pass."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change, self.k, self.found = nn.Linear(3, 3), change, 0, []
        self.register_buffer("n", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        self.change(self)
        return self.norm(self.linear(x)) * torch.ones(())

    @property
    def state(self):
        return self.k, len(self.found), float(self.n), [*vars(self)], torch.get_rng_state().tolist()


def is_guarded():
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


@pytest.mark.parametrize(
    "change",
    {
        "attribute": lambda m: setattr(m, "k", m.k + 1),
        "new attribute": lambda m: setattr(m, "last", 1),
        "list": lambda m: m.found.append(1),
        "buffer": lambda m: m.n.add_(1),
        "random numbers": lambda m: torch.rand(()),
        "python's random numbers": lambda m: random.random(),
        "numpy's random numbers": lambda m: np.random.rand(),  # noqa: NPY002
    }.values(),
)
def test_repeated_passes_of_a_model_that_keeps_state_are_always_guarded(change):
    model = Keeping(change)
    passes, before, states = RepeatedPasses(model), model.state, []
    for _ in range(3):
        with passes.undisturbed():
            assert is_guarded()
            model(torch.ones(2, 3))
        states.append(model.state)
    assert states == [before] * 3


def test_repeated_passes_of_other_models_are_guarded_now_and_then():
    model, guarded = Keeping(lambda m: None), []
    model.norm.eval()
    modes, before = [part.training for part in model.modules()], copy.deepcopy(model.state_dict())
    passes = RepeatedPasses(model)
    for _ in range(102):
        with passes.undisturbed():
            guarded.append(is_guarded())
            assert not any(part.training for part in model.modules())
            assert not model(torch.ones(2, 3)).requires_grad
        assert [part.training for part in model.modules()] == modes
    assert [i for i, is_one in enumerate(guarded) if is_one] == [0, 100]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
