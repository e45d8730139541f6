"""Recorder, alarms and actions inside train()."""

import math

import pytest
import torch

import workbench as wb
from tests.callbacks.certain_alarms import certain_alarms
from workbench.callbacks.actions import Actions
from workbench.callbacks.alarms import recorded_alarms
from workbench.callbacks.alarms.replaying import replay

pytestmark = pytest.mark.medium

SETTINGS = {"n_steps": 40, "learning_rate": 1e-3, "warmup": 2, "seed": 0}


def model_and_task(**options):
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0, **options)
    return model, wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)


def recorder():
    return wb.Recorder(every={"attention": 10, "optimizer": 2, "router": None, "activations": None}, n_probe_tokens=32)


def run(store=None, *, n_steps=40, model=None, task=None, faults=None, **options):
    """A run whose rate is ten times too high from step 20 on; all records."""
    if model is None:
        model, task = model_and_task()
    faults = [wb.faults.large_rate(factor=10.0, start=20)] if faults is None else faults
    places = {} if store is None else {"store": store}
    return list(wb.train(model, task, faults=faults, **{**SETTINGS, "n_steps": n_steps}, **places, **options)), model


def test_a_recorder_puts_its_parts_into_the_runs_own_store(tmp_path):
    run(tmp_path / "a.zarr", recorder=recorder(), faults=[])
    found = wb.open_run(tmp_path / "a.zarr")
    assert found["monitors"].sizes["step"] == 40
    assert found["attention"]["step"].values.tolist() == [9, 19, 29, 39]
    assert found["optimizer"].sizes["step"] == 20
    assert (found["monitors"]["batch_size"] == 8).all()
    assert (found["monitors"]["n_tokens"] == 64).all()
    assert found.attrs["state"] == "finished"
    assert found["events"]["kind"].values.tolist() == ["finished"]


def test_recording_and_listening_leave_the_training_the_same_to_the_bit():
    alone, plain_model = run()
    watched, model = run(recorder=recorder(), alarms=certain_alarms())
    assert [record.loss for record in alone] == [record.loss for record in watched]
    assert [record.grad_norm for record in alone] == [record.grad_norm for record in watched]
    for before, after in zip(plain_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_alarms_are_in_the_records_and_the_events_and_in_a_replay(tmp_path):
    records, _ = run(tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms())
    raised = [alarm for record in records for alarm in record.alarms]
    assert [(alarm.signal, alarm.step) for alarm in raised] == [("learning_rate", 20)]
    found = wb.open_run(tmp_path / "a.zarr")
    kept = [(alarm.step, alarm.signal, alarm.layer, alarm.message) for alarm in recorded_alarms(found)]
    assert kept == [(alarm.step, alarm.signal, alarm.layer, alarm.message) for alarm in raised]
    assert replay(found, certain_alarms()) == raised
    events = found["events"].to_dataset()
    why = events["message"].values[events["kind"].values == "attribution"]
    because = "The learning rate rose from 0.001 to 0.01 at step 20; the plan says 0.001"
    assert why.tolist() == [f"This looks like large rate (100%): {because}."]


def test_nothing_is_done_unless_it_is_asked_for():
    records, _ = run(recorder=recorder(), alarms=certain_alarms())
    assert records[-1].learning_rate == pytest.approx(1e-2)
    assert records[-1].step == 39


def test_an_alarm_cuts_the_rate_and_goes_back_to_the_weights_before_it(tmp_path):
    actions = Actions(rest=10)
    run(
        tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms(), actions=actions, checkpoint_every=5,
        n_steps=24,
    )  # fmt: skip
    rolled, cut = actions.done
    assert (rolled.kind, cut.kind) == ("roll_back", "cut_rate")
    assert "those of step 20 again" in rolled.message or "those of step 15 again" in rolled.message
    assert cut.message == "The learning rate is 0.1 of the plan from here on."
    found = wb.open_run(tmp_path / "a.zarr")
    events = found["events"].to_dataset()
    assert events["source"].values[events["kind"].values == "action"].tolist() == ["roll_back", "cut_rate"]
    assert found["monitors"]["step"].values.tolist() == list(range(24))  # steps count on
    assert float(found["monitors"]["learning_rate"][-1]) == pytest.approx(1e-3)


def test_weights_after_a_roll_back_are_those_of_the_checkpoint(tmp_path):
    stopped = Actions(policy={"large_rate": ("roll_back", "stop")})
    records, model = run(
        tmp_path / "a.zarr", recorder=recorder(), alarms=certain_alarms(), actions=stopped, checkpoint_every=5
    )
    assert records[-1].step < 39
    step = int(stopped.done[0].message.split("those of step ")[1].split()[0])
    again, _ = model_and_task()
    from workbench.models.run_checkpoints import load_weights

    load_weights(again, tmp_path / "a.checkpoints" / f"step-{step:08d}")
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    found = wb.open_run(tmp_path / "a.zarr")
    assert found.attrs["state"] == "stopped"
    assert found["events"]["message"].values[-1] == f"Stopped after {records[-1].step + 1} steps, by an alarm."


def test_kss_is_switched_on_and_then_made_stronger():
    kss = wb.KSS(strength=0.1, interval=2, enabled=False, layers="all")
    actions = Actions(policy={"large_rate": ("kss",)}, otherwise=(), kss=kss, rest=0)
    run(recorder=recorder(), alarms=certain_alarms(), actions=actions, kss=kss)
    assert kss.enabled
    assert actions.done[0].message == "KSS is on, strength 0.1."
    assert kss.strength == pytest.approx(0.1 * 2 ** (len(actions.done) - 1))


def test_the_auxiliary_loss_is_put_back():
    model = wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, n_experts=4, seed=0)
    _, task = model_and_task()
    lost = wb.faults.no_auxiliary_loss(start=20)
    rate = wb.faults.large_rate(factor=10.0, start=20)
    actions = Actions(policy={"no_auxiliary_loss": ("auxiliary_loss",)}, otherwise=())
    alarms = certain_alarms("no_auxiliary_loss")
    records, _ = run(model=model, task=task, recorder=recorder(), alarms=alarms, actions=actions, faults=[lost, rate])
    assert not lost.enabled
    assert actions.done[0].message == "The auxiliary loss is on again."
    at = actions.done[0].step
    assert all((record.auxiliary_loss == 0) == (20 <= record.step < at) for record in records)


