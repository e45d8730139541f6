"""Plans of settings: their forms, planned changes that raise no alarm, and departures that do."""

import math

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from workbench.callbacks.alarms.settings_sentinel import SettingsSentinel, planned_settings
from workbench.callbacks.observation import changed_setting
from workbench.errors import OptionError

SIZES = {0: 8, 100: 16, 200: 32}
FORMS = {
    "mapping of steps": {"batch_size": SIZES},
    "function of each": {"batch_size": lambda step: 8 * 2 ** (step // 100)},
    "function of all": lambda step: {"batch_size": 8 * 2 ** (step // 100)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_planned_ramp_is_reported_as_planned(form):
    sentinel = SettingsSentinel(planned=planned_settings(FORMS[form]))
    sizes = [SIZES[step // 100 * 100] for step in range(300)]
    changes = [change for step, size in enumerate(sizes) for change in sentinel.observe(step, {"batch_size": size})]
    assert [(change.step, change.factor) for change in changes] == [(100, 1.0), (200, 1.0)]
    assert changes[0].sentence == "The batch size rose from 8 to 16 at step 100; as planned."


def test_a_departure_from_a_planned_ramp_is_reported():
    sentinel = SettingsSentinel(planned=planned_settings({"batch_size": SIZES}))
    sizes = [SIZES[step // 100 * 100] if step < 220 else 4 for step in range(300)]
    changes = [change for step, size in enumerate(sizes) for change in sentinel.observe(step, {"batch_size": size})]
    assert [change.step for change in changes if change.factor != 1] == [221]


def test_a_setting_may_be_free_at_some_steps():
    def plan(step):
        return {"learning_rate": None if step < 50 else 0.1}

    sentinel = SettingsSentinel(planned=planned_settings(plan))
    rates = [0.1 if step % 3 else 7.0 for step in range(50)] + [0.1] * 20 + [0.3]
    changes = [change for step, rate in enumerate(rates) for change in sentinel.observe(step, {"learning_rate": rate})]
    assert [change.step for change in changes] == [70]
    free = SettingsSentinel(planned=planned_settings({"weight_decay": None}))
    assert not [change for step in range(90) for change in free.observe(step, {"weight_decay": step % 7})]


@pytest.mark.parametrize("name", ["n_trainable", "n_optimized", "n_groups"])
def test_more_trained_parameters_are_planned_and_fewer_are_not(name):
    sentinel = SettingsSentinel()
    numbers = [10] * 50 + [20] * 50 + [15] * 50
    changes = [change for step, n in enumerate(numbers) for change in sentinel.observe(step, {name: n})]
    assert [(change.step, change.factor == 1) for change in changes] == [(50, True), (100, False)]


def test_a_schedule_that_is_extended_or_resumed_follows_its_plan():
    def rate(step, n):
        return 0.5 + 0.5 * math.cos(math.pi * min(step / n, 1))

    n_steps = {"n": 200}
    sentinel = SettingsSentinel(planned=planned_settings({"learning_rate": lambda step: rate(step, n_steps["n"])}))
    changes = []
    for step in range(400):
        n_steps["n"] = 200 if step < 150 else 400  # extended at step 150, where the rate jumps
        changes += sentinel.observe(step, {"learning_rate": rate(step, n_steps["n"])})
    assert changes == []


def test_the_signals_of_a_run_start_anew_after_a_planned_change():
    """Gradients of twice the parameters are larger: no alarm, but a later jump is one."""

    def raised(planned):
        alarms, noise = wb.Alarms(), np.random.default_rng(0)
        for step in range(600):
            norm = (4.0 if step >= 400 else 1.0) * (8.0 if step >= 500 else 1.0) * math.exp(0.05 * noise.normal())
            alarms.observe(wb.alarms.Observation(step, "monitors", {"grad_norm": np.array(norm)}))
            if step == 399 and planned:
                alarms.observe(changed_setting(step, "n_trainable", 1.0, "More parameters require a gradient."))
        return [alarm.step for alarm in alarms.raised]

    assert raised(planned=False)[0] < 420
    assert 500 <= raised(planned=True)[0] < 520


@pytest.mark.parametrize("plan", [5, {"batch_size": "8"}, {"batch_size": {}}, {"batch_size": True}])
def test_plans_of_other_forms_are_refused(plan):
    with pytest.raises(OptionError):
        planned_settings(plan)
    with pytest.raises(OptionError, check=about("plan(0)", 3)):
        planned_settings(lambda step: 3)
