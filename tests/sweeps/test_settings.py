import json

import numpy as np
import pytest

import workbench as wb
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


def test_names_change_no_identity_but_numbers_do():
    run = settings()
    assert settings(study="x", architecture="b").identity == run.identity
    assert settings(seed=1).identity != run.identity
    assert settings(n_snapshots=10).identity != run.identity


def test_a_cell_is_what_rates_and_seeds_share():
    run = settings()
    other = settings(seed=3, training={"n_steps": 5, "learning_rate": 7.0})
    assert (other.cell, other.configuration) == (run.cell, run.configuration)
    assert settings(training={"n_steps": 5, "learning_rate": 0.1, "warmup": 2}).cell != run.cell
    deeper = settings(model={**SIZE, "n_layers": 3})
    assert deeper.configuration != run.configuration
    assert deeper.cell != run.cell


def test_kss_is_part_of_the_cell_and_named_where_there_is_some():
    plain, shaped = settings(), settings(kss="recommended")
    assert "kss" not in plain.as_dict()
    assert plain.make_kss() is None
    assert isinstance(shaped.make_kss(), wb.KSS)
    assert (shaped.cell != plain.cell, shaped.identity != plain.identity) == (True, True)
    assert shaped.cell != settings(kss="published").cell
    with pytest.raises(OptionError, match="kss is 'strong', expected one of published, recommended"):
        settings(kss="strong")


def test_a_default_said_aloud_is_the_same_configuration():
    assert settings(model={**SIZE, "norm": "pre_ln"}).configuration == settings().configuration


def test_the_seed_reaches_weights_task_and_training():
    run = settings(seed=4)
    assert run.make_model().config.seed == run.make_task().seed == run.plan().seed == 4


def test_a_grid_goes_through_every_combination_in_order():
    runs = small_grid(warmup=[0, 2], d_model=16, schedule="cosine")
    assert len(runs) == 2 * 2 * 2 * 2
    assert [run.architecture for run in runs] == ["Pre-LN"] * 8 + ["No-Norm"] * 8
    assert [run.training["warmup"] for run in runs[:8]] == [0] * 4 + [2] * 4
    assert [run.training["learning_rate"] for run in runs[:4]] == [1e-3, 1e-3, 30.0, 30.0]
    assert [run.seed for run in runs[:2]] == [0, 1]
    assert all(run.model["d_model"] == 16 and run.training["schedule"] == "cosine" for run in runs)
    assert len({run.identity for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": [0.0]}, "learning_rate is 0.0, expected a positive number"),
        ({"learning_rate": [float("nan")]}, "no plain values"),
        ({"learning_rate": []}, "has no rate"),
        ({"depth": 3}, "'depth' is no option of a model"),
        ({"norm": ["pre_ln"]}, "'Pre-LN' sets its norm itself"),
        ({"n_heads": 3}, "does not divide d_model"),
        ({"task": {"name": "sudoku"}}, "'sudoku', expected one of associative_recall"),
        ({"task": {**TASK, "colour": 1}}, "'colour' is no option of the task associative_recall"),
        ({"n_steps": 0}, "n_steps is 0, expected at least 1"),
        ({"optimizer": "Magic"}, "optimizer is 'Magic'"),
    ],
)
def test_impossible_designs_are_refused(changes, said):
    with pytest.raises(OptionError, match=said):
        small_grid(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {**SIZE, "seed": 3}}, "model of 'a' has a seed of its own"),
        ({"training": {"n_steps": 5}}, "has no learning_rate"),
        ({"training": {"n_steps": 5, "learning_rate": 1.0, "speed": 2}}, "'speed' is no setting of a training run"),
        ({"training": {"n_steps": 5, "learning_rate": 1.0, "schedule": abs}}, "no plain values"),
        ({"model": {"make": "nowhere:nothing"}}, "There is no function at 'nowhere:nothing'"),
        ({"model": {"make": "math:pi"}}, "is a float, expected a function"),
        ({"n_snapshots": 1}, "n_snapshots is 1, expected"),
    ],
)
def test_impossible_settings_are_refused(changes, said):
    with pytest.raises(OptionError, match=said):
        settings(**changes)
