import numpy as np
import pytest

import workbench as wb
from tests.about import about
from tests.small_training import same_weights
from workbench.errors import OptionError

controls = wb.baselines.controls
NAMES = [
    "none", "clip 0.5", "clip 1.0", "spectral norm", "weight norm", "gradient penalty 0.1", "random l2",
    "Jacobian penalty", "activation variance", "SAM 0.05", "SAM 0.10", "Lion", "LAMB", "muP",
]  # fmt: skip


def test_the_table_is_that_of_the_paper():
    assert list(controls()) == NAMES
    assert all(name == control.name for name, control in controls().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_without_norms_trains_under_every_control(make_model, task, name):
    model, settings = controls()[name].prepare(lambda: make_model("none", d_model=32), 5e-3)
    records = list(wb.train(model, task, n_steps=20, **settings))
    assert len(records) == 20
    assert np.isfinite([record.loss for record in records]).all()
    assert records[-1].learning_rate == pytest.approx(5e-3)


@pytest.mark.parametrize("name", ["none", "clip 1.0"])
def test_clipping_is_a_setting_of_the_loop(make_model, task, name):
    model, settings = controls()[name].prepare(make_model, 1e-2)
    expected = make_model()
    list(wb.train(model, task, n_steps=4, **settings))
    list(wb.train(expected, task, n_steps=4, learning_rate=1e-2, clip_norm=1.0 if name == "clip 1.0" else None))
    assert same_weights(model, expected)


def test_learning_rates_may_be_a_fraction_of_the_nominal_one(make_model, task):
    table = controls(rate_factors={"Lion": 0.1, "muP": 2.0})
    for name, rate in {"Lion": 1e-3, "muP": 2e-2, "LAMB": 1e-2}.items():
        model, settings = table[name].prepare(lambda: make_model(d_model=32), 1e-2)
        assert next(wb.train(model, task, n_steps=1, **settings)).learning_rate == pytest.approx(rate)


def test_invalid_options_are_rejected(make_model):
    with pytest.raises(OptionError, check=about("rate_factors", "lion", tuple(NAMES))):
        controls(rate_factors={"lion": 0.1})
    with pytest.raises(OptionError, check=about("rate_factor", 0)):
        controls(rate_factors={"Lion": 0})
    with pytest.raises(OptionError, check=about("base_width", 0)):
        controls(base_width=0)


@pytest.mark.parametrize("name", ["spectral norm", "Jacobian penalty", "SAM 0.05", "LAMB", "muP"])
def test_kss_can_be_combined_with_every_kind_of_control(make_model, task, name):
    """It acts once per step, and changes the parameters."""
    models = []
    for kss in (None, wb.KSS(strength=5.0, interval=2, layers="all")):
        model, settings = controls()[name].prepare(lambda: make_model("none", d_model=32, init_std=0.1), 5e-3)
        records = list(wb.train(model, task, n_steps=4, kss=kss, **settings))
        models.append(model)
    assert [record.shaping.n_acting for record in records] == [2, 0, 2, 0]
    assert not same_weights(*models)
