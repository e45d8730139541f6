"""Faults in live training: switched by a click, by code and by schedule; listed alarms; cleanup."""

import gc
import weakref

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from tests.callbacks.certain_alarms import certain_alarms
from tests.waiting import wait_for
from workbench.callbacks.alarms import Alarm
from workbench.callbacks.guard import Action
from workbench.errors import OptionError
from workbench.plots.timeline_events import events_of
from workbench.plots.timeline_panels import RunEvents
from workbench.training.callback import StepRecord
from workbench.widgets import LiveTraining
from workbench.widgets.live.history import RunHistory, StepNews
from workbench.widgets.live.latest_state import AlarmList, SwitchPanel
from workbench.widgets.live.starts import WITH_FAULTS, WITHOUT_FAULTS

pytestmark = [pytest.mark.render, pytest.mark.subprocess]

SMALL = wb.zoo.ArchitectureConfig(
    family="transformer", norm="pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=12
)
TASK = wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)
N_STEPS = 24


@pytest.fixture
def make(tmp_path):
    """Widgets over a small transformer, closed after the test."""
    made = []

    def live_training(*faults, **options):
        options = {
            "learning_rate": 1e-2,
            "seed": 1,
            "n_steps": N_STEPS,
            "spectra_every": 100,
            "profile_options": {"n_snapshots": 96},
            "folder": tmp_path / "live",
            "checkpoint_every": 8,
        } | options
        made.append(LiveTraining(SMALL, TASK, faults=faults, **options))
        return made[-1]

    yield live_training
    for live in made:
        live.close()


def pause_after(live, step):
    """Pause at or after a step, and return the number of steps of the run with faults."""
    wait_for(lambda: live.canvas.histories[WITH_FAULTS].n_done > step or not live.is_running)
    live.pause()
    wait_for(lambda: live.state == "paused")
    return live.canvas.histories[WITH_FAULTS].n_done


def losses(live, name):
    return live.runs[name]["monitors"]["loss"].values


def fault_events(live, name):
    events = live.runs[name]["events"].to_dataset()
    events = events.isel(event=events["kind"].values == "fault")
    return list(zip(events["step"].values.tolist(), events["source"].values.tolist(), strict=True))


@pytest.mark.slow
def test_with_every_fault_off_both_runs_are_bitwise_identical_and_kss_is_off(make):
    live = make(wb.faults.low_precision_attention(), wb.faults.large_rate(factor=3))
    assert not live.kss.enabled
    live.start()
    live.wait(300)
    assert live.error == ""
    assert list(live.runs) == [WITH_FAULTS, WITHOUT_FAULTS]
    assert (losses(live, WITH_FAULTS) == losses(live, WITHOUT_FAULTS)).all()
    assert fault_events(live, WITH_FAULTS) == []
    assert not live.canvas.histories[WITH_FAULTS].fault_spans()


@pytest.mark.slow
def test_a_click_switches_the_fault_from_the_next_step_on_in_one_run_alone(make):
    fault = wb.faults.large_rate(factor=3)
    live = make(fault, n_steps=400)
    panel = live._panel
    live.start()
    first = pause_after(live, 5)
    panel._receive(panel, {"faults": {"large_rate": True}}, [])
    live.resume()
    second = pause_after(live, first + 4)
    live.faults[0].enabled = False
    live.resume()
    last = pause_after(live, second + 4)
    live.stop()
    live.wait(300)
    assert live.error == ""
    assert fault_events(live, WITH_FAULTS) == [(first, "large_rate"), (second, "large_rate")]
    assert fault_events(live, WITHOUT_FAULTS) == []
    n = last - 1  # the other run certainly has as many
    rates = [live.runs[name]["monitors"]["learning_rate"].values[:n] for name in live.runs]
    is_on = (np.arange(n) >= first) & (np.arange(n) < second)
    np.testing.assert_allclose(rates[0] / rates[1], np.where(is_on, 3, 1), rtol=1e-12)
    one, other = losses(live, WITH_FAULTS), losses(live, WITHOUT_FAULTS)
    assert (one[: first + 1] == other[: first + 1]).all()
    assert (one[first + 1 : n] != other[first + 1 : n]).all()
    run, control = live.canvas.state()[0]["runs"]
    assert (run["fault_spans"], control["fault_spans"]) == ([(first, second)], [])


