import math

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.callbacks.test_kss_shaper import hooks_of, kss_with
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from workbench.callbacks.kss import KSSOptions, PenaltyShape
from workbench.errors import AnatomyError, OptionError

SETTINGS = {"n_steps": 12, "learning_rate": 1e-2, "warmup": 3, "seed": 5, "flush_every": 6}
MONITORS = (
    "kss_enabled",
    "kss_strength",
    "kss_interval",
    "kss_gamma",
    "kss_penalty",
    "kss_spectral_radius",
    "kss_near_unit_mass",
    "kss_acting",
    "kss_skipped",
)
#: Controls that a user changes after some of the steps.
CHANGES = {2: {"strength": 0.2, "layers": (1,)}, 5: {"interval": 2}, 8: {"enabled": False}, 10: {"enabled": True}}


def small_kss(**options):
    """KSS that acts in every step, on some of the states and layers."""
    return kss_with(**{"strength": 0.1, "layers": "half", "n_snapshots": 48, **options})


def train(model, task, kss, *, stop_at=None, changes=None, **settings):
    """Train, change controls after some steps, stop early as a user may do, and return the records."""
    records = []
    loop = wb.train(model, task, kss=kss, **settings)
    for record in loop:
        records.append(record)
        if kss is not None:
            kss.set(**(changes or {}).get(record.step, {}))
        if record.step == stop_at:
            break
    loop.close()
    return records


@pytest.mark.parametrize("off", [{"enabled": False}, {"strength": 0.0}], ids=str)
def test_with_kss_switched_off_training_is_as_without_it(task, off):
    plain, model = dropout_model(), dropout_model()
    expected = train(plain, task, None, **SETTINGS)
    kss = small_kss()
    kss.set(**off)
    found = train(model, task, kss, **SETTINGS)
    assert same_weights(model, plain)
    assert [(r.loss, r.grad_norm) for r in found] == [(r.loss, r.grad_norm) for r in expected]
    assert {r.kss_enabled for r in found} == {kss.enabled}
    assert {r.kss_strength for r in found} == {kss.strength}
    assert not expected[0].kss_enabled
    assert math.isnan(expected[0].kss_strength)


def test_loss_and_gradient_norm_are_those_of_the_task(make_model, task):
    """KSS changes the parameters, and only through them the later steps."""
    plain, model = make_model("none"), make_model("none")
    first, *_ = train(plain, task, None, n_steps=2)
    with_kss, *_ = train(model, task, kss_with(), n_steps=2)
    assert (with_kss.loss, with_kss.grad_norm) == (first.loss, first.grad_norm)
    assert not same_weights(model, plain)


