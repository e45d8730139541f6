import json
import math

import numpy as np
import pytest

from workbench.callbacks.alarms import Calibration, DetectorOptions
from workbench.errors import OptionError, StoreError

GROUPS = {"a": "mechanism", "b": "mechanism", "loss": "outcome"}


def healthy(n, seed=0):
    random = np.random.default_rng(seed)

    def kinds(scale):
        return {"level": random.exponential(scale), "change": random.exponential(scale)}

    return [{"a": kinds(1), "b": kinds(9), "loss": {"level": random.exponential()}} for _ in range(n)]


def worst(calibration, run, group):
    return max(
        float(calibration.score(name, kind, np.array(value)))
        for name, kinds in run.items()
        if GROUPS[name] == group
        for kind, value in kinds.items()
    )


@pytest.mark.parametrize("group", ["mechanism", "outcome"])
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_fresh_healthy_runs_alarm_as_often_as_the_budget_says(group, budget):
    calibration = Calibration.of(healthy(200), DetectorOptions(), groups=GROUPS)
    threshold = calibration.threshold(budget, group=group)
    share = np.mean([worst(calibration, run, group) >= threshold for run in healthy(2000, seed=1)])
    # 200 runs know a quantile to about sqrt(b (1 - b) / 200).
    assert share == pytest.approx(budget, abs=4 * math.sqrt(budget * (1 - budget) / 200))


def test_thresholds_rise_as_the_budget_falls_also_beyond_what_the_runs_show():
    calibration = Calibration.of(healthy(30), DetectorOptions(), groups=GROUPS)
    budgets = [0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001]
    thresholds = [calibration.threshold(budget) for budget in budgets]
    assert thresholds == sorted(thresholds)
    assert thresholds[-1] > thresholds[-2] > calibration.highest["mechanism"][-1]


def test_the_scale_of_a_signal_is_what_healthy_runs_hardly_reach():
    runs = [{"a": {"level": value}} for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    calibration = Calibration.of(runs, DetectorOptions(), groups=GROUPS)
    values = np.arange(1.0, 7.0)
    assert calibration.scale["a"]["level"] == pytest.approx(values.mean() + 3 * values.std(ddof=1))
    assert np.isnan(calibration.score("unknown", "level", np.array(1.0)))
    # A signal that never moves has a scale all the same.
    still = Calibration.of([{"a": {"level": 0.0}}] * 6, DetectorOptions(), groups=GROUPS)
    assert still.scale["a"]["level"] > 0


def test_it_is_read_as_it_was_written(tmp_path):
    calibration = Calibration.of(healthy(12), DetectorOptions(smooth=7), groups=GROUPS, about="twelve runs")
    back = Calibration.open(calibration.save(tmp_path / "c.json"))
    assert back.options == calibration.options
    assert back.about == "twelve runs"
    assert back.threshold(0.1) == pytest.approx(calibration.threshold(0.1), rel=1e-5)
    with pytest.raises(StoreError, match="exists|taken|there"):
        calibration.save(tmp_path / "c.json")


def test_bad_input_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(OptionError, match="There are 3 healthy runs to calibrate with, expected at least 5"):
        Calibration.of(healthy(3), DetectorOptions(), groups=GROUPS)
    calibration = Calibration.of(healthy(6), DetectorOptions(), groups=GROUPS)
    for budget in (0, 1, -0.1, math.nan):
        with pytest.raises(OptionError, match="budget is"):
            calibration.threshold(budget)
    with pytest.raises(StoreError, match="is no calibration of alarms"):
        Calibration.open(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text(json.dumps({"scale": 1}))
    with pytest.raises(StoreError, match="is no calibration of alarms"):
        Calibration.open(tmp_path / "other.json")