@pytest.mark.slow
def test_a_schedule_that_acts_in_the_process_is_seen_on_the_page(make):
    fault = wb.faults.large_rate(factor=3, start=4, stop=400)
    live = make(fault, n_steps=500)
    live.start()
    pause_after(live, 6)
    assert fault.enabled
    assert live._panel.state()[0]["faults"][0]["enabled"]
    assert live._pair.note == "large rate on"
    live.stop()
    live.wait(300)
    assert fault_events(live, WITH_FAULTS) == [(4, "large_rate")]
    assert fault.state_dict() == {"by_hand": None}  # another start follows the schedule again


def test_the_panel_says_what_each_fault_does_and_follows_code_and_schedule():
    attention, rate = wb.faults.low_precision_attention(n_bits=8), wb.faults.large_rate(start=5, stop=7)
    panel = SwitchPanel(wb.KSS(), [attention, rate], lambda callback: callback)
    sent = []
    panel.send = lambda content, buffers=None: sent.append(content["faults"])
    panel._receive(panel, {"painted": 0}, [])
    assert sent == [
        [
            {
                "name": "low_precision_attention",
                "effect": "8 bits of O and dO are cut in the backward pass",
                "enabled": False,
            },
            {"name": "large_rate", "effect": "the learning rate is multiplied by 10", "enabled": False},
        ]
    ]
    attention.enabled = True
    panel._receive(panel, {"painted": 1}, [])
    for step in (4, 5, 6, 7):
        rate.begin_step(step)
        panel._receive(panel, {"painted": panel.n_sent}, [])
    assert [[fault["enabled"] for fault in faults] for faults in sent] == [
        [False, False], [True, False], [True, True], [True, False],
    ]  # fmt: skip
    panel.close()
    attention.enabled = False
    assert len(sent) == 4
    assert (attention._observers._functions, rate._observers._functions) == ([], [])


def test_notes_next_to_the_figure_name_what_is_switched_on(make):
    live = make(wb.faults.low_precision_attention(), wb.faults.large_rate(factor=3))
    assert live._pair.note == "no fault on"
    live.faults[1].enabled = live.kss.enabled = True
    assert live._pair.note == "KSS on · large rate on"
    assert live.setup.compare.options[0] == ("control, without faults", "without faults")


@pytest.mark.slow
def test_alarms_are_told_in_words_with_what_they_point_to_and_what_was_done(make):
    fault = wb.faults.large_rate(factor=20, start=12)
    actions = wb.Actions(policy={"otherwise": ("cut_rate",)})
    recorder = wb.Recorder(every={"optimizer": 2})  # without warm-up, during which alarms are not evaluated
    live = make(fault, recorder=recorder, alarms=certain_alarms(), actions=actions, warmup=0)
    live.start()
    live.wait(300)
    assert live.error == ""
    *_, cause, alarm = [
        line for line in live.alarm_list.lines if line["run"] == WITH_FAULTS and line["kind"] != "action"
    ]
    assert (alarm["kind"], alarm["step"]) == ("alarm", 12)
    assert alarm["text"] == "The learning rate rose from 0.01 to 0.2 at step 12; the planned value is 0.01."
    assert cause["text"].startswith("This looks like large rate: ")
    (acted, *_) = [line for line in live.alarm_list.lines if line["kind"] == "action"]
    assert acted["text"] == "The learning rate was reduced to 0.1 times the planned one."
    assert all(line["run"] == WITH_FAULTS for line in live.alarm_list.lines if line["kind"] == "action")
    assert {line["run"] for line in live.alarm_list.first} == {WITH_FAULTS}
    assert [action.message for action in live._pair.actions.done] == [
        "The learning rate was reduced to 0.1 times the planned one."
    ]
    for name in live.runs:
        kinds = set(live.runs[name]["events"]["kind"].values.tolist())
        assert ({"alarm", "action"} <= kinds) == (name == WITH_FAULTS)
        assert "optimizer" in live.runs[name].children  # both are measured
    faulted, control = (live.canvas.histories[name] for name in (WITH_FAULTS, WITHOUT_FAULTS))
    first = "First alarm: step 12, 0 steps after the fault: learning_rate (setting). Likely cause: large rate"
    assert faulted.account.startswith(first)
    assert faulted.account == RunEvents.of("a", live.runs[WITH_FAULTS], 0).account
    assert control.account == f"No alarm up to step {N_STEPS - 1}."


