"""How often healthy runs reach the evidence of an alarm."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from workbench.callbacks.alarms import Alarms, Calibration, calibrate, replay
from workbench.callbacks.alarms.calibration import Tail
from workbench.errors import OptionError, StoreError

EMPTY = Calibration({}, 0)


def healthy(seed, n=1600, *, spikes=0.0):
    """A run of a loss that scatters, and now and then is far too large."""
    random = np.random.default_rng(seed)
    loss = 2 + 0.1 * random.normal(size=n)
    loss += 0.1 * random.exponential(spikes, size=n) * (random.random(n) < 0.02) if spikes else 0
    return xr.DataTree.from_dict({"/monitors": xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(n)})})


def false_alarms(calibration, rate, *, spikes=0.0, n_runs=6):
    """Alarms in 100,000 steps of fresh healthy runs."""
    found = sum(
        len(replay(healthy(100 + i, spikes=spikes), Alarms(false_alarms=rate, calibration=calibration)))
        for i in range(n_runs)
    )
    return found / (n_runs * 1400) * 100_000


@pytest.mark.medium
@pytest.mark.parametrize("spikes", [0.0, 12.0])
def test_fresh_healthy_runs_raise_about_as_many_alarms_as_the_rate_says(spikes):
    calibration = calibrate((healthy(i, spikes=spikes) for i in range(8)), base=EMPTY)
    # 8,400 steps: up to 5 events at a rate of 15.
    assert false_alarms(calibration, 15, spikes=spikes) == pytest.approx(32, abs=32)
    assert false_alarms(calibration, 0.1, spikes=spikes) < 25  # 2 events


@pytest.mark.medium
def test_own_runs_sharpen_what_is_built_in():
    """Alarms that know that the loss has spikes are silent at them."""
    runs = [healthy(i, spikes=12.0) for i in range(6)]
    base = calibrate((healthy(50 + i) for i in range(6)), base=EMPTY)
    own = calibrate(runs, base=base)
    assert own.threshold("loss", 1, n_signals=1) > base.threshold("loss", 1, n_signals=1) + 1
    assert own.n_steps == 9_600


def test_the_tail_is_exponential_and_signals_share_the_rate():
    calibration = Calibration({"loss": Tail(2.0, 100.0, 0.5)}, 1000)
    assert calibration.threshold("loss", 100, n_signals=1) == pytest.approx(2.0)
    assert calibration.threshold("loss", 1, n_signals=1) == pytest.approx(2.0 + 0.5 * math.log(100))
    assert calibration.threshold("loss", 10, n_signals=10) == calibration.threshold("loss", 1, n_signals=1)
    # Never below where the tail was measured.
    assert calibration.threshold("loss", 1e6, n_signals=1) == 2.0
    # One in 100,000 measurements at p = 10^-5.
    assert calibration.threshold("unknown", 1, n_signals=1) == pytest.approx(5.0)


def test_it_is_read_as_it_was_written(tmp_path):
    calibration = Calibration({"loss": Tail(2.25, 103.125, 0.625)}, 12_345, "twelve runs")
    assert Calibration.open(calibration.save(tmp_path / "c.json")) == Calibration(
        {"loss": Tail(2.25, 103.1, 0.625)}, 12_345, "twelve runs"
    )
    with pytest.raises(StoreError, match="exists|taken|there"):
        calibration.save(tmp_path / "c.json")


def test_bad_input_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(OptionError, match="The healthy runs have 400 steps, of which fewer than 1000 are judged"):
        calibrate([healthy(0, n=400)])
    for rate in (0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="false_alarms is"):
            EMPTY.threshold("loss", rate, n_signals=1)
    with pytest.raises(StoreError, match="is no calibration of alarms"):
        Calibration.open(tmp_path / "absent.json")
    for content in ({"scale": 1}, [1], {"tails": {"loss": 3}, "n_steps": 1, "about": ""}):
        (tmp_path / "other.json").write_text(json.dumps(content))
        with pytest.raises(StoreError, match="is no calibration of alarms"):
            Calibration.open(tmp_path / "other.json")
