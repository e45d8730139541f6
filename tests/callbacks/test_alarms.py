"""Alarms from observations: signal, step, place, cause, causality, and the same alarms in a replay."""

import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.callbacks.certain_alarms import with_attributor
from tests.data_scripts import load_script
from workbench.callbacks.alarms import WATCHED, observations
from workbench.callbacks.alarms.replaying import lead_time, replay
from workbench.callbacks.recorder import Observation
from workbench.errors import OptionError, SchemaError

fit_attributor = load_script("fitting").fit_attributor
TERMS = np.array(["D2", "D3", "dWq", "dWk", "W"])


@pytest.fixture
def attributor():
    rank, ratio = {"effective_rank D2": 2.0}, {"update_ratio": 2.0}
    return fit_attributor([(rank, "low_precision_attention"), (ratio, "large_rate")] * 5)


@pytest.fixture
def alarms(attributor):
    return with_attributor(attributor)


def measurements(n=700, *, broken=None, loss_from=None, layers=(0, 2)):
    """Return the observations of a run whose D2 rank of one head falls, and whose loss rises, from given steps on."""
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


def heard(alarms, stream):
    return [alarm for observation in stream for alarm in alarms.observe(observation)]


def test_a_healthy_run_raises_no_alarm(alarms):
    assert heard(alarms, measurements()) == []
    assert set(alarms.scores()) >= {"loss", "grad_norm", "effective_rank D2"}
    assert all(score < 1 for score in alarms.scores().values())


def test_a_collapse_is_reported_with_signal_layer_head_and_message(alarms):
    assert alarms.onset("effective_rank D2") is None
    raised = heard(alarms, measurements(broken=500, loss_from=540))
    first = next(alarm for alarm in raised if not alarm.is_outcome)
    assert raised[0] == first
    assert (first.signal, first.layer, first.head) == ("effective_rank D2", 2, 2)
    assert 509 <= first.step <= 529
    assert first.score >= 1
    assert first.message.startswith("effective_rank D2 has fallen to 1.001 in layer 2, head 2: ")
    assert {alarm.signal for alarm in raised if alarm.is_outcome} == {"loss"}
    assert alarms.raised == raised
    timing = lead_time(raised, divergence=680)
    assert timing.is_first
    assert timing.steps == min(alarm.step for alarm in raised if alarm.is_outcome) - first.step


def test_the_onset_and_the_cause_are_known_at_the_alarm(alarms):
    for observation in measurements(broken=500):
        if alarms.observe(observation):
            break
    assert 489 <= alarms.onset("effective_rank D2") <= 509
    assert alarms.attribute().cause == "low_precision_attention"
    found = alarms._new_attribution(alarms.raised)
    assert found is not None
    assert alarms._new_attribution(alarms.raised) is None  # already reported


def test_the_cause_follows_from_the_first_alarm_of_a_change(attributor):
    """Consequences, here of the loss, would point to another cause."""
    attributor = fit_attributor([({"effective_rank D2": 2.0}, "low_precision_attention"), ({"loss": 2.0}, "other")] * 5)
    alarms, causes = with_attributor(attributor), {}
    for observation in measurements(broken=500, loss_from=530):
        for alarm in alarms.observe(observation):
            causes.setdefault(alarm.signal, alarms.attribute().cause)
    assert causes["loss"] == causes["effective_rank D2"] == "low_precision_attention"
    alone = with_attributor(attributor)
    heard(alone, measurements(loss_from=530))
    assert alone.attribute().cause == "other"


def test_a_fault_excluded_by_a_probe_is_not_the_cause(alarms):
    """A sound measurement of the arithmetic excludes its fault if it is after the change."""
    sound = {name: np.ones(2) for name in ("error_excess", "gradient_error")}
    sound |= {name: np.ones((2, 4)) for name in ("query_error_excess", "query_gradient_error")}
    heard(alarms, measurements(540, broken=500))
    assert alarms.attribute().cause == "low_precision_attention"
    alarms.observe(Observation(480, "precision", sound | {"excess_limit": np.array(25.0)}))
    assert alarms.attribute().cause == "low_precision_attention"
    alarms.observe(Observation(540, "precision", sound | {"excess_limit": np.array(25.0)}))
    found = alarms.attribute()
    assert (found.cause, found.probability["low_precision_attention"]) == ("unknown", 0.0)


def test_alarms_are_causal(alarms, attributor):
    """Later observations do not change earlier alarms."""
    whole = heard(alarms, measurements(broken=500))
    until = heard(with_attributor(attributor), measurements(560, broken=500))
    assert until == [alarm for alarm in whole if alarm.step < 560] != []


@pytest.mark.slow
def test_a_larger_rate_of_false_alarms_leads_to_earlier_alarms(attributor):
    steps = []
    for rate in (100.0, 1.0, 1e-4):
        alarms = with_attributor(attributor, false_alarms=rate)
        steps.append(next(alarm.step for alarm in heard(alarms, measurements(loss_from=450)) if alarm.signal == "loss"))
    assert 450 < steps[0] <= steps[1] <= steps[2]
    alarms.false_alarms = 0.5
    assert alarms.false_alarms == 0.5
    with pytest.raises(OptionError, check=about("false_alarms", -2)):
        alarms.false_alarms = -2
    with pytest.raises(OptionError, check=about("false_alarms", 0)):
        wb.Alarms(false_alarms=0)


