import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import workbench as wb
from tests.sweeps.small_sweeps import SIZE, TASK, small_grid
from workbench.sweeps.execution import count_spikes, outcome

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def rows():
    return [wb.sweeps.make_run(run.as_dict()) for run in small_grid(seed=[0])]


def test_a_divergence_is_recorded(rows):
    diverged = rows[1]
    assert diverged["has_diverged"]
    assert diverged["cause"] in ("loss", "grad_norm", "non-finite")
    assert diverged["divergence_step"] < 5
    assert math.isnan(diverged["accuracy"])


def test_kss_acts_during_training():
    without, shaped = (small_grid(seed=[0], n_steps=12, kss=kss)[1] for kss in ("", "recommended"))
    ends = [wb.sweeps.make_run(run.as_dict()) for run in (without, shaped)]
    assert ends[0]["initial_loss"] == ends[1]["initial_loss"]
    assert ends[0]["final_loss"] != ends[1]["final_loss"]


def test_the_same_settings_yield_the_same_row(rows):
    run = small_grid(seed=[0])[2]
    n_threads = torch.get_num_threads()
    again = wb.sweeps.make_run(json.loads(json.dumps(run.as_dict())))
    assert torch.get_num_threads() == n_threads
    for name, value in rows[2].items():
        if name != "seconds":
            np.testing.assert_array_equal(value, again[name], err_msg=name)


@dataclass
class Record:
    step: int
    loss: float
    grad_norm: float
    accuracy: float = 0.5
    cause: str = ""

    @property
    def diverged(self):
        return bool(self.cause)


def test_predictors_of_table_2_against_their_definition():
    rng = np.random.default_rng(0)
    norms = rng.uniform(1, 2, 130)
    found = outcome([Record(i, 1.0, norm, accuracy=float(i >= 120)) for i, norm in enumerate(norms)])
    assert found["grad_norm_step_100"] == norms[100]
    assert found["grad_norm_variance"] == pytest.approx(np.var(norms[1:101]))
    assert found["n_loss_spikes"] == 0
    assert found["accuracy"] == pytest.approx(10 / 16)  # the last eighth are 16 of 130 steps


def test_the_predictors_of_a_run_that_ends_in_nan_are_infinite():
    found = outcome([Record(0, 1.0, 1.0), Record(1, math.nan, math.nan, math.nan, "non-finite")])
    assert found["grad_norm_step_100"] == math.inf
    assert found["grad_norm_variance"] == math.inf
    assert found["n_loss_spikes"] == 1
    assert found["divergence_step"] == 1
    assert math.isnan(found["final_loss"])


def test_injected_spikes_are_counted():
    rng = np.random.default_rng(1)
    loss = 3 + 0.01 * rng.uniform(-1, 1, 300)  # no value deviates by more than three standard deviations
    assert count_spikes(loss) == 0
    for place in (50, 120, 250):
        loss[place] += 1
    assert count_spikes(loss) == 3
    loss[280] = np.inf
    assert count_spikes(loss) == 4


def test_losses_along_the_run_are_those_of_training():
    runs = small_grid(n_steps=25, n_evaluations=5, n_snapshots=0, learning_rate=[1e-2], seed=[0])
    row = wb.sweeps.make_run(runs[0].as_dict())
    task = runs[0].make_task()
    model = runs[0].make_model()
    losses, held_out = [], []
    for record in wb.train(model, task, n_steps=25, learning_rate=1e-2):
        losses.append(record.loss)
        if record.step % 5 == 4:
            inputs, targets = task.held_out(4096)
            with torch.no_grad():
                logits = model.eval()(inputs)
            held_out.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())))
    np.testing.assert_allclose(row["held_out_loss"], held_out, rtol=1e-5)
    assert row["evaluation_step"].tolist() == [5, 10, 15, 20, 25]
    windows = [np.mean(losses[:10]), np.mean(losses[10:20]), np.mean(losses[20:])]
    np.testing.assert_allclose(row["training_loss"], windows, rtol=1e-5)


def test_without_snapshots_only_the_settings_are_recorded():
    row = wb.sweeps.make_run(small_grid(n_snapshots=0)[0].as_dict())
    assert np.isnan(row["eigenvalue"]).all()
    assert np.isnan(row["near_unit_mass"]).all()
    assert np.isnan(row["rehearsed_rate"])
    assert row["n_layers"] == 2
    assert np.isnan(row["held_out_loss"]).all()


def test_a_run_that_continues_after_a_divergence_counts_as_diverged():
    training = {"n_steps": 6, "learning_rate": 1e-3, "loss_limit": 1e-3, "stops_at_divergence": False}
    run = wb.sweeps.RunSettings(architecture="a", model=SIZE, task=TASK, training=training, n_snapshots=0)
    row = wb.sweeps.make_run(run.as_dict())
    assert row["has_diverged"]
    assert row["divergence_step"] == 0
    assert row["cause"] == "loss"
    assert np.isfinite(row["final_loss"])
