import math

import pytest
import torch

import workbench as wb
from tests.small_training import same_weights
from workbench.callbacks.kss import TrustRegion
from workbench.callbacks.kss.trust_region import energy_gain
from workbench.errors import OptionError
from workbench.koopman.moments import SnapshotMoments
from workbench.models.losses import token_loss

#: At this rate the model without normalization is gone within a few dozen steps.
TOO_FAST = {"learning_rate": 0.03, "warmup": 10, "seed": 0}


@pytest.fixture
def no_norm():
    def make():
        return wb.zoo.transformer("none", d_model=32, n_layers=3, n_heads=2, vocab_size=16, max_length=8, seed=2)

    return make


@pytest.fixture
def recall():
    return wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=16, seed=2)


@pytest.mark.parametrize("stretch", [0.5, 1.0, 3.0])
def test_energy_gain_is_the_stretch_of_the_states_about_their_means(stretch):
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    x = torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = stretch * x @ rotation + 5.0
    assert energy_gain(SnapshotMoments(6).update(x, y)) == pytest.approx(stretch, rel=1e-12)


def test_energy_gain_sees_what_the_eigenvalues_do_not():
    # A shear: every eigenvalue is 1, and yet states are lengthened.
    x = torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x @ torch.tensor([[1.0, 0.0], [10.0, 1.0]], dtype=torch.float64)
    moments = SnapshotMoments(2).update(x, y)
    eigenvalues = torch.linalg.eigvals(wb.koopman.dmd.koopman_matrix(moments))
    assert eigenvalues.abs().max() == pytest.approx(1.0, abs=1e-6)
    assert energy_gain(moments) > 5


def test_states_that_do_not_vary_have_no_gain():
    assert math.isnan(energy_gain(SnapshotMoments(2).update(torch.ones(5, 2), torch.ones(5, 2))))


@pytest.mark.parametrize(
    ("before", "after", "broken"),
    [
        ({0: 1.0, 1: 1.0}, {0: 1.9, 1: 2.0}, []),  # inside the band anything goes
        ({0: 1.0, 1: 1.0}, {0: 2.1, 1: 1.0}, [0]),  # out of it in one step
        ({0: 4.0}, {0: 4.9}, []),  # outside already, and within the share
        ({0: 4.0}, {0: 5.1}, [0]),
        ({0: 4.0}, {0: math.nan}, [0]),
        ({0: 4.0}, {0: math.inf}, [0]),
        ({0: math.nan}, {0: 1.5}, []),
        ({0: math.nan}, {0: 9.0}, [0]),
    ],
)
def test_which_updates_are_taken_back(before, after, broken):
    region = TrustRegion(highest=2.0, rise=0.25)
    assert region.broken(before, after) == broken
    assert set(broken) <= set(region.outside(after))


def test_the_size_falls_at_once_and_recovers_step_by_step():
    region = TrustRegion(recovery=1.5, smallest=0.1)
    size = region.next_size(1.0, 1.0, is_broken=True)
    assert size == 0.5
    assert region.next_size(size, 1.0, is_broken=False) == 0.75
    assert region.next_size(0.9, 1.0, is_broken=False) == 1.0
    assert region.next_size(0.15, 3.0, is_broken=True) == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "loss"}, "measure is 'loss', expected one of energy_gain, spectral_radius."),
        ({"recovery": 0.9}, "recovery is 0.9, expected a number of at least 1."),
        ({"highest": math.nan}, "highest is nan, expected a number of at least 0."),
        ({"smallest": 0.0}, "smallest is 0.0, expected a share above 0, at most 1."),
    ],
)
def test_impossible_regions_are_refused(options, message):
    with pytest.raises(OptionError) as error:
        TrustRegion(**options)
    assert str(error.value) == message


@pytest.mark.slow
@pytest.mark.medium
def test_a_run_that_diverges_without_lives_with_it(no_norm, recall):
    *_, alone = wb.train(no_norm(), recall, n_steps=120, **TOO_FAST)
    records = list(wb.train(no_norm(), recall, n_steps=120, kss=wb.KSS.recommended(), **TOO_FAST))
    assert alone.diverged
    assert not records[-1].diverged
    assert len(records) == 120
    taken_back = [record for record in records if record.shaping.n_acting]
    assert taken_back
    # The rate on record is the plan's; what was cut stands beside it.
    assert records[-1].learning_rate == 0.03
    assert min(record.shaping.update_size for record in records) < 1


def test_an_update_that_is_taken_back_leaves_the_weights_bit_for_bit(no_norm, recall):
    model = no_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with wb.KSS.recommended().attach(model, optimizer) as shaper:
        tokens, targets = recall.batch(0)
        token_loss(model(tokens), targets).backward()
        optimizer.step()
        assert shaper.last.n_acting > 0
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 1e6


def test_inside_the_band_training_is_bit_identical(no_norm, recall):
    plain, held = no_norm(), no_norm()
    settings = {"n_steps": 8, "learning_rate": 1e-4, "seed": 0}
    list(wb.train(plain, recall, **settings))
    records = list(wb.train(held, recall, kss=wb.KSS.recommended(), **settings))
    assert all(record.shaping.layers == (0, 1, 2) and not record.shaping.n_acting for record in records)
    assert same_weights(plain, held)


def test_an_update_that_raises_gives_the_rate_back(no_norm, recall):
    model = no_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kss = wb.KSS.recommended()
    with kss.attach(model, optimizer) as shaper:
        shaper._update_size = 0.5
        with pytest.raises(RuntimeError, match="no closure today"):
            optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("no closure today")))
    assert optimizer.param_groups[0]["lr"] == 0.5