def test_a_signal_that_becomes_nan_raises_an_alarm(alarms):
    raised = []
    for observation in measurements():
        if observation.part == "attention" and observation.step > 350:
            observation = Observation(
                observation.step, observation.part, {"effective_rank": np.full((2, 4, 5), np.nan)}, observation.coords
            )
        raised += alarms.observe(observation)
    assert {alarm.signal for alarm in raised} == {w.name for w in WATCHED if w.variable == "effective_rank"}
    assert all(alarm.message.endswith("is no longer finite.") for alarm in raised)
    assert {alarm.step for alarm in raised} == {359}


def test_an_alarm_is_raised_once_until_the_signal_has_recovered(alarms):
    stream = [
        Observation(
            observation.step,
            observation.part,
            {**observation.values, "loss": observation.values["loss"] + (500 <= observation.step < 900)},
        )
        if observation.part == "monitors"
        else observation
        for observation in measurements(1500)
    ]
    steps = [alarm.step for alarm in heard(alarms, stream) if alarm.signal == "loss"]
    assert steps == [500]
    stream[-1] = Observation(1499, "monitors", {**stream[-1].values, "loss": np.array(200.0)})
    alarms.reset()
    assert [alarm.step for alarm in heard(alarms, stream)] == [500, 1499]


def test_after_a_rest_only_later_changes_raise_alarms(alarms):
    raised = []
    for observation in measurements(900, broken=500, loss_from=800):
        raised += alarms.observe(observation)
        if observation.step == 499 and observation.part == "monitors":
            alarms.rest(500, n_steps=40)
    assert {alarm.signal for alarm in raised} == {"loss"}
    assert raised[0].step >= 800


def as_run(stream):
    """Return a recorded run with these observations."""
    rows = {}
    for observation in stream:
        rows.setdefault(observation.part, []).append(observation)
    parts = {}
    for part, found in rows.items():
        coords = found[0].coords
        dims = {"effective_rank": ("layer", "head", "term")}
        variables = {
            name: (("step", *dims.get(name, ())), np.stack([observation.values[name] for observation in found]))
            for name in found[0].values
        }
        parts[part] = xr.Dataset(variables, {"step": [observation.step for observation in found], **coords})
    return xr.DataTree.from_dict(parts)


def test_a_replay_of_the_record_raises_the_same_alarms(alarms, attributor):
    live = heard(alarms, measurements(broken=500, loss_from=540))
    run = as_run(measurements(broken=500, loss_from=540))
    assert replay(run, with_attributor(attributor)) == live != []
    order = [(observation.step, observation.part) for observation in observations(run)]
    assert order == [(observation.step, observation.part) for observation in measurements()]
    with pytest.raises(SchemaError, check=says("The run has no monitors to replay; record it with")):
        replay(xr.DataTree(), alarms)


def test_a_part_is_evaluated_with_the_learning_rate_of_its_own_step(alarms):
    """When a schedule restarts, the first large update changes the weights a lot, as planned."""
    coords = {"layer": np.array([0]), "head": np.arange(2), "term": TERMS}
    random = np.random.default_rng(0)
    raised = []
    for step in range(1000):
        rate = 1e-3 if step < 999 else 2e-2
        if (step + 1) % 10 == 0:
            norm = rate * (1 + 0.05 * random.random((1, 2, 5)))
            raised += alarms.observe(Observation(step, "attention", {"frobenius_norm": norm}, coords))
        numbers = {"loss": 2 + 0.01 * random.random(), "learning_rate": rate}
        raised += alarms.observe(Observation(step, "monitors", {name: np.array(v) for name, v in numbers.items()}))
    assert raised == []


def labelled(agreements):
    for step, agreement in enumerate(agreements):
        yield Observation(step, "monitors", {"loss": np.array(2.0), "label_agreement": np.array(agreement)})


def test_labels_that_are_no_longer_tokens_raise_an_alarm_immediately(alarms):
    (alarm,) = heard(alarms, labelled([1.0] * 25 + [0.95] * 5 + [1.0]))
    assert (alarm.signal, alarm.step) == ("data", 25)
    expected = (
        "5% of the labels differ from the tokens of their inputs, whereas all labels of the 25 batches before agreed"
    )
    assert alarm.message.replace("5 %", "5%").startswith(expected)
    assert alarms.attribute().cause == "corrupted_data"


@pytest.mark.parametrize(("n", "signal", "delay"), [(10, "data", 5), (9, "limits", 19)])
def test_positions_that_begin_to_see_later_tokens_raise_one_alarm(alarms, n, signal, delay):
    """Rounding explains 0.005, batches without a pair have NaN, and 0.02 may be either."""
    values = [0.0, 0.005, np.nan, 0.02] * n + [np.nan, 0.2, 0.02, np.nan, 0.1, 0.3] + [np.nan, 0.4] * 100
    rows = [{"loss": 2.0, "lookahead": value, "label_agreement": 1.0} for value in values]
    numbers = [{name: np.array(value) for name, value in row.items()} for row in rows]
    (alarm,) = heard(alarms, (Observation(i, "monitors", each) for i, each in enumerate(numbers)))
    assert (alarm.signal, alarm.step) == (signal, 4 * n + delay)
    assert "causal mask" in alarm.message
    assert np.isnan(alarms.attribute().score)


def test_lead_times_with_missing_alarms():
    assert np.isnan(lead_time([]).steps)
    assert not lead_time([]).is_first
    assert lead_time([], divergence=9).divergence == 9
