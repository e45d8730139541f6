"""Calibration of alarms on healthy runs."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from workbench.callbacks.alarms import Alarms, Calibration, calibrate, replay
from workbench.callbacks.alarms.calibration import Tail
from workbench.errors import OptionError, StoreError

EMPTY = Calibration({}, 0)


def healthy(seed, n=1600, *, spikes=0.0):
    """Return a run whose loss is noisy, with occasional large spikes."""
    random = np.random.default_rng(seed)
    loss = 2 + 0.1 * random.normal(size=n)
    loss += 0.1 * random.exponential(spikes, size=n) * (random.random(n) < 0.02) if spikes else 0
    return xr.DataTree.from_dict({"/monitors": xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(n)})})


def false_alarms(calibration, rate, *, spikes=0.0, n_runs=6):
    """Return the alarms per 100,000 steps of new healthy runs."""
    found = sum(
        len(replay(healthy(100 + i, spikes=spikes), Alarms(false_alarms=rate, calibration=calibration)))
        for i in range(n_runs)
    )
    return found / (n_runs * 1400) * 100_000


@pytest.mark.medium
@pytest.mark.parametrize("spikes", [pytest.param(0.0, marks=pytest.mark.slow), 12.0])
def test_new_healthy_runs_raise_about_as_many_alarms_as_the_rate(spikes):
    calibration = calibrate((healthy(i, spikes=spikes) for i in range(8)), base=EMPTY)
    # 8,400 steps: up to 5 events at a rate of 15.
    assert false_alarms(calibration, 15, spikes=spikes) == pytest.approx(32, abs=32)
    assert false_alarms(calibration, 0.1, spikes=spikes) < 25  # 2 events


@pytest.mark.slow
def test_own_runs_refine_the_built_in_calibration():
    """Alarms calibrated on runs with spikes are not raised by spikes."""
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
    # Never below the limit of the tail.
    assert calibration.threshold("loss", 1e6, n_signals=1) == 2.0
    # One in 100,000 measurements at p = 10^-5.
    assert calibration.threshold("unknown", 1, n_signals=1) == pytest.approx(5.0)


def test_saving_and_opening_preserves_the_content(tmp_path):
    calibration = Calibration({"loss": Tail(2.25, 103.125, 0.625)}, 12_345, "twelve runs")
    assert Calibration.open(calibration.save(tmp_path / "c.json")) == Calibration(
        {"loss": Tail(2.25, 103.1, 0.625)}, 12_345, "twelve runs"
    )
    with pytest.raises(StoreError, check=says("exists already; pass overwrite=True to replace it, or")):
        calibration.save(tmp_path / "c.json")


def test_invalid_input_is_rejected(tmp_path):
    with pytest.raises(OptionError, check=says("are evaluated; pass more or longer runs: the first")):
        calibrate([healthy(0, n=400)])
    with pytest.raises(StoreError, check=about("path", tmp_path / "absent.json")):
        Calibration.open(tmp_path / "absent.json")
    for content in ({"scale": 1}, [1], {"tails": {"loss": 3}, "n_steps": 1, "about": ""}):
        (tmp_path / "other.json").write_text(json.dumps(content))
        with pytest.raises(StoreError, check=about("path", tmp_path / "other.json")):
            Calibration.open(tmp_path / "other.json")
