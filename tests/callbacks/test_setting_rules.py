"""Schedules are planned, and injected changes of the learning rate are reported at their step."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.callbacks.rate_schedules import FALLS, N_STEPS, PEAK, RISES, STEEP, by_hand, names, rates
from workbench.callbacks.alarms.setting_rules import Moment, RateRule


def reports(values, noted=None):
    """Return the steps at which changes are reported."""
    rule, found = RateRule(values[0]), []
    for step, value in enumerate(values[1:], start=1):
        if rule.update(value, Moment(step, noted=noted[step] if noted else ())) is not None:
            found.append(step)
    return found


def injected(values, factor, start, *, ramp=0, end=N_STEPS):
    """Return rates that are multiplied by a factor from a step on."""
    return [
        value
        * (1 + (factor - 1) * (min(1.0, (step - start + 1) / ramp) if ramp else 1.0) if start <= step < end else 1)
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize("name", names())
def test_schedules_are_planned(name):
    values, noted = rates(name)
    assert reports(values, noted) == []


#: Schedules that begin below the rate that their scheduler has stored, without which the rise is not known as planned.
NEED_NOTES = {"constant", "constant, 20", "constant, exponential", "constant times exponential"}


@pytest.mark.parametrize("name", [name for name in names() if "warm-up" not in name or "per epoch" not in name])
def test_most_schedules_are_planned_without_the_stored_rates(name):
    assert bool(reports(rates(name)[0])) == (name in NEED_NOTES)


SHAPES = {
    "peak": st.floats(1e-6, 1.0),
    "rise": st.sampled_from(sorted(RISES)),
    "fall": st.sampled_from(sorted(FALLS)),
    "floor": st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3]),
    "offset": st.sampled_from([0, 1]),
    "n_steps": st.integers(60, 1500),
}


@settings(max_examples=80, deadline=None)
@given(
    **SHAPES,
    warmup=st.integers(0, 300),
    n_cycles=st.integers(1, 3),
    rewarm=st.sampled_from([0, 150, 400]),
    kept=st.sampled_from([float, np.float32, "noisy"]),
)
def test_schedules_written_by_hand_are_planned(warmup, n_steps, n_cycles, rewarm, kept, rise, fall, **shape):
    if rise == "exponential" and warmup < 10:
        rise = "linear"  # by a factor of more than 2 in each step
    if rewarm and fall in ("steps", "constant", "exponential"):
        n_cycles = 1  # warming up again from these is not done in practice
    warmup, rewarm = min(warmup, n_steps // 2), rewarm if n_steps > 2 * rewarm else 0
    values = by_hand(warmup=warmup, n_steps=n_steps, n_cycles=n_cycles, rewarm=rewarm, rise=rise, fall=fall, **shape)
    if kept == "noisy":
        values = [value * (1 + 1e-12 * (-1) ** step) for step, value in enumerate(values)]
    else:
        values = [float(kept(value)) for value in values]
    assert reports(values) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("warmup", [60, 500])
def test_coarse_rates_are_planned(dtype, warmup):
    shape = {"offset": 1, "rise": "linear", "fall": "cosine", "floor": 0.0, "n_cycles": 1, "rewarm": 0}
    values = by_hand(peak=3e-3, warmup=warmup, n_steps=1500, **shape)
    assert reports(torch.tensor(values).to(dtype).tolist()) == []


@cache
def drawn(name):
    """Return states of the rule before some steps in the middle of a schedule."""
    random = np.random.default_rng(sum(map(ord, name)))
    (values, noted), rule, found = rates(name), None, {}
    steps = {int(step) for step in random.choice(np.arange(5, N_STEPS - 200), size=8, replace=False)}
    for step in range(max(steps) + 1):
        if step in steps:
            found[step] = replace(rule)
        if rule is None:
            rule = RateRule(values[0])
        else:
            rule.update(values[step], Moment(step, noted=noted[step]))
    return found


def reports_of_injected(name, share, factor, *, ramp=0, end=150):
    """Return the delays of the reports of a change injected at each step with at least a fraction of the peak rate."""
    values, noted = rates(name)
    for start, rule in drawn(name).items():
        if values[start] < share * max(values):
            continue
        faulty = injected(values[start : start + end + 5], factor, 0, ramp=ramp, end=end)
        changed = replace(rule)
        moments = (Moment(start + n, noted=noted[start + n]) for n in range(len(faulty)))
        found = [changed.update(value, moment) for value, moment in zip(faulty, moments, strict=True)]
        yield start, [n for n, report in enumerate(found) if report is not None]


def used_before(name, start, factor):
    """Return whether the changed rate is the highest so far, or one from which the schedule has come down."""
    values = rates(name)[0]
    same = values[:start] if name.startswith("step") else [max(values[:start])]
    return any(abs(factor * values[start] / value - 1) < 0.01 for value in same)


#: Smallest fraction of the peak at which a change is injected; below, it is as small as steps of a schedule.
@pytest.mark.medium
@pytest.mark.parametrize(("factor", "share"), [(1.5, 0.06), (2.0, 0.03), (10.0, 0.005), (40.0, 0.005)])
def test_a_multiplied_rate_is_reported_at_its_step(factor, share):
    counts, missed = Counter(), []
    for name in sorted(set(names()) - STEEP):
        for start, found in reports_of_injected(name, share, factor):
            if used_before(name, start, factor):
                continue
            counts["planted"] += 1
            counts["back"] += 150 in found
            counts["reports"] += len(found)
            if 0 not in found:
                missed.append((name, start))
    assert counts["planted"] > 300
    assert len(missed) <= 0.005 * counts["planted"], missed
    assert counts["back"] >= 0.95 * counts["planted"]
    assert counts["reports"] <= 2.05 * counts["planted"]


@pytest.mark.medium
@pytest.mark.parametrize(("factor", "share"), [(40.0, 0.1), (10.0, 0.4)])
def test_a_rate_that_grows_over_200_steps_is_reported_at_the_beginning(factor, share):
    """The first step of the fault adds 19 % or 5 % to the rate."""
    n, missed = 0, []
    for name in sorted(set(names()) - STEEP):
        for start, found in reports_of_injected(name, share, factor, ramp=200, end=190):
            n += 1
            if 0 not in found:
                missed.append((name, start))
    assert n > 300
    assert len(missed) <= 0.03 * n, missed


@pytest.mark.parametrize("name", sorted(STEEP - {"polynomial, 5"}))
def test_on_steep_cycles_most_changes_are_reported_immediately(name):
    """Changes by a factor of 40; a cycle of 10 steps has steps of 16 % of its peak."""
    found = [steps for _, steps in reports_of_injected(name, 0.1, 40.0)]
    assert sum(0 in steps for steps in found) >= 0.8 * len(found)


def test_the_first_step_of_a_ramp_on_a_constant_rate_is_enough():
    values = [PEAK] * 600
    assert reports(injected(values, 40.0, 300, ramp=200)) == [300]
    assert reports(injected(values, 1.05, 300, ramp=200)) == [304]  # once it exceeds a thousandth


def test_a_long_fault_is_reported_once_despite_restarts():
    values, noted = rates("restarts")
    assert reports(injected(values, 10.0, 700), noted) == [700]
    assert reports(injected(values, 10.0, 700, end=1234), noted) == [700, 1234]


def test_a_fault_in_the_warm_up_does_not_end_it():
    values, noted = rates("transformers: cosine, 300")
    assert reports(injected(values, 10.0, 100, end=200), noted) == [100, 200]


def test_falls():
    """Falls of step schedules are not reported, unless they undo a reported change."""
    constant = [PEAK] * 600
    assert reports(injected(constant, 0.1, 300, end=400)) == []
    assert reports(injected(constant, 0.04, 300, end=400)) == [300, 400]
    assert reports(injected(constant, 0.0, 300, end=400)) == [300, 400]
    assert reports(injected(constant, 2.0, 300, end=400)) == [300, 400]


def test_invalid_rates_raise_no_exception():
    odd = [PEAK] * 50 + [math.inf] * 2 + [PEAK] * 50 + [-PEAK] * 2 + [PEAK] * 50
    assert reports(odd) == [50, 52, 102, 104]


@pytest.mark.parametrize(
    ("after", "is_reported"),
    [
        (lambda values: values[1000:1400], False),
        (lambda values: values[:400], True),  # the scheduler starts again
        (lambda values: [PEAK] * 400, True),
        (lambda values: [value / 2 for value in values[1000:1400]], True),
    ],
    ids=["continues", "starts again", "back at the peak", "other plan"],
)
def test_resumed(after, is_reported):
    values, _ = rates("transformers: cosine, 300")
    rule = RateRule(values[0])
    for step in range(1, 1000):
        assert rule.update(values[step], Moment(step)) is None
    found = [rule.update(value, Moment(1000 + n, is_resumed=n == 0)) for n, value in enumerate(after(values))]
    assert (found[0] is not None) == is_reported
    assert not is_reported or found[0].before == values[999]
    assert not any(found[1:])


@pytest.mark.parametrize("steps", [[*range(8), 18, 19, 40, 70, 71, 120, 190], [0, 1, 2, 34, 58, 100, 150]])
def test_a_warm_up_that_is_seen_at_few_updates_is_planned(steps):
    def rate(step):  # a linear warm-up, then a cosine
        return 1e-3 * (min(1, (step + 1) / 40) if step < 40 else 0.5 + 0.5 * math.cos(math.pi * (step - 40) / 160))

    rule = RateRule(rate(steps[0]))
    assert [rule.update(rate(step), Moment(step)) for step in steps[1:]] == [None] * (len(steps) - 1)


def test_a_jump_between_two_observations_is_reported():
    rule = RateRule(1e-3)
    assert all(rule.update(1e-3, Moment(step)) is None for step in range(1, 20))
    assert rule.update(5e-3, Moment(30)).since == 30
