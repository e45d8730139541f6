import numpy as np
import pytest
import xarray as xr

from workbench.callbacks.alarms import WATCHED, Alarms, Attributor, Calibration, DetectorOptions, observations
from workbench.callbacks.alarms.lead_times import lead_time
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.recorder import Observation
from workbench.errors import OptionError, SchemaError

TERMS = np.array(["D2", "D3", "dWq", "dWk", "W"])
OPTIONS = DetectorOptions(settle=20, start=30, smooth=10, smooth_attention=10, lag=10, past=40)


@pytest.fixture
def calibration():
    scale = {watched.name: {"level": 1.0, "change": 1.0} for watched in WATCHED}
    tails = tuple(np.linspace(0.5, 1.0, 39))
    return Calibration(OPTIONS, scale, {"mechanism": tails, "outcome": tails})


@pytest.fixture
def attributor():
    rank, ratio = {"effective_rank D2": 2.0}, {"update_ratio": 2.0}
    return Attributor.fit([(rank, "low_precision_attention"), (ratio, "large_rate")] * 5)


@pytest.fixture
def alarms(calibration, attributor):
    return Alarms(calibration=calibration, attributor=attributor)


def looks(n=300, *, broken=None, loss_from=None, layers=(0, 2)):
    """A run: the D2 rank of one head falls from step ``broken`` on, the loss rises from ``loss_from`` on."""
    random = np.random.default_rng(0)
    coords = {"layer": np.array(layers), "head": np.arange(4), "term": TERMS}
    for step in range(n):
        if (step + 1) % 10 == 0:
            rank = 1.5 + 0.05 * random.random((2, 4, 5))
            if broken is not None and step >= broken:
                rank[1, 2, 0] = 1.001
            yield Observation(step, "attention", {"effective_rank": rank}, coords)
        loss = 2 + 0.01 * random.random() + (0 if loss_from is None else max(0, step - loss_from) / 10)
        numbers = {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "batch_size": 32.0, "auxiliary_loss": np.nan}
        yield Observation(step, "monitors", {name: np.array(value) for name, value in numbers.items()})


def test_a_healthy_run_is_left_alone(alarms):
    assert [alarm for look in looks() for alarm in alarms.observe(look)] == []


def test_a_collapse_is_said_with_signal_layer_head_and_words(alarms):
    raised, onsets = [], []
    for look in looks(broken=200, loss_from=240):
        raised += alarms.observe(look)
        onsets.append(alarms.onset("effective_rank D2"))
        if len(raised) == 1:
            break
    raised += [
        alarm for look in list(looks(broken=200, loss_from=240))[len(onsets) :] for alarm in alarms.observe(look)
    ]
    first, *others = raised
    assert (first.signal, first.layer, first.head, first.is_outcome) == ("effective_rank D2", 2, 2, False)
    assert first.step == 209  # the first look after it
    assert first.score > 1
    assert first.message.startswith("effective_rank D2 is too low (1.001) in layer 2, head 2: ")
    assert {alarm.signal for alarm in others} == {"loss"}
    assert alarms.raised == raised
    timing = lead_time(raised, divergence=280)
    assert timing.is_first
    assert timing.steps == min(alarm.step for alarm in others) - 209
    assert alarms.attribute().cause == "low_precision_attention"
    assert onsets[0] is None  # too little is known yet
    assert 179 <= onsets[-1] <= 209


def test_alarms_are_causal(alarms, calibration, attributor):
    """What comes later changes nothing that was said before."""
    whole = [alarm for look in looks(broken=200) for alarm in alarms.observe(look)]
    cut = Alarms(calibration=calibration, attributor=attributor)
    until = [alarm for look in looks(230, broken=200) for alarm in cut.observe(look)]
    assert until == [alarm for alarm in whole if alarm.step < 230] != []


def test_the_budget_is_the_knob(calibration, attributor):
    counts = []
    for budget in (0.5, 0.02, 0.0001):
        alarms = Alarms(budget=budget, calibration=calibration, attributor=attributor)
        counts.append(sum(len(alarms.observe(look)) for look in looks(loss_from=250)))
    assert counts[0] >= counts[1] >= counts[2]
    alarms.budget = 0.5
    assert alarms.budget == 0.5
    with pytest.raises(OptionError, match="budget is 2"):
        alarms.budget = 2
    with pytest.raises(OptionError, match="budget is 0"):
        Alarms(budget=0, calibration=calibration, attributor=attributor)


def test_a_signal_that_turns_nan_is_an_alarm_and_no_crash(alarms):
    raised = []
    for look in looks():
        if look.part == "attention" and look.step > 150:
            look = Observation(look.step, look.part, {"effective_rank": np.full((2, 4, 5), np.nan)}, look.coords)
        raised += alarms.observe(look)
    assert {alarm.signal for alarm in raised} == {w.name for w in WATCHED if w.variable == "effective_rank"}
    assert all(alarm.message.endswith("is not finite any more.") for alarm in raised)
    assert {alarm.step for alarm in raised} == {159}