def test_the_first_alarm_and_its_cause_stay_and_the_other_lines_are_the_newest():
    said, alarms = AlarmList(), certain_alarms()
    for step in range(9):
        alarm = Alarm(step, "loss", -1, -1, 2.0, 1.0, True, f"loss {step}.")
        values = {"loss": 1.0, "auxiliary_loss": np.nan, "accuracy": 0.1, "grad_norm": 1.0, "learning_rate": 1e-3}
        record = StepRecord(step=step, outcomes={"guard": (alarm,)}, **values)
        said.hear("a", StepNews.of(record, alarms, [Action("stop", step, "Stopped.")] if step == 8 else []).events)
    assert [line["kind"] for line in said.lines] == ["action", *["alarm"] * 5]
    assert [line["number"] for line in said.lines] == [11, 10, 9, 8, 7, 6]
    assert [(line["step"], line["kind"]) for line in said.first] == [(0, "alarm"), (0, "attribution")]
    content = said.state()[0]
    assert (content["first"], content["lines"]) == (said.first, said.lines)
    said.hear("b", StepNews.of(record, alarms).events)
    assert [(line["run"], line["kind"]) for line in said.first[2:]] == [("b", "alarm"), ("b", "attribution")]
    assert len(said.state()[0]["lines"]) == 4  # a first alarm is not repeated
    said.clear()
    assert said.first == []
    said.hear("a", StepNews.of(StepRecord(step=9, outcomes={"guard": (alarm,)}, **values), alarms).events)
    assert [(line["number"], line["kind"]) for line in said.lines] == [(15, "attribution"), (14, "alarm")]
    said.close()


@pytest.mark.slow
def test_a_restart_keeps_the_switches_where_the_hand_put_them_and_the_lines_of_the_record(make):
    fault = wb.faults.large_rate(factor=20)
    live = make(fault, recorder=wb.Recorder(every=10), alarms=certain_alarms(), n_steps=16)
    live.start()
    live.wait(300)
    fault.enabled = True
    live.restart(next(saved for saved in live.checkpoints if saved.step == 8))
    live.wait(300)
    assert live.error == ""
    assert fault.enabled
    assert fault_events(live, WITH_FAULTS) == [(8, "large_rate")]
    assert fault_events(live, WITHOUT_FAULTS) == []
    assert live.canvas.histories[WITH_FAULTS].fault_spans() == [(8, 16)]
    again = RunHistory.of(live.runs[WITH_FAULTS], 16)
    assert again.fault_spans() == [(8, 16)]
    said = AlarmList()
    for name, run in live.runs.items():
        said.hear(name, events_of(run))
    recorded = [(line["step"], line["run"], line["kind"], line["text"]) for line in said.lines]
    told = [(line["step"], line["run"], line["kind"], line["text"]) for line in live.alarm_list.lines]
    assert sorted(recorded) == sorted(told)
    said.close()


def test_incompatible_arguments_are_rejected_immediately():
    rate = wb.faults.large_rate
    for options, error in (
        ({"faults": [rate(), rate()]}, says("faults contains large_rate twice; pass at most one fault of")),
        ({"faults": rate()}, about("faults", "LargeRate")),
        ({"alarms": certain_alarms()}, says("alarms observe what a recorder measures, but there is none;")),
        (
            {"recorder": wb.Recorder(), "actions": wb.Actions()},
            says("actions respond to alarms, but there are none; add"),
        ),
    ):
        with pytest.raises(OptionError, check=error):
            LiveTraining(SMALL, TASK, **options)


@pytest.mark.slow
def test_a_fault_that_cannot_act_is_said_and_the_widget_stays_usable(make):
    live = make(wb.faults.no_auxiliary_loss())
    live.start()
    live.wait(300)
    assert "no_auxiliary_loss needs a model with an auxiliary loss" in live.error
    assert not live._buttons.start.disabled


@pytest.mark.slow
def test_close_lets_go_of_faults_alarms_and_page(tmp_path):
    fault = wb.faults.large_rate()

    def live_and_closed():
        live = LiveTraining(
            SMALL, TASK, faults=[fault], n_steps=10**6, folder=tmp_path, spectra_every=10**6,
            recorder=wb.Recorder(every=10), alarms=certain_alarms(),
        )  # fmt: skip
        panel = live._panel
        live.start()
        wait_for(lambda: live.canvas.histories[WITH_FAULTS].n_done > 1)
        live.close()
        assert {run.attrs["state"] for run in live.runs.values()} == {"stopped"}
        assert (panel.comm, live.alarm_list.comm, fault._observers._functions) == (None, None, [])
        return weakref.ref(live)

    forgotten = live_and_closed()
    gc.collect()
    assert forgotten() is None
