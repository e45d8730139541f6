import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.records import descent, monitors, record
from workbench.diagnosis import find_failure
from workbench.diagnosis.failed_run import running_median


@settings(max_examples=25, deadline=None)
@given(at=st.integers(60, 150), height=st.floats(1.5, 6.0), seed=st.integers(0, 99))
def test_an_injected_spike_is_found_where_it_begins(at, height, seed):
    loss = descent(seed=seed)
    loss[at : at + 30] += height * np.hanning(30)
    failure = find_failure(record({"monitors": monitors(loss)}))
    assert failure.kind == "spike"
    assert at - 12 <= failure.step <= at + 16
    assert failure.recovered > 0.8


@settings(max_examples=15, deadline=None)
@given(at=st.integers(60, 150), seed=st.integers(0, 99))
def test_a_divergence_begins_before_its_event(at, seed):
    loss = descent(seed=seed)[: at + 12]
    loss[at:] += np.exp(0.5 * np.arange(12))
    failure = find_failure(record({"monitors": monitors(loss)}, events=[(at + 11, "divergence")]))
    assert failure.kind == "diverged"
    assert at - 4 <= failure.step <= at + 3


def test_nan_at_the_end_is_a_divergence_and_a_gap_is_not():
    loss = descent()
    ended, with_gap = loss.copy(), loss.copy()
    ended[150:] = np.nan
    with_gap[100:110] = np.nan
    norm = np.where(np.isfinite(ended), 1.0, np.nan)
    assert find_failure(record({"monitors": monitors(ended, grad_norm=norm)})).kind == "diverged"
    assert find_failure(record({"monitors": monitors(ended).drop_vars("grad_norm")})).kind == "diverged"
    assert find_failure(record({"monitors": monitors(with_gap)})).kind == "stalled"


@given(seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_noise_is_no_spike(seed):
    assert find_failure(record({"monitors": monitors(descent(noise=0.1, seed=seed))})).kind == "stalled"


def test_a_failure_is_seen_where_the_loss_shows_one():
    diverged, risen, small, healthy = (descent() for _ in range(4))
    diverged[150:] = np.nan
    risen[100:130] += 2 * np.hanning(30)
    small[100:130] += 0.04  # above its noise, but too small to be a failure
    found = {
        name: find_failure(record({"monitors": monitors(loss, grad_norm=0 * loss + 1)}))
        for name, loss in {"diverged": diverged, "risen": risen, "small": small, "healthy": healthy}.items()
    }
    assert {name: failure.is_seen for name, failure in found.items()} == {
        "diverged": True, "risen": True, "small": False, "healthy": False,
    }  # fmt: skip
    assert "rose by" in found["risen"].words
    assert found["healthy"].words.startswith("the loss neither diverged nor rose noticeably")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.integers(1, 9))
def test_running_median_is_the_median_of_the_last_values(values, window):
    values = np.array(values)
    expected = [np.median(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
    np.testing.assert_array_equal(running_median(values, window), expected)
