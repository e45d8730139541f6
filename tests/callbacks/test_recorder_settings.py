"""Settings that change in a recorded run: immediate alarms, plans that raise none, and replays."""

import math

import pytest
import torch

import workbench as wb
from workbench.callbacks.alarms import replay
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.settings import SettingsWatch

pytestmark = pytest.mark.medium

TASK = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)


def moe():
    return wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, n_experts=2, vocab_size=16, max_length=8, seed=0)


def trained(alarms, *, faults=(), store=None, n_steps=30, **options):
    recorder = wb.Recorder(every=None)
    run = wb.train(
        moe(), TASK, n_steps=n_steps, learning_rate=1e-3, recorder=recorder, alarms=alarms, faults=faults, store=store,
        **options,
    )  # fmt: skip
    return list(run)


FAULTS = {
    "learning_rate": (wb.faults.large_rate(factor=10.0, start=20, stop=26), 20, "large_rate"),
    "batch_size": (wb.faults.small_batch(n_rows=2, start=22), 23, "small_batch"),
    "auxiliary_loss": (wb.faults.no_auxiliary_loss(start=20), 20, "no_auxiliary_loss"),
}


@pytest.mark.parametrize("setting", FAULTS)
def test_a_changed_setting_raises_an_alarm_immediately(setting, tmp_path):
    fault, step, cause = FAULTS[setting]
    alarms = wb.Alarms()
    records = trained(alarms, faults=[fault], store=tmp_path / "run.zarr")
    first = alarms.raised[0]
    assert (first.signal, first.step) == (setting, step)
    assert records[step].alarms[0] == first
    found = wb.open_run(tmp_path / "run.zarr")
    again = wb.Alarms()
    assert replay(found, again) == alarms.raised
    events = found["events"].to_dataset()
    named = events["source"].values[events["kind"].values == "attribution"].tolist()
    assert named[0] == cause
    if setting == "learning_rate":  # the fault ends, which raises no alarm
        assert [alarm.signal for alarm in alarms.raised].count(setting) == 1
        ends = events["score"].values[events["kind"].values == "setting"].tolist()
        assert ends == [pytest.approx(10.0), 1.0]
    else:
        assert alarms.attribute().cause == cause == again.attribute().cause


def restarts(step):
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step % 10) / 10)) / 2


@pytest.mark.parametrize("schedule", ["cosine", restarts])
def test_a_plan_with_a_second_rise_raises_no_alarm(schedule, tmp_path):
    alarms = wb.Alarms()
    trained(alarms, schedule=schedule, warmup=5, store=tmp_path / "run.zarr")
    assert alarms.raised == []
    kinds = wb.open_run(tmp_path / "run.zarr")["events"]["kind"].values.tolist()
    assert "setting" not in kinds


def test_a_run_resumed_in_the_middle_of_a_fault_reports_it_once(tmp_path):
    store = tmp_path / "run.zarr"
    fault = wb.faults.large_rate(factor=10.0, start=12)
    options = {"faults": [fault], "checkpoint_every": 5}
    run = wb.train(
        moe(), TASK, n_steps=30, learning_rate=1e-3, recorder=wb.Recorder(every=None), alarms=wb.Alarms(), store=store,
        **options,
    )  # fmt: skip
    for record in run:
        if record.step == 18:
            run.close()
            break
    alarms = wb.Alarms()
    list(
        wb.train(
            moe(), TASK, n_steps=30, learning_rate=1e-3, recorder=wb.Recorder(every=None), alarms=alarms, store=store,
            resume=True, **options,
        )
    )  # fmt: skip
    assert [alarm.step for alarm in alarms.raised if alarm.signal == "learning_rate"] == [12]
    events = wb.open_run(store)["events"].to_dataset()
    assert events["step"].values[events["kind"].values == "setting"].tolist() == [12]


@pytest.mark.parametrize("change", ["rate", "weight decay", "frozen", "sign"])
def test_changes_of_optimizer_and_model_are_reported_in_any_loop(change):
    model = moe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alarms = wb.Alarms()
    with wb.Recorder(every=None, alarms=alarms).attach(model, optimizer):
        for step in range(30):
            if step == 20:
                if change == "rate":
                    optimizer.param_groups[0]["lr"] = 0.1
                elif change == "weight decay":
                    optimizer.param_groups[0]["weight_decay"] = 0.5
                elif change == "frozen":
                    next(model.parameters()).requires_grad_(False)
                else:
                    optimizer.param_groups[0]["maximize"] = True
            inputs, targets = TASK.batch(step)
            torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    named = {"rate": "learning_rate", "weight decay": "weight_decay", "frozen": "n_trainable", "sign": "maximize"}
    assert (alarms.raised[0].signal, alarms.raised[0].step) == (named[change], 20)
    assert "20" in alarms.raised[0].message


def test_settings_that_cannot_be_compared_do_not_stop_training(monkeypatch):
    def refuse(*args):
        raise ValueError("no such setting")

    monkeypatch.setattr("workbench.callbacks.alarms.settings_sentinel.SettingsSentinel.observe", refuse)
    with pytest.warns(UserWarning, match="The settings cannot be recorded from step .* Training continues"):
        assert len(trained(wb.Alarms(), n_steps=5)) == 5


def watched_sparsely(rate, n_steps=60, every=12):
    """Return the changes found if settings are read at some updates, and the rates of the others are noted."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate(0))
    settings = SettingsWatch(model, JointOptimizer([optimizer]), {})
    found = []
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        if step % every:
            settings.note_rates(step)
        else:
            settings.read(step, None, 1)
            found += settings.changes(step)
    return found


def test_a_change_between_two_readings_has_its_own_step():
    (found,) = watched_sparsely(lambda step: 0.3 if step >= 41 else 0.003)
    assert (found.setting, found.since, found.before, found.after) == ("learning_rate", 41, 0.003, 0.3)
    assert "at step 41" in found.sentence


@pytest.mark.parametrize(
    "schedule", [lambda step: 0.1 + math.cos(step / 40), restarts, lambda step: min(step, 20) / 20]
)
def test_a_schedule_between_readings_is_planned(schedule):
    assert watched_sparsely(schedule) == []
