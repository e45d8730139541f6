import dataclasses
import math

import pytest
import torch

import workbench as wb
from tests.small_training import same_weights
from workbench.callbacks.kss import TrustRegion
from workbench.callbacks.kss.penalty import PenaltyShape, layer_penalties
from workbench.koopman.stacked import StackedMoments
from workbench.models.losses import token_loss
from workbench.models.readable_weights import complete

#: At this learning rate the model without normalization diverges within a few dozen steps.
TOO_FAST = {"learning_rate": 0.03, "warmup": 10, "seed": 0}


@pytest.fixture
def no_norm():
    def make():
        return wb.zoo.transformer("none", d_model=32, n_layers=3, n_heads=2, vocab_size=16, max_length=8, seed=2)

    return make


@pytest.fixture
def recall():
    return wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=16, seed=2)


def measured(x, y):
    return complete(layer_penalties([StackedMoments({0: (x, y)})], PenaltyShape(rank=None), gamma=0.4))[0]


@pytest.mark.parametrize("stretch", [0.5, 1.0, 3.0])
def test_energy_gain_is_the_factor_on_the_norm_of_the_centered_states(stretch):
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    x = torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = stretch * x @ rotation + 5.0
    assert measured(x, y).energy_gain == pytest.approx(stretch, rel=1e-12)


def test_energy_gain_covers_amplification_that_eigenvalues_do_not_show():
    # A shear: all eigenvalues are 1, but the norm of the states increases.
    x = torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x @ torch.tensor([[1.0, 0.0], [10.0, 1.0]], dtype=torch.float64)
    assert measured(x, y).spectral_radius == pytest.approx(1.0, abs=1e-6)
    assert measured(x, y).energy_gain > 5


@pytest.mark.parametrize(
    ("before", "after", "violated"),
    [
        ({0: 1.0, 1: 1.0}, {0: 1.9, 1: 2.0}, []),  # any change within the band
        ({0: 1.0, 1: 1.0}, {0: 2.1, 1: 1.0}, [0]),  # out of the band in one step
        ({0: 4.0}, {0: 4.9}, []),  # above the band, with an allowed rise
        ({0: 4.0}, {0: 5.1}, [0]),
        ({0: 4.0}, {0: math.nan}, [0]),
        ({0: 4.0}, {0: math.inf}, [0]),
        ({0: math.nan}, {0: 1.5}, []),
        ({0: math.nan}, {0: 9.0}, [0]),
    ],
)
def test_which_updates_are_undone(before, after, violated):
    region = TrustRegion(highest=2.0, rise=0.25)
    assert region.violated(before, after) == violated
    assert set(violated) <= set(region.outside(after))


def test_the_size_is_reduced_in_one_step_and_recovers_gradually():
    region = TrustRegion(recovery=1.5, smallest=0.1)
    size = region.next_size(1.0, 1.0, is_undone=True)
    assert size == 0.5
    assert region.next_size(size, 1.0, is_undone=False) == 0.75
    assert region.next_size(0.9, 1.0, is_undone=False) == 1.0
    assert region.next_size(0.15, 3.0, is_undone=True) == 0.1


@pytest.mark.slow
@pytest.mark.medium
def test_a_run_that_diverges_without_a_trust_region_converges_with_it(no_norm, recall):
    *_, alone = wb.train(no_norm(), recall, n_steps=120, **TOO_FAST)
    records = list(wb.train(no_norm(), recall, n_steps=120, kss=wb.KSS.recommended(), **TOO_FAST))
    assert alone.diverged
    assert not records[-1].diverged
    assert len(records) == 120
    assert any(record.shaping.n_acting for record in records)
    # The recorded learning rate is the planned one; the reduction is recorded separately.
    assert records[-1].learning_rate == 0.03
    assert min(record.shaping.update_size for record in records) < 1


def test_an_undone_update_leaves_the_parameters_bitwise_unchanged(no_norm, recall):
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


def test_the_learning_rate_is_restored_after_an_update_that_raises(no_norm, recall):
    model = no_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kss = wb.KSS.recommended()
    with kss.attach(model, optimizer) as shaper:
        shaper._update_size = 0.5
        with pytest.raises(RuntimeError, match="closure failed"):
            optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("closure failed")))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("highest", [0.0, 1.4])
def test_the_measurement_before_the_update_may_begin_early(no_norm, recall, highest):
    """Where the last update ended above the band, both measurements are read together; nothing else changes."""
    region = TrustRegion(highest=highest, rise=0.02)

    def trained(is_early):
        model, records = no_norm(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        options = dataclasses.replace(wb.KSS.recommended().options, trust_region=region)
        with wb.KSS.recommended(options=options).attach(model, optimizer) as shaper:
            for i in range(12):
                tokens, targets = recall.batch(i)
                optimizer.zero_grad()
                token_loss(model(tokens), targets).backward()
                shaper._was_outside &= is_early
                optimizer.step()
                records.append((shaper.last.n_acting, shaper.last.update_size, shaper.last.spectral_radius))
        return model, records

    (one, found), (other, expected) = trained(True), trained(False)
    assert repr(found) == repr(expected)
    assert {n > 0 for n, *_ in found} == {True, False}
    assert same_weights(one, other)
