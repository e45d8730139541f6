"""Recorder, alarms and actions in `workbench.train`."""

import math

import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.callbacks.certain_alarms import certain_alarms
from workbench.callbacks.alarms import recorded_alarms
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.guard import KINDS, Actions
from workbench.errors import OptionError

pytestmark = pytest.mark.medium

SETTINGS = {"n_steps": 40, "learning_rate": 1e-3, "warmup": 2, "seed": 0}


def model_and_task(**options):
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0, **options)
    return model, wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)


def recorder():
    return wb.Recorder(every={"attention": 10, "optimizer": 2, "router": None, "activations": None}, n_probe_tokens=32)


def run(store=None, *, n_steps=40, model=None, task=None, faults=None, **options):
    """Train with a learning rate that is ten times too high from step 20 on; return the records and the model."""
    if model is None:
        model, task = model_and_task()
    faults = [wb.faults.large_rate(factor=10.0, start=20)] if faults is None else faults
    places = {} if store is None else {"store": store}
    return list(wb.train(model, task, faults=faults, **{**SETTINGS, "n_steps": n_steps}, **places, **options)), model


def test_a_recorder_writes_its_parts_to_the_store_of_the_run(tmp_path):
    run(tmp_path / "a.zarr", recorder=recorder(), faults=[])
    found = wb.open_run(tmp_path / "a.zarr")
    assert found["monitors"].sizes["step"] == 40
    assert found["attention"]["step"].values.tolist() == [9, 19, 29, 39]
    assert found["optimizer"].sizes["step"] == 20
    assert (found["monitors"]["batch_size"] == 8).all()
    assert (found["monitors"]["n_tokens"] == 64).all()
    assert found.attrs["state"] == "finished"
    assert found["events"]["kind"].values.tolist() == ["finished"]


def test_alarms_in_the_records_in_the_events_and_in_a_replay(tmp_path):
    records, _ = run(tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms())
    raised = [alarm for record in records for alarm in record.alarms]
    assert [(alarm.signal, alarm.step) for alarm in raised] == [("learning_rate", 20)]
    found = wb.open_run(tmp_path / "a.zarr")
    kept = [(alarm.step, alarm.signal, alarm.layer, alarm.message) for alarm in recorded_alarms(found)]
    assert kept == [(alarm.step, alarm.signal, alarm.layer, alarm.message) for alarm in raised]
    assert replay(found, certain_alarms()) == raised
    events = found["events"].to_dataset()
    why = events["message"].values[events["kind"].values == "attribution"]
    because = "The learning rate rose from 0.001 to 0.01 at step 20; the planned value is 0.001"
    assert why.tolist() == [f"This looks like large rate: {because}."]


def test_an_alarm_restores_a_checkpoint_and_reduces_the_learning_rate(tmp_path):
    actions = Actions()
    run(
        tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms(), actions=actions, checkpoint_every=5,
        n_steps=24,
    )  # fmt: skip
    rolled_back, reduced = actions.done
    assert (rolled_back.kind, reduced.kind) == ("roll_back", "cut_rate")
    assert any(f"restored from step {step}," in rolled_back.message for step in (15, 20))
    assert reduced.message == "The learning rate was reduced to 0.1 times the planned one."
    found = wb.open_run(tmp_path / "a.zarr")
    events = found["events"].to_dataset()
    assert events["source"].values[events["kind"].values == "action"].tolist() == ["roll_back", "cut_rate"]
    assert found["monitors"]["step"].values.tolist() == list(range(24))  # the step counter continues
    assert float(found["monitors"]["learning_rate"][-1]) == pytest.approx(1e-3)


def test_parameters_after_a_roll_back_are_those_of_the_checkpoint(tmp_path):
    actions = Actions(policy={"large_rate": ("roll_back", "stop")})
    records, model = run(
        tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms(), actions=actions, checkpoint_every=5
    )
    assert records[-1].step < 39
    step = int(actions.done[0].message.split("restored from step ")[1].split(",")[0])
    expected, _ = model_and_task()
    from workbench.models.checkpoint import load_weights

    load_weights(expected, tmp_path / "a.checkpoints" / f"step-{step:08d}")
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    found = wb.open_run(tmp_path / "a.zarr")
    assert found.attrs["state"] == "stopped"
    assert found["events"]["message"].values[-1] == f"Stopped after {records[-1].step + 1} steps, by an alarm."


def test_the_auxiliary_loss_is_switched_on_again():
    model = wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, n_experts=4, seed=0)
    _, task = model_and_task()
    lost = wb.faults.no_auxiliary_loss(start=20)
    rate = wb.faults.large_rate(factor=10.0, start=20)
    actions = Actions(policy={"no_auxiliary_loss": ("auxiliary_loss",)})
    alarms = certain_alarms("no_auxiliary_loss")
    records, _ = run(model=model, task=task, recorder=recorder(), alarms=alarms, actions=actions, faults=[lost, rate])
    assert not lost.enabled
    assert actions.done[0].message == "The auxiliary loss was switched on again."
    step = actions.done[0].step
    assert all((record.auxiliary_loss == 0) == (20 <= record.step < step) for record in records)


def test_a_resumed_run_restores_the_effects_of_actions(tmp_path):
    def train(n_steps, model, **options):
        return run(
            tmp_path / "a.zarr", model=model, task=model_and_task()[1], recorder=recorder(),
            alarms=certain_alarms(), actions=Actions(policy={"large_rate": ("cut_rate",)}),
            checkpoint_every=10, n_steps=n_steps, **options,
        )[0]  # fmt: skip

    train(30, model_and_task()[0])
    records = train(40, model_and_task()[0], resume=True)
    assert records[0].step == 30
    assert records[0].learning_rate == pytest.approx(1e-3)
    assert math.isfinite(records[-1].loss)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("alarms",), "recorder"),
        (("recorder", "actions"), "alarms"),
        (("recorder", "alarms", "actions"), "checkpoint_every"),
    ],
)
def test_missing_arguments_are_named(names, missing):
    arguments = {"alarms": certain_alarms, "recorder": recorder, "actions": Actions}
    model, task = model_and_task()
    with pytest.raises(OptionError, check=about(missing)):
        wb.train(model, task, n_steps=2, **{name: arguments[name]() for name in names})


def test_two_sources_of_spectra_are_rejected():
    model, task = model_and_task()
    with pytest.raises(OptionError, check=says("The recorder has spectra too; set spectra_every=None")):
        wb.train(model, task, n_steps=2, spectra_every=1, recorder=wb.Recorder(every={"spectra": 1}))


def test_a_recorder_with_its_own_store_is_rejected(tmp_path):
    model, task = model_and_task()
    with pytest.raises(OptionError, check=says("In wb.train() the run has one store;")):
        wb.train(model, task, n_steps=2, recorder=wb.Recorder(tmp_path / "b.zarr"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": {"large_rate": ("restart",)}}, about("policy", "restart", KINDS)),
        ({"policy": {"otherwise": "restart"}}, about("policy", "restart", KINDS)),
    ],
)
def test_invalid_actions_are_rejected(options, error):
    with pytest.raises(OptionError, check=error):
        Actions(**options)
