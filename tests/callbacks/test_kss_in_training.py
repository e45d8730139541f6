import math
import threading

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.test_kss_shaper import hooks_of, kss_with
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from workbench.callbacks.kss import BandController, KSSOptions, PenaltyShape
from workbench.errors import AnatomyError, OptionError, StoreError

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
#: What a user turns after some of the steps.
TURNS = {2: {"strength": 0.2, "layers": (1,)}, 5: {"interval": 2}, 8: {"enabled": False}, 10: {"enabled": True}}


def small_kss(**options):
    """KSS in every step, on a part of the states and layers."""
    return kss_with(**{"strength": 0.1, "layers": "half", "n_snapshots": 48, **options})


def train(model, task, kss, *, stop_at=None, turns=None, **settings):
    """Train, turn controls after some steps, and stop like a user who closes the notebook; the records."""
    records = []
    loop = wb.train(model, task, kss=kss, **settings)
    for record in loop:
        records.append(record)
        if kss is not None:
            kss.set(**(turns or {}).get(record.step, {}))
        if record.step == stop_at:
            break
    loop.close()
    return records


@pytest.mark.parametrize("off", [{"enabled": False}, {"strength": 0.0}], ids=str)
def test_switched_off_training_is_what_it_is_without(task, off):
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


def test_loss_and_gradient_norm_stay_the_task_s(make_model, task):
    """KSS changes the weights, and through them alone what comes later."""
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
        turns={3: {"strength": 0.25, "gamma": 0.3}},
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


def test_a_button_in_another_thread_acts_from_the_next_step_on(make_model, task):
    kss, is_off = kss_with(), threading.Event()
    loop = wb.train(make_model("none"), task, kss=kss, n_steps=400)

    def press():
        kss.enabled = False
        is_off.set()

    states = []
    for record in loop:
        states.append(record.kss_enabled)
        if record.step == 3:
            threading.Thread(target=press).start()
            is_off.wait()
        if record.step == 6:
            break
    loop.close()
    assert states == [True] * 4 + [False] * 3


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
def test_resuming_gives_the_bits_of_running_through(make_model, task, tmp_path, coupling, stop_at):
    """With controls that were turned before, at and after the place, and a controller that turns one of them."""

    def fresh():
        return make_model("none"), small_kss(
            coupling=coupling, controller=BandController(low=0.0, high=1.0, factor=1.1)
        )

    through, kss = fresh()
    settings = {**SETTINGS, "turns": TURNS, "checkpoint_every": 5}
    train(through, task, kss, store=tmp_path / "through.zarr", **settings)
    strength = kss.strength
    model, kss = fresh()
    train(model, task, kss, store=tmp_path / "run.zarr", stop_at=stop_at, **settings)
    resumed, kss = fresh()
    kss.set(strength=9.0, gamma=0.9)  # what the checkpoint says holds
    records = train(resumed, task, kss, store=tmp_path / "run.zarr", resume=True, **settings)
    assert records[0].step == stop_at + 1
    assert same_weights(resumed, through)
    assert kss.strength == strength
    assert kss.gamma == 0.4
    one, other = (wb.open_run(tmp_path / f"{name}.zarr") for name in ("run", "through"))
    assert one["monitors"].to_dataset().identical(other["monitors"].to_dataset())

    def turned(run):
        events = run["events"]
        rows = zip(*(events[name].values.tolist() for name in ("step", "kind", "message")), strict=True)
        return [row for row in rows if row[1] == "kss"]

    assert turned(one) == turned(other)
    assert len(turned(one)) == 5


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"coupling": "decoupled"}, "kss.coupling = gradient, this call says decoupled"),
        ({"penalty": PenaltyShape(rank=None, beta=2.0)}, "kss.penalty.beta = 1.0, this call says 2.0"),
        ({"controller": BandController(high=3.0)}, "kss.controller.quantity = nothing, this call says spectral_radius"),
        ({"n_snapshots": 100}, "kss.n_snapshots = 48, this call says 100"),
    ],
)
def test_other_options_are_refused_by_name(make_model, task, tmp_path, change, sentence):
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 4}
    train(make_model(), task, small_kss(), stop_at=6, **settings)
    model = make_model()
    before = hooks_of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(StoreError, match=sentence):
        wb.train(model, task, kss=small_kss(**change), resume=True, **settings)
    with pytest.raises(StoreError, match=r"kss\.penalty\.upper = 1\.05, this call says nothing"):
        wb.train(model, task, resume=True, **settings)
    assert hooks_of(model, torch.optim.SGD(model.parameters())) == before
    assert same_weights(model, make_model())


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


def test_what_kss_cannot_read_is_refused_before_the_store_is_made(make_model, task, tmp_path):
    class Shrinking(torch.nn.Module):
        """No residual stream: every layer has another width."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 32))

        def forward(self, tokens):
            return self.layers(tokens)

    for model, kss, error, sentence in (
        (Shrinking(), kss_with(), AnatomyError, "Shrinking"),
        (make_model(), kss_with(layers=(5,)), OptionError, "layer 5, but the model has layers 0 to 1"),
        (make_model(), kss_with(), OptionError, "KSS cannot act inside LBFGS"),
    ):
        options = {"optimizer": "LBFGS"} if "LBFGS" in sentence else {}
        with pytest.raises(error, match=sentence):
            list(wb.train(model, task, kss=kss, n_steps=3, store=tmp_path / "run.zarr", **options))
        assert not (tmp_path / "run.zarr").exists()
        assert all(not module._forward_pre_hooks for module in model.modules())


def radius_of(model, task):
    """Largest over the layers, on tokens that training does not see."""
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
def test_the_spectral_radius_falls(task, coupling, strength, shape):
    """Side by side with strength 0: same weights, batches and rate."""
    radii = {}
    for dose in (0.0, strength):
        model = wb.zoo.transformer(
            "none", d_model=16, n_layers=3, n_heads=2, vocab_size=32, max_length=16, seed=1, init_std=0.12
        )
        start = radius_of(model, task)
        kss = wb.KSS(strength=dose, interval=1, layers="all", options=KSSOptions(penalty=shape, coupling=coupling))
        train(model, task, kss, n_steps=15, learning_rate=3e-3)
        radii[dose] = radius_of(model, task)
    risen = {dose: radius - start for dose, radius in radii.items()}
    assert risen[0.0] > 0.2  # so that there is something to hold down
    assert risen[strength] < 0.5 * risen[0.0]
