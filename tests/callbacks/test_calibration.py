"""Calibration of alarms by the alarms on new healthy runs, and attribution to faults on new examples."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.data_scripts import load_script
from workbench.callbacks.alarms import Alarms, Attributor, Calibration, calibrate, replay
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


@pytest.mark.slow
@pytest.mark.parametrize("spikes", [0.0, 12.0])
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


fitting = load_script("fitting")
RANK, RATIO, LOAD = "effective_rank D2", "update_ratio", "max_violation"


def examples(n=30, seed=0):
    """Return examples of three faults, each with a characteristic signal, with noise on all signals."""
    random = np.random.default_rng(seed)
    signature = {"low_precision_attention": RANK, "large_rate": RATIO, "no_auxiliary_loss": LOAD}
    for _ in range(n):
        for cause, telling in signature.items():
            scores = {name: float(random.normal(scale=0.3)) for name in (RANK, RATIO, LOAD)}
            scores[telling] += 1.5
            yield scores, cause


def test_known_signatures_are_distinguished_on_new_examples():
    attributor = fitting.fit_attributor(examples())
    right = [attributor.attribute(scores).cause == cause for scores, cause in examples(seed=1)]
    assert np.mean(right) > 0.95


def test_the_evidence_supports_the_cause():
    attributor = fitting.fit_attributor(examples())
    found = attributor.attribute({RANK: 2.0, RATIO: 0.1})
    assert found.cause == "low_precision_attention"
    assert found.evidence[0].startswith("effective_rank D2 has fallen (2 times")
    assert found.message.startswith("This looks like low precision attention: ")
    assert sum(found.probability.values()) == pytest.approx(1)
    assert next(iter(found.probability)) == found.cause
    assert attributor.attribute({RATIO: 2.0}).evidence[0].startswith("update_ratio has risen")


def test_a_saved_attributor_is_opened(tmp_path):
    attributor = fitting.fit_attributor(examples())
    fitting.save_attributor(attributor, tmp_path / "a.json")
    back = Attributor.open(tmp_path / "a.json")
    for scores, _ in examples(3, seed=2):
        before, after = attributor.attribute(scores), back.attribute(scores)
        assert before.cause == after.cause
        assert after.probability[before.cause] == pytest.approx(before.probability[before.cause], abs=1e-3)


def test_a_damaged_file_is_rejected(tmp_path):
    path = tmp_path / "a.json"
    fitting.save_attributor(fitting.fit_attributor(examples(5)), path)
    path.write_text(path.read_text().replace('"large_rate",', ""))
    with pytest.raises(StoreError, check=about("path", path)):
        Attributor.open(path)
    with pytest.raises(StoreError, check=about("path", tmp_path / "absent.json")):
        Attributor.open(tmp_path / "absent.json")