@pytest.mark.medium
def test_what_the_run_records(make_model, task, tmp_path):
    kss = kss_with(strength=0.5, interval=3)
    records = train(
        make_model("none"),
        task,
        kss,
        store=tmp_path / "run.zarr",
        changes={3: {"strength": 0.25, "gamma": 0.3}},
        **SETTINGS,
    )
    monitors = wb.open_run(tmp_path / "run.zarr")["monitors"]
    assert set(MONITORS) <= set(monitors.data_vars)
    is_due = np.arange(12) % 3 == 0
    assert monitors["kss_enabled"].values.all()
    assert monitors["kss_strength"].values.tolist() == [0.5] * 4 + [0.25] * 8
    assert monitors["kss_gamma"].values.tolist() == [0.4] * 4 + [0.3] * 8
    assert monitors["kss_interval"].values.tolist() == [3] * 12
    for name in ("kss_penalty", "kss_spectral_radius", "kss_near_unit_mass"):
        assert (np.isfinite(monitors[name].values) == is_due).all()
    assert monitors["kss_acting"].values.tolist() == [2 * due for due in is_due]
    assert monitors["kss_skipped"].values.tolist() == [0] * 12
    assert monitors["kss_penalty"].attrs["units"] == "1"
    assert [r.kss_strength for r in records] == monitors["kss_strength"].values.tolist()
    events = wb.open_run(tmp_path / "run.zarr")["events"]
    rows = zip(*(events[name].values.tolist() for name in ("step", "kind", "source", "message")), strict=True)
    assert [row for row in rows if row[1] == "kss"] == [
        (4, "kss", "kss", "strength 0.5 -> 0.25"),
        (4, "kss", "kss", "gamma 0.4 -> 0.3"),
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("coupling", "stop_at"),
    [
        ("gradient", 5),
        ("trust_region", 5),
        pytest.param("decoupled", 5, marks=pytest.mark.slow),
        pytest.param("projection", 5, marks=pytest.mark.slow),
        pytest.param("gradient", 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(make_model, task, tmp_path, coupling, stop_at):
    """Controls are changed before, at and after the interruption."""

    def new():
        return make_model("none"), small_kss(coupling=coupling)

    uninterrupted, kss = new()
    settings = {**SETTINGS, "changes": CHANGES, "checkpoint_every": 5}
    train(uninterrupted, task, kss, store=tmp_path / "uninterrupted.zarr", **settings)
    strength = kss.strength
    model, kss = new()
    train(model, task, kss, store=tmp_path / "run.zarr", stop_at=stop_at, **settings)
    resumed, kss = new()
    kss.set(strength=9.0, gamma=0.9)  # overridden by the checkpoint
    records = train(resumed, task, kss, store=tmp_path / "run.zarr", resume=True, **settings)
    assert records[0].step == stop_at + 1
    assert same_weights(resumed, uninterrupted)
    assert kss.strength == strength
    assert kss.gamma == 0.4
    one, other = (wb.open_run(tmp_path / f"{name}.zarr") for name in ("run", "uninterrupted"))
    assert one["monitors"].to_dataset().identical(other["monitors"].to_dataset())

    def changes_of(run):
        events = run["events"]
        rows = zip(*(events[name].values.tolist() for name in ("step", "kind", "message")), strict=True)
        return [row for row in rows if row[1] == "kss"]

    assert changes_of(one) == changes_of(other)
    assert len(changes_of(one)) == 5


def test_hooks_end_with_the_run_however_it_ends(make_model, task):
    model = make_model("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = hooks_of(model, optimizer)
    train(model, task, kss_with(), optimizer=optimizer, n_steps=2)
    assert hooks_of(model, optimizer) == before
    train(model, task, kss_with(), optimizer=optimizer, n_steps=20, stop_at=1)
    assert hooks_of(model, optimizer) == before
    train(model, task, kss_with(), optimizer=optimizer, n_steps=20, loss_limit=1e-3)  # diverges at once
    assert hooks_of(model, optimizer) == before

    def fail(block, args):
        raise ValueError("no more")

    loop = wb.train(model, task, kss=kss_with(), optimizer=optimizer, n_steps=20)
    next(loop)
    handle = model.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no more"):
        list(loop)
    handle.remove()
    assert hooks_of(model, optimizer) == before


def test_what_kss_cannot_read_is_rejected_before_the_store_is_created(make_model, task, tmp_path):
    class Shrinking(torch.nn.Module):
        """A model without residual stream: all layers have different widths."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 32))

        def forward(self, tokens):
            return self.layers(tokens)

    for model, kss, kind, check, options in (
        (Shrinking(), kss_with(), AnatomyError, says("Shrinking"), {}),
        (make_model(), kss_with(layers=(5,)), OptionError, about("layers", 5), {}),
        (make_model(), kss_with(), OptionError, about("optimizer", "LBFGS"), {"optimizer": "LBFGS"}),
    ):
        with pytest.raises(kind, check=check):
            list(wb.train(model, task, kss=kss, n_steps=3, store=tmp_path / "run.zarr", **options))
        assert not (tmp_path / "run.zarr").exists()
        assert all(not module._forward_pre_hooks for module in model.modules())


def radius_of(model, task):
    """Largest spectral radius of the layers, on tokens that are not used for training."""
    spectra = wb.profile(model, task.probe(400), n_snapshots=400, rank=8, progress=False)
    return float(spectra["spectral_radius"].max())


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize(
    ("coupling", "strength", "shape"),
    [
        ("gradient", 5.0, PenaltyShape(rank=8)),
        ("gradient", 5.0, PenaltyShape(rank=8, unstable_term="log", beta=0.0)),
        ("decoupled", 50.0, PenaltyShape(rank=8)),
        ("projection", 1.0, PenaltyShape(rank=8, unstable_term="log", beta=0.0)),
    ],
    ids=["gradient", "gradient log", "decoupled", "projection"],
)
def test_the_spectral_radius_decreases(task, coupling, strength, shape):
    """Compared with strength 0, for the same initial parameters, batches and learning rate."""
    radii = {}
    for value in (0.0, strength):
        model = wb.zoo.transformer(
            "none", d_model=16, n_layers=3, n_heads=2, vocab_size=32, max_length=16, seed=1, init_std=0.12
        )
        start = radius_of(model, task)
        kss = wb.KSS(strength=value, interval=1, layers="all", options=KSSOptions(penalty=shape, coupling=coupling))
        train(model, task, kss, n_steps=15, learning_rate=3e-3)
        radii[value] = radius_of(model, task)
    rise = {value: radius - start for value, radius in radii.items()}
    assert rise[0.0] > 0.2  # otherwise there is nothing to regularize
    assert rise[strength] < 0.5 * rise[0.0]
