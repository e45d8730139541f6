"""A recorder with alarms in a custom training loop."""

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.about import says
from tests.callbacks.certain_alarms import certain_alarms
from workbench.callbacks.alarms import recorded_alarms
from workbench.callbacks.alarms.replaying import REST, replay

pytestmark = pytest.mark.medium

EVERY = {"attention": None, "optimizer": 2, "router": None, "activations": None}


def loop(recorder, n_steps, *, model, optimizer, task, start=0, rate_from=20, broken_at=None):
    """Train in a custom loop; from a step on the learning rate is ten times too high, or at a step the weights are."""
    batches = task.stream(start)
    with recorder.attach(model, optimizer, step=start or None):
        for step in range(start, n_steps):
            optimizer.param_groups[0]["lr"] = 1e-2 if step >= rate_from else 1e-3
            if step == broken_at:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(10)
            inputs, targets = next(batches)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            recorder.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def parts():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "optimizer": optimizer,
        "task": wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8),
    }


def test_alarms_are_raised_passed_on_and_written(parts, tmp_path):
    heard = []
    alarms = certain_alarms(on_alarm=heard.append)
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=alarms), 40, **parts)
    assert [(alarm.signal, alarm.step) for alarm in heard] == [("learning_rate", 20)]
    assert heard == alarms.raised
    run = wb.open_run(tmp_path / "a.zarr")
    kept = [(alarm.step, alarm.layer, alarm.message) for alarm in recorded_alarms(run)]
    assert kept == [(alarm.step, alarm.layer, alarm.message) for alarm in heard]
    events = run["events"].to_dataset()
    assert events["source"].values[events["kind"].values == "attribution"].tolist() == ["large_rate"]


@pytest.fixture
def _evaluated_early(monkeypatch):
    monkeypatch.setattr("workbench.callbacks.alarms.run_evidence._FIRST_EVALUATED", 20)


@pytest.mark.usefixtures("_evaluated_early")
def test_a_resumed_recorder_knows_the_past_of_the_run(parts, tmp_path):
    options = {"rate_from": 999, "broken_at": 40}
    whole = certain_alarms()
    loop(wb.Recorder(tmp_path / "whole.zarr", every=EVERY, alarms=whole), 44, **parts, **options)
    assert 40 in {alarm.step for alarm in whole.raised}
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    anew = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "task": parts["task"]}
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=certain_alarms()), 33, **anew, **options)
    again = certain_alarms()
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=again, resume=True), 44, start=33, **anew, **options)
    assert again.raised == whole.raised


def test_alarms_forget_the_previous_run(parts):
    heard = []
    alarms = certain_alarms(on_alarm=lambda alarm: heard.append((alarm.step, alarm.score)))
    for _ in range(2):
        model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
        anew = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "task": parts["task"]}
        loop(wb.Recorder(every=EVERY, alarms=alarms), 40, **anew)
        assert len(alarms.raised) == 1
    assert heard[1:] == heard[:1] != []


def test_alarms_of_a_run_that_rolls_back_forget_later_steps(parts, tmp_path):
    alarms, path = certain_alarms(), tmp_path / "a.zarr"
    recorder = wb.Recorder(path, every=EVERY, alarms=alarms)
    loop(recorder, 40, **parts)
    assert len(alarms.raised) == 1
    loop(recorder, 18, start=12, rate_from=99, **parts)
    assert alarms.raised == []
    assert wb.open_run(path)["monitors"]["step"].values.tolist() == list(range(18))


@pytest.mark.usefixtures("_evaluated_early")
def test_a_replay_rests_after_actions_of_the_run(parts):
    """After an action, the alarms of a resumed run are those of an uninterrupted run."""
    live, heard = certain_alarms(), []
    recorder = wb.Recorder(every=EVERY)
    recorder.observe(lambda o: heard.append(o) if o.part in ("monitors", "optimizer") else None)
    loop(recorder, 70, **parts, rate_from=999, broken_at=40)
    for observation in heard:
        if observation.part == "optimizer" and observation.step == 39:
            live.rest(40, n_steps=REST)
        live.observe(observation)
    rows = {part: [o for o in heard if o.part == part] for part in ("monitors", "optimizer")}
    event = {"kind": "action", "source": "stop", "step": 40, "score": 0.0, "message": ""}
    tree = {"/events": xr.Dataset({name: ("event", [value]) for name, value in event.items()})}
    for part, found in rows.items():
        dims = {name: ("layer",) * np.ndim(v) for name, v in found[0].values.items() if np.ndim(v) < 2}
        values = {name: (("step", *of), np.stack([o.values[name] for o in found])) for name, of in dims.items()}
        tree[f"/{part}"] = xr.Dataset(values, {"step": [o.step for o in found]})
    again = certain_alarms()
    replay(xr.DataTree.from_dict(tree), again)
    assert again.raised == live.raised
    assert all(alarm.step >= 40 + REST for alarm in again.raised)
    tree["/events"]["kind"][:] = "fault"
    assert replay(xr.DataTree.from_dict(tree), certain_alarms())[0].step == 40


def test_exceptions_of_on_alarm_are_passed_on(parts):
    def stop(alarm):
        raise KeyboardInterrupt(alarm.signal)

    recorder = wb.Recorder(every=EVERY, alarms=certain_alarms(on_alarm=stop))
    with pytest.raises(KeyboardInterrupt, match="learning_rate"):
        loop(recorder, 40, **parts)
    assert not parts["optimizer"]._optimizer_step_post_hooks


def test_train_receives_the_alarms_of_its_recorder_once(parts):
    alarms = certain_alarms()
    recorder = wb.Recorder(every=EVERY, alarms=alarms)
    fault = wb.faults.large_rate(factor=10.0, start=20)
    settings = {"n_steps": 30, "learning_rate": 1e-3, "faults": [fault]}
    records = list(wb.train(parts["model"], parts["task"], recorder=recorder, **settings))
    assert [alarm for record in records for alarm in record.alarms] == alarms.raised
    assert [alarm.signal for alarm in alarms.raised] == ["learning_rate"]
    with pytest.raises(wb.errors.OptionError, check=says("alarms was passed, but the recorder has alarms already;")):
        wb.train(parts["model"], parts["task"], recorder=recorder, alarms=certain_alarms(), **settings)
