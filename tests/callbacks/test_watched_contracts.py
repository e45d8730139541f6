"""A watch tests the contracts of a training within its first updates, and leaves the training as it is."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

import workbench as wb
from workbench.callbacks.recorder.watched_contracts import N_UPDATES, WatchedContracts
from workbench.contracts.observer import Observer
from workbench.contracts.results import CheckReport, Status
from workbench.diagnosis import contracts_of

WIDTH, N_TOKENS, LENGTH = 16, 24, 12
N_LATE = 30


class Model(nn.Module):
    """Recurrent language model with dropout; without ``is_causal`` it reads what it predicts."""

    def __init__(self, *, is_causal=True):
        super().__init__()
        self.embed, self.drop = nn.Embedding(N_TOKENS, WIDTH), nn.Dropout(0.2)
        self.mix = nn.GRU(WIDTH, WIDTH // (2 - is_causal), batch_first=True, bidirectional=not is_causal)
        self.head = nn.Linear(WIDTH, N_TOKENS)

    def forward(self, tokens):
        return self.head(self.mix(self.drop(self.embed(tokens)))[0])


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(tmp_path, *, watches=True, n=N_LATE, kind="plain", is_causal=True, model=None, clears=True, **options):
    """Train a model; return it, the watch, and the next random number of each generator."""
    torch.manual_seed(0)
    model = Model(is_causal=is_causal) if model is None else model
    called = torch.compile(model, backend="eager") if kind == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled")
    options = {"every": None, "shows": False, "store": tmp_path / "a.zarr"} | options
    around = wb.watch(called, optimizer, **options) if watches else contextlib.nullcontext()
    with around as watched:
        for _ in range(n):
            for _ in range(3 if kind == "accumulated" else 1):
                tokens = torch.randint(0, N_TOKENS, (6, LENGTH))
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    loss = loss_of(called, tokens) / (3 if kind == "accumulated" else 1)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if clears:
                optimizer.zero_grad()
    return model, watched, torch.rand(3)


def parts_of_torch():
    """Return all that an observation replaces or adds to."""
    return (
        torch.autograd.backward, nn.Module.train, functional.cross_entropy, torch.save, torch.load,
        torch.optim.Optimizer.zero_grad, nn.Module.load_state_dict, torch.utils.checkpoint.CheckpointFunction,
        len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks),
        len(optimizers._global_optimizer_pre_hooks),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "accumulated", "scaled", "autocast", "compiled"])
def test_the_training_is_bit_identical(kind, tmp_path):
    alone, _, after = trained(tmp_path, watches=False, kind=kind)
    found, watched, after_watch = trained(tmp_path, kind=kind)
    assert watched.contracts["gradients_cleared"].status is (Status.NOT_TESTED if kind == "compiled" else Status.PASSED)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), found.parameters(), strict=True))
    assert torch.equal(after, after_watch)


def test_a_sound_training_raises_no_alarm_and_nothing_remains(tmp_path):
    before = parts_of_torch()
    _, watched, _ = trained(tmp_path, n=N_UPDATES, budget=None)
    assert watched.contracts is None  # the next pass of the training begins the experiments
    assert parts_of_torch() == before
    _, watched, _ = trained(tmp_path, budget=None, overwrite=True)
    assert parts_of_torch() == before
    report = watched.contracts
    assert (report.failed, watched.alarms.raised, report.n_updates) == ([], [], N_UPDATES)
    assert {report[id].status for id in ("causal", "labels_aligned", "eval_deterministic")} == {Status.PASSED}
    assert report["rate_in_range"].status is Status.NOT_TESTED
    assert "workbench check" in report["rate_in_range"].evidence


def test_experiments_after_different_updates_do_not_share_outputs(tmp_path):
    """Outputs move by more than rounding from the update after which one contract is tested to that of the next."""

    class Packed(nn.Module):
        """Model of single tokens, whose documents do not see each other."""

        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(N_TOKENS, WIDTH), nn.Linear(WIDTH, N_TOKENS)

        def forward(self, tokens, position_ids):
            return self.head(self.embed(tokens))

    model, positions = Packed(), torch.arange(LENGTH).remainder(LENGTH // 2).expand(4, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", every=None, shows=False, budget=None) as watched:
        for _ in range(N_LATE):
            tokens = torch.randint(0, N_TOKENS, (4, LENGTH))
            logits = model(tokens, position_ids=positions)[:, :-1]
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = watched.contracts
    assert {report[id].status for id in ("causal", "examples_independent")} == {Status.PASSED}
    assert [each.id for each in report.failed] == ["order_matters"]  # which is so in this model


def test_hooks_are_removed_while_the_training_goes_on(tmp_path):
    before, seen = parts_of_torch(), []
    model = Model()
    model.register_forward_hook(lambda *_: seen.append(parts_of_torch() == before))
    trained(tmp_path, n=N_UPDATES + 2, model=model)
    assert seen[: N_UPDATES + 1] == [False] * N_UPDATES + [True]


def test_a_broken_contract_is_an_alarm_of_the_run(tmp_path):
    raised = []
    _, watched, _ = trained(tmp_path, is_causal=False, on_alarm=raised.append)
    (alarm,) = watched.alarms.raised
    assert raised == [alarm]
    assert alarm.signal == "contract causal"
    assert N_UPDATES <= alarm.step < N_LATE
    assert "Where: mix." in alarm.message
    assert "To mend it: " in alarm.message
    assert watched.status.verdict == f"ALARM at step {alarm.step} (contract causal)"
    run = wb.open_run(tmp_path / "a.zarr")
    assert [(each.signal, each.message) for each in wb.alarms.recorded_alarms(run)] == [(alarm.signal, alarm.message)]
    assert [(each.signal, each.step) for each in wb.alarms.replay(run, wb.Alarms())] == [(alarm.signal, alarm.step)]


def test_the_results_are_stored_with_the_run(tmp_path):
    _, watched, _ = trained(tmp_path, clears=False)
    stored = contracts_of(wb.open_run(tmp_path / "a.zarr"))
    assert isinstance(stored, CheckReport)
    assert [each.as_json() for each in stored.checks] == [each.as_json() for each in watched.contracts.checks]
    assert [each.id for each in stored.failed] == ["gradients_cleared"]


def test_another_model_in_the_same_process_is_not_judged(tmp_path):
    other = Model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def train_other(*_):
        torch.autograd.backward(loss_of(other, torch.randint(0, N_TOKENS, (6, LENGTH))))  # never cleared
        optimizer.step()

    model = Model()
    model.head.register_forward_pre_hook(train_other)
    _, watched, _ = trained(tmp_path, model=model)
    assert watched.alarms.raised == []
    assert {each.status for each in watched.contracts.checks} == {Status.NOT_TESTED}
    assert "Another model" in watched.contracts["causal"].evidence


def test_a_failure_of_the_observation_does_not_reach_the_training(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no norms")

    alone, _, _ = trained(tmp_path, watches=False)
    before = parts_of_torch()
    monkeypatch.setattr(Observer, "_norms", fail)
    found, watched, _ = trained(tmp_path)
    assert parts_of_torch() == before
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), found.parameters(), strict=True))
    assert "RuntimeError: no norms" in watched.contracts["causal"].evidence


def test_an_exception_of_the_training_passes(tmp_path):
    model, before = Model(), parts_of_torch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match="does not require grad"),
        wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False),
    ):
        loss_of(model, torch.zeros(2, LENGTH, dtype=torch.long)).detach().backward()
    assert parts_of_torch() == before


def test_a_training_that_is_observed_already_is_not_observed_twice(tmp_path):
    with Observer(100):
        _, watched, _ = trained(tmp_path)
    assert watched.contracts is None


def test_a_resumed_run_is_tested_again(tmp_path):
    trained(tmp_path)
    _, watched, _ = trained(tmp_path, clears=False, resume=True)
    assert [alarm.signal for alarm in watched.alarms.raised] == ["contract gradients_cleared"]
    assert watched.alarms.raised[0].step >= N_LATE


def test_only_a_watch_tests_contracts(tmp_path, monkeypatch):
    monkeypatch.setattr(WatchedContracts, "__init__", lambda *_: pytest.fail("a recorder tests none"))
    model = Model()
    with wb.Recorder(tmp_path / "a.zarr").attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass
