import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.callbacks.alarms import Detector, DetectorOptions, Watched
from workbench.errors import OptionError

OPTIONS = DetectorOptions(settle=20, start=30, smooth=5, smooth_attention=20, lag=10, past=40)


def plain_departure(steps, values, options):
    """Level and change at the last step, typed from the definition over the whole history."""
    step = steps[-1]
    start = [v for s, v in zip(steps, values, strict=True) if options.settle <= s < options.settle + options.start]
    latest = np.mean([v for s, v in zip(steps, values, strict=True) if step - options.smooth < s], axis=0)
    oldest = step - options.smooth - options.lag - options.past
    past = [
        v
        for s, v in zip(steps, values, strict=True)
        if max(oldest, options.settle - 1) < s <= step - options.smooth - options.lag
    ]
    change = latest - np.median(past, axis=0) if len(past) > 1 else np.full_like(latest, np.nan)
    return latest - np.median(start, axis=0), change


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(
    every=st.integers(1, 12), n=st.integers(60, 300), seed=st.integers(0, 99), units=st.sampled_from([(), (3,), (2, 4)])
)
def test_departures_are_what_the_definition_says(every, n, seed, units):
    steps = np.arange(0, n, every)
    values = np.random.default_rng(seed).normal(size=(len(steps), *units)).cumsum(axis=0)
    detector = Detector(OPTIONS)
    for i, step in enumerate(steps):
        found = detector.update(int(step), values[i])
        if step < OPTIONS.settle + OPTIONS.start:
            assert found is None
            continue
        level, change = plain_departure(steps[: i + 1], values[: i + 1], OPTIONS)
        np.testing.assert_allclose(found.level, level, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.change, change, rtol=1e-12, atol=1e-12)


def test_attention_is_smoothed_over_its_own_window():
    fast, slow = Detector(OPTIONS), Detector(OPTIONS, part="attention")
    for step in range(210):
        of_fast, of_slow = (one.update(step, np.array(float(step >= 200))) for one in (fast, slow))
    assert of_fast.level == 1
    assert of_slow.level == 10 / OPTIONS.smooth_attention


def test_a_level_that_never_moves_departs_by_nothing():
    detector = Detector(OPTIONS)
    found = [detector.update(step, np.array([3.0, np.nan])) for step in range(200)]
    assert found[-1].level[0] == found[-1].change[0] == 0
    assert np.isnan(found[-1].level[1])
    assert np.isnan(found[-1].change[1])


def test_a_step_shows_at_once_in_both_and_a_slow_rise_only_against_the_start():
    step_like, slow = Detector(OPTIONS), Detector(OPTIONS)
    for step in range(400):
        of_step = step_like.update(step, np.array(1.0 if step >= 300 else 0.0))
        of_slow = slow.update(step, np.array(step / 400))
        if step == 302:
            assert of_step.level == of_step.change == pytest.approx(0.6)
    assert of_slow.level > 0.8
    assert of_slow.change < 0.15
    assert of_step.change == 0  # the past has caught up with it


@pytest.mark.slow
@pytest.mark.medium
def test_memory_is_bounded():
    detector = Detector(OPTIONS)
    for step in range(20_000):
        detector.update(step, np.zeros((3, 4)))
    assert len(detector.past()[0]) == OPTIONS.smooth + OPTIONS.lag + OPTIONS.past
    assert len(detector._values) < 4 * (OPTIONS.smooth + OPTIONS.lag + OPTIONS.past)


def test_forgetting_the_past_keeps_the_healthy_start():
    detector = Detector(OPTIONS)
    for step in range(300):
        detector.update(step, np.array(2.0))
    detector.forget_past()
    found = detector.update(300, np.array(5.0))
    assert found.level == 3
    assert np.isnan(found.change)


def test_a_paired_run_is_compared_from_the_first_look_after_the_warm_up():
    detector = Detector(OPTIONS, has_pair=True)
    found = [detector.update(step, np.array(0.5)) for step in range(60)]
    assert found[OPTIONS.settle + OPTIONS.start].level == 0.5


@pytest.mark.parametrize("options", [{"settle": -1}, {"start": 0}, {"smooth": 0}, {"past": 0}])
def test_impossible_options_are_refused(options):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} is"):
        DetectorOptions(**options)


def test_badness_rises_where_the_signal_gets_worse():
    rank = Watched("attention", "effective_rank", "D2", is_bad_low=True, scale="excess")
    assert rank.badness(np.array([1.001]))[0] > rank.badness(np.array([1.5]))[0]
    # A tenth of the distance from one is the same wherever it is.
    ratio = rank.badness(np.array([1.01, 1.1, 2.0]))
    assert ratio[0] - ratio[1] == pytest.approx(ratio[1] - ratio[2], abs=0.02)
    logit = Watched("attention", "attention_logit_max")
    assert np.isnan(logit.badness(np.array([-1.0, np.inf, np.nan]))).all()
    assert logit.name == "attention_logit_max"
    assert rank.name == "effective_rank D2"
