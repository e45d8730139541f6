"""A recorder that hears alarms, in a loop of one's own."""

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from workbench.callbacks.alarms import (
    WATCHED,
    Alarms,
    Attributor,
    Calibration,
    DetectorOptions,
    recorded_alarms,
    replay,
)
from workbench.callbacks.responding import Response, ResponseState
from workbench.training.callback import TrainingRun

pytestmark = pytest.mark.medium

OPTIONS = DetectorOptions(settle=4, start=8, smooth=4, smooth_attention=4, lag=4, past=20)
EVERY = {"attention": None, "optimizer": 2, "router": None, "activations": None}


def alarms_on(signal, **options):
    scale = {w.name: {"level": 0.7, "change": 0.7} for w in WATCHED if w.name == signal}
    calibration = Calibration(OPTIONS, scale, {"mechanism": (0.5, 1.0), "outcome": (0.5, 1.0)})
    attributor = Attributor(("other", "large_rate"), (), np.zeros((2, 0)), np.array([0.0, 9.0]))
    return Alarms(budget=0.4, calibration=calibration, attributor=attributor, **options)


def loop(recorder, n_steps, *, model, optimizer, task, start=0, rate_from=20):
    """Training as anyone writes it; the rate is ten times too high from a step on."""
    batches = task.stream(start)
    with recorder.attach(model, optimizer, step=start or None):
        for step in range(start, n_steps):
            optimizer.param_groups[0]["lr"] = 1e-2 if step >= rate_from else 1e-3
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


def test_alarms_are_heard_told_and_written(parts, tmp_path):
    heard = []
    alarms = alarms_on("update_ratio", on_alarm=heard.append)
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=alarms), 40, **parts)
    assert [alarm.signal for alarm in heard] == ["learning_rate", "update_ratio"]
    assert heard[0].step == 20 <= heard[1].step <= 24
    assert heard == alarms.raised
    run = wb.open_run(tmp_path / "a.zarr")
    kept = [(alarm.step, alarm.layer, alarm.message) for alarm in recorded_alarms(run)]
    assert kept == [(alarm.step, alarm.layer, alarm.message) for alarm in heard]
    events = run["events"].to_dataset()
    assert events["source"].values[events["kind"].values == "attribution"].tolist() == ["large_rate"]


def test_a_resumed_recorder_has_learned_what_was_healthy(parts, tmp_path):
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=alarms_on("update_ratio")), 18, **parts)
    again = alarms_on("update_ratio")
    loop(wb.Recorder(tmp_path / "a.zarr", every=EVERY, alarms=again, resume=True), 40, start=18, **parts)
    assert [alarm.signal for alarm in again.raised] == ["update_ratio"]  # two steps are no schedule yet
    assert 20 <= again.raised[0].step <= 24


def test_alarms_of_one_run_know_nothing_of_the_run_before(parts):
    heard = []
    alarms = alarms_on("update_ratio", on_alarm=lambda alarm: heard.append((alarm.step, alarm.score)))
    for _ in range(2):
        model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
        anew = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "task": parts["task"]}
        loop(wb.Recorder(every=EVERY, alarms=alarms), 40, **anew)
        assert len(alarms.raised) == 2
    assert heard[2:] == heard[:2] != []


def test_alarms_of_a_run_that_goes_back_forget_what_they_saw_after_it(parts, tmp_path):
    alarms, path = alarms_on("update_ratio"), tmp_path / "a.zarr"
    recorder = wb.Recorder(path, every=EVERY, alarms=alarms)
    loop(recorder, 40, **parts)
    assert len(alarms.raised) == 2
    loop(recorder, 18, start=12, rate_from=99, **parts)
    assert alarms.raised == []
    assert wb.open_run(path)["monitors"]["step"].values.tolist() == list(range(18))


def test_replaying_rests_where_the_run_acted(parts):
    """After an action the alarms of a resumed run are those of the run that went on."""
    live, heard = alarms_on("update_ratio"), []
    recorder = wb.Recorder(every=EVERY)
    recorder.observe(lambda o: heard.append(o) if o.part != "settings" else None)
    loop(recorder, 40, **parts, rate_from=25)
    for observation in heard:
        if observation.part == "optimizer" and observation.step == 21:
            live.rest(22, n_steps=12)
        live.observe(observation)
    rows = {part: [o for o in heard if o.part == part] for part in ("monitors", "optimizer")}
    tree = {"/events": xr.Dataset({"kind": ("event", ["action"]), "step": ("event", [22])})}
    for part, found in rows.items():
        dims = {name: ("layer",) * np.ndim(v) for name, v in found[0].values.items() if np.ndim(v) < 2}
        values = {name: (("step", *of), np.stack([o.values[name] for o in found])) for name, of in dims.items()}
        tree[f"/{part}"] = xr.Dataset(values, {"step": [o.step for o in found]})
    again, without = alarms_on("update_ratio"), alarms_on("update_ratio")
    steps = [alarm.step for alarm in replay(xr.DataTree.from_dict(tree), again, rest=12)]
    assert steps == [alarm.step for alarm in live.raised] != []
    assert steps[0] >= 34 > replay(xr.DataTree.from_dict(tree), without)[0].step


def test_an_alarm_that_waits_for_more_evidence_waits_on_after_resuming(parts):
    alarms = alarms_on("update_ratio")
    actions = wb.Actions(policy={}, otherwise=("stop",), wait=10)
    alarm = wb.alarms.Alarm(100, "update_ratio", 0, -1, 1.5, 2.0, is_outcome=False, message="It rises.")
    for is_resumed in (False, True):
        run = TrainingRun(parts["model"], parts["optimizer"], lambda event: None)
        response = Response(alarms, actions, None, ResponseState())
        if is_resumed:
            response.recall([alarm])
        else:
            assert response.answer([alarm], run, 101) == []
        assert response.answer([], run, 110) == []
        assert [action.kind for action in response.answer([], run, 111)] == ["stop"]
        assert run.stop_reason


def test_what_the_callback_raises_goes_through(parts):
    def stop(alarm):
        raise KeyboardInterrupt(alarm.signal)

    recorder = wb.Recorder(every=EVERY, alarms=alarms_on("update_ratio", on_alarm=stop))
    with pytest.raises(KeyboardInterrupt, match="learning_rate"):
        loop(recorder, 40, **parts)
    assert not parts["optimizer"]._optimizer_step_post_hooks


def test_train_hears_the_alarms_of_its_recorder_once(parts):
    alarms = alarms_on("update_ratio")
    recorder = wb.Recorder(every=EVERY, alarms=alarms)
    fault = wb.faults.large_rate(factor=10.0, start=20)
    settings = {"n_steps": 30, "learning_rate": 1e-3, "faults": [fault]}
    records = list(wb.train(parts["model"], parts["task"], recorder=recorder, **settings))
    assert [alarm for record in records for alarm in record.alarms] == alarms.raised
    assert [alarm.signal for alarm in alarms.raised] == ["learning_rate", "update_ratio"]
    with pytest.raises(wb.errors.OptionError, match="The recorder has alarms already"):
        wb.train(parts["model"], parts["task"], recorder=recorder, alarms=alarms_on("loss"), **settings)
