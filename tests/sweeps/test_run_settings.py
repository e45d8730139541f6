import json

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from tests.sweeps.small_sweeps import SIZE, TASK, small_grid
from workbench.errors import OptionError


def settings(**changes):
    options = {"architecture": "a", "model": SIZE, "task": TASK, "training": {"n_steps": 5, "learning_rate": 0.1}}
    return wb.sweeps.RunSettings(**{**options, **changes})


def test_settings_survive_json():
    run = settings(
        training={"n_steps": np.int64(5), "learning_rate": np.float64(0.1), "optimizer_options": {"betas": (0.9, 0.95)}}
    )
    again = wb.sweeps.RunSettings.from_dict(json.loads(json.dumps(run.as_dict())))
    assert again.as_dict() == run.as_dict()
    assert again.identity == run.identity
    assert again.plan().optimizer_options["betas"] == (0.9, 0.95)


def test_labels_do_not_change_the_identity_but_settings_do():
    run = settings()
    assert settings(study="x", architecture="b").identity == run.identity
    assert settings(seed=1).identity != run.identity
    assert settings(n_snapshots=10).identity != run.identity


def test_a_cell_does_not_depend_on_learning_rate_and_seed():
    run = settings()
    other = settings(seed=3, training={"n_steps": 5, "learning_rate": 7.0})
    assert (other.cell, other.configuration) == (run.cell, run.configuration)
    assert settings(training={"n_steps": 5, "learning_rate": 0.1, "warmup": 2}).cell != run.cell
    deeper = settings(model={**SIZE, "n_layers": 3})
    assert deeper.configuration != run.configuration
    assert deeper.cell != run.cell


def test_kss_is_part_of_the_cell_and_recorded_only_if_set():
    without, shaped = settings(), settings(kss="recommended")
    assert "kss" not in without.as_dict()
    assert without.make_kss() is None
    assert isinstance(shaped.make_kss(), wb.KSS)
    assert (shaped.cell != without.cell, shaped.identity != without.identity) == (True, True)
    assert shaped.cell != settings(kss="published").cell
    with pytest.raises(OptionError, check=about("kss", "strong", ("published", "recommended", ""))):
        settings(kss="strong")


def test_the_seed_is_used_for_parameters_task_and_training():
    run = settings(seed=4)
    assert run.make_model().config.seed == run.make_task().seed == run.plan().seed == 4


def test_a_grid_has_every_combination_in_order():
    runs = small_grid(warmup=[0, 2], d_model=16, schedule="cosine")
    assert len(runs) == 2 * 2 * 2 * 2
    assert [run.architecture for run in runs] == ["Pre-LN"] * 8 + ["No-Norm"] * 8
    assert [run.training["warmup"] for run in runs[:8]] == [0] * 4 + [2] * 4
    assert [run.training["learning_rate"] for run in runs[:4]] == [1e-3, 1e-3, 30.0, 30.0]
    assert [run.seed for run in runs[:2]] == [0, 1]
    assert all(run.model["d_model"] == 16 and run.training["schedule"] == "cosine" for run in runs)
    assert len({run.identity for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"learning_rate": []}, "learning_rate", ()),
        ({"depth": 3}, "depth", 3),
        ({"norm": ["pre_ln"]}, "norm", "pre_ln"),
        ({"n_heads": 3}, "n_heads", 3),
        ({"task": {"name": "sudoku"}}, "task", "sudoku"),
        ({"task": {**TASK, "colour": 1}}, "colour", 1),
    ],
)
def test_invalid_grids_are_rejected(changes, name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        small_grid(**changes)


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"model": {**SIZE, "seed": 3}}, "seed", 3),
        ({"training": {"n_steps": 5}}, "learning_rate", None),
        ({"training": {"n_steps": 5, "learning_rate": 1.0, "speed": 2}}, "speed", 2),
        ({"model": {"make": "nowhere:nothing"}}, "make", "nowhere:nothing"),
        ({"model": {"make": "math:pi"}}, "make", "math:pi"),
    ],
)
def test_invalid_settings_are_rejected(changes, name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        settings(**changes)


@pytest.mark.parametrize("change", [{"learning_rate": float("nan")}, {"schedule": abs}])
def test_settings_that_json_cannot_hold_are_rejected(change):
    with pytest.raises(OptionError, check=about("settings")):
        settings(training={"n_steps": 5, "learning_rate": 1.0, **change})