def test_skipped_batches_are_not_met_again(tmp_path):
    seen = []
    model, task = model_and_task()

    class Listening:
        def stream(self, start=0):
            for index, batch in enumerate(task.stream(start), start):
                seen.append(index)
                yield batch

        def probe(self, n_tokens):
            return task.probe(n_tokens)

        def describe(self):
            return task.describe()

    actions = Actions(skip=7, n_most=1)
    run(
        tmp_path / "a.zarr", model=model, task=Listening(), recorder=recorder(), alarms=certain_alarms(),
        actions=actions, checkpoint_every=5,
    )  # fmt: skip
    assert "7 batches are skipped" in actions.done[0].message
    assert seen == list(range(47))  # they were drawn, and left


def test_the_users_own_function_decides(tmp_path):
    asked = []

    def decide(request):
        asked.append(request)
        return ("stop",) if len(asked) == 2 else ()

    actions = Actions(call=decide, rest=0, otherwise=("cut_rate",), policy={})
    run(recorder=recorder(), alarms=certain_alarms(), actions=actions)
    assert asked[0].kinds == ("cut_rate",)
    assert asked[0].attribution.cause == "large_rate"
    assert asked[0].onset <= asked[0].alarm.step
    assert [action.kind for action in actions.done] in (["stop"], [])


def test_a_resumed_run_knows_what_was_done(tmp_path):
    def go(n_steps, model, **options):
        return run(
            tmp_path / "a.zarr", model=model, task=model_and_task()[1], recorder=recorder(),
            alarms=certain_alarms(), actions=Actions(policy={"large_rate": ("cut_rate",)}, otherwise=()),
            checkpoint_every=10, n_steps=n_steps, **options,
        )[0]  # fmt: skip

    go(30, model_and_task()[0])
    records = go(40, model_and_task()[0], resume=True)
    assert records[0].step == 30
    assert records[0].learning_rate == pytest.approx(1e-3)
    assert math.isfinite(records[-1].loss)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alarms": True}, "alarms= listen to a recorder"),
        ({"recorder": True, "actions": True}, "actions= need alarms to act on"),
        ({"recorder": True, "alarms": True, "actions": True}, "Rolling back needs checkpoints"),
    ],
)
def test_what_belongs_together_is_asked_for(options, sentence):
    given = {"alarms": certain_alarms, "recorder": recorder, "actions": Actions}
    model, task = model_and_task()
    with pytest.raises(wb.errors.OptionError, match=sentence):
        wb.train(model, task, n_steps=2, **{name: given[name]() for name in options})


def test_two_that_would_write_spectra_are_refused():
    model, task = model_and_task()
    with pytest.raises(wb.errors.OptionError, match="Both spectra_every= and the recorder would write"):
        wb.train(model, task, n_steps=2, spectra_every=1, recorder=wb.Recorder(every={"spectra": 1}))


def test_a_recorder_with_a_store_of_its_own_is_refused(tmp_path):
    model, task = model_and_task()
    with pytest.raises(wb.errors.OptionError, match="writes into the run's own store"):
        wb.train(model, task, n_steps=2, recorder=wb.Recorder(tmp_path / "b.zarr"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": {"large_rate": ("pray",)}}, "There is no action 'pray'"),
        ({"otherwise": "restart"}, "There is no action 'restart'"),
        ({"cut_rate": 2.0}, "cut_rate is 2.0"),
        ({"lowest_rate": 0.0}, "lowest_rate is 0.0"),
        ({"kss_factor": 1.0}, "kss_factor is 1.0"),
        ({"n_most": 0}, "n_most is 0"),
        ({"otherwise": ("kss",)}, "needs to know which KSS"),
    ],
)
def test_impossible_actions_are_refused(options, sentence):
    with pytest.raises(wb.errors.OptionError, match=sentence):
        Actions(**options)