def test_an_alarm_sounds_once_until_the_signal_has_recovered(alarms):
    raised = []
    for look in looks(600, broken=200):
        if look.part == "attention" and 300 < look.step < 450:
            look = Observation(look.step, look.part, {"effective_rank": np.full((2, 4, 5), 1.52)}, look.coords)
        raised += alarms.observe(look)
    steps = [alarm.step for alarm in raised if alarm.signal == "effective_rank D2"]
    assert len(steps) == 2
    assert steps[0] < 300
    assert steps[1] >= 450


def test_after_a_rest_it_sounds_again_where_the_trouble_is_still_there(alarms):
    raised = []
    for look in looks(broken=200):
        raised += alarms.observe(look)
        if look.step == 215 and look.part == "monitors":
            alarms.rest(215, n_steps=40)
    assert [alarm.step for alarm in raised] == [209, 259]


def test_settings_are_evidence_and_no_alarm(alarms):
    for look in looks():
        values = dict(look.values)
        if look.part == "monitors" and look.step >= 150:
            values |= {"learning_rate": np.array(1e-2), "batch_size": np.array(2.0)}
        assert alarms.observe(Observation(look.step, look.part, values, look.coords)) == []
    features = alarms.features()
    assert features["rate_change"] == pytest.approx(np.log(10))
    assert features["batch_change"] == pytest.approx(-np.log(16))
    assert "has_lost_auxiliary_loss" not in features  # it never had one


def test_a_lost_auxiliary_loss_is_seen(alarms):
    for look in looks():
        if look.part == "monitors":
            lost = {"auxiliary_loss": np.array(0.0 if look.step >= 150 else 0.01)}
            look = Observation(look.step, look.part, {**look.values, **lost}, look.coords)
        alarms.observe(look)
    assert alarms.features()["has_lost_auxiliary_loss"] == 1


def as_run(stream):
    """A recorded run of these looks."""
    rows = {}
    for look in stream:
        rows.setdefault(look.part, []).append(look)
    parts = {}
    for part, found in rows.items():
        coords = found[0].coords
        dims = {"effective_rank": ("layer", "head", "term")}
        variables = {
            name: (("step", *dims.get(name, ())), np.stack([look.values[name] for look in found]))
            for name in found[0].values
        }
        parts[part] = xr.Dataset(variables, {"step": [look.step for look in found], **coords})
    return xr.DataTree.from_dict(parts)


def test_a_replay_of_the_record_raises_the_same_alarms(alarms, calibration, attributor):
    live = [alarm for look in looks(broken=200, loss_from=240) for alarm in alarms.observe(look)]
    run = as_run(looks(broken=200, loss_from=240))
    assert replay(run, Alarms(calibration=calibration, attributor=attributor)) == live != []
    order = [(look.step, look.part) for look in observations(run)]
    assert order == [(look.step, look.part) for look in looks()]
    with pytest.raises(SchemaError, match="no monitors to replay"):
        replay(xr.DataTree(), alarms)


def test_against_a_paired_run_a_drift_that_both_have_is_no_alarm(calibration, attributor):
    healthy = as_run(looks(loss_from=60))
    alone = Alarms(calibration=calibration, attributor=attributor)
    paired = Alarms(calibration=calibration, attributor=attributor, paired=healthy)
    assert any(alarm.signal == "loss" for look in looks(loss_from=60) for alarm in alone.observe(look))
    assert [alarm for look in looks(loss_from=60) for alarm in paired.observe(look)] == []
    paired.reset()
    raised = [alarm for look in looks(loss_from=60, broken=200) for alarm in paired.observe(look)]
    assert [alarm.signal for alarm in raised] == ["effective_rank D2"]
    with pytest.raises(SchemaError, match="The paired run has no monitors"):
        Alarms(calibration=calibration, attributor=attributor, paired=xr.DataTree())


def test_lead_times_of_what_is_missing():
    assert np.isnan(lead_time([]).steps)
    assert not lead_time([]).is_first
    assert lead_time([], divergence=9).divergence == 9


def test_what_ships_can_be_opened():
    alarms = Alarms()
    assert [alarm for look in looks(layers=(0, 1)) for alarm in alarms.observe(look)] == []
    assert set(alarms.calibration.scale) <= {watched.name for watched in WATCHED}
    assert set(alarms.attributor.causes) >= {"low_precision_attention", "large_rate"}
    assert alarms.calibration.threshold(0.05) > 0
    assert Alarms(paired=as_run(looks())).calibration.about != alarms.calibration.about
