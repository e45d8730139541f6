import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import says
from workbench.errors import SnapshotError
from workbench.koopman import SnapshotMoments
from workbench.koopman.moments import CHUNK


def pairs(n, d=5, seed=0, offset=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) + offset
    return x.to(dtype), (x + 0.1 * torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype)


def assert_same(one, other, rtol=1e-11):
    assert one.n_snapshots == other.n_snapshots
    for name in ("mean_x", "mean_y", "c_xx", "c_yx", "c_yy"):
        a, b = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


def test_moments_are_numpy_covariances():
    x, y = pairs(200)
    m = SnapshotMoments(5).update(x, y)
    both = np.cov(x.T.numpy(), y.T.numpy())
    np.testing.assert_allclose(m.c_xx, both[:5, :5], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(m.c_yx, both[5:, :5], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(m.c_yy, both[5:, 5:], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(m.mean_y, y.mean(0), rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 1000))
def test_batches_and_merges_give_the_same_as_all_at_once(sizes, seed):
    x, y = pairs(sum(sizes) + 3, seed=seed, offset=100.0)
    whole = SnapshotMoments(5).update(x, y)
    streamed, merged = SnapshotMoments(5), SnapshotMoments(5)
    for part_x, part_y in zip(x.split([*sizes, 3]), y.split([*sizes, 3]), strict=True):
        streamed.update(part_x, part_y)
        merged.merge(SnapshotMoments(5).update(part_x, part_y))
    assert_same(streamed, whole)
    assert_same(merged, whole)


def test_long_batches_are_converted_in_chunks():
    x, y = pairs(2 * CHUNK + 17, d=3, dtype=torch.float32)
    split = SnapshotMoments(3).update(x[:5], y[:5]).update(x[5:], y[5:])
    assert_same(SnapshotMoments(3).update(x, y), split)


def test_small_updates_keep_their_digits():
    x = torch.randn(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e6
    d = torch.randn(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e-4
    m = SnapshotMoments(4).update(x, x + d)
    exact = np.cov(((x + d) - x).T.numpy())
    np.testing.assert_allclose(m.c_dd, exact, rtol=1e-9)
    with pytest.raises(AssertionError):  # a difference of the moments of x and y loses the digits
        np.testing.assert_allclose(m.c_yy - m.c_yx - m.c_yx.T + m.c_xx, exact, rtol=1e-9)


def test_bad_values_are_rejected_and_nothing_is_added():
    x, y = pairs(50)
    m = SnapshotMoments(5, name="layer 3 (h.3)").update(x, y)
    before = m.c_xx.clone()
    bad = y.clone()
    bad[40, 1] = float("inf")
    with pytest.raises(SnapshotError, check=says("The residual stream holds NaN or infinite values in layer")):
        m.update(x, bad)
    assert m.n_snapshots == 50
    assert torch.equal(m.c_xx, before)


def test_moments_of_another_width_are_not_merged():
    with pytest.raises(SnapshotError, check=says("do not fit those of width")):
        SnapshotMoments(5).merge(SnapshotMoments(4))


def test_snapshots_without_values_are_rejected():
    x = torch.ones(4, 5, device="meta")
    with pytest.raises(SnapshotError, check=says("Snapshots of the layer are on the meta device, without")):
        SnapshotMoments(5).update(x, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_unchecked_values_that_are_not_finite_are_reported_later(bad, place):
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(3, 2, 20, 4, generator=generator)
    unchecked, checked = SnapshotMoments(4), SnapshotMoments(4)
    for x, y in pairs:
        unchecked.update(x, y, check_finite=False)
        checked.update(x, y)
    assert bool(unchecked.is_finite)
    assert torch.equal(unchecked.c_yx, checked.c_yx)
    pairs[1, place, 5, 2] = bad
    seen = SnapshotMoments(4)
    for i, (x, y) in enumerate(pairs):
        seen.update(x, y, check_finite=False)
        assert bool(seen.is_finite) == (i < 1)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_without_float64_has_its_moments_on_the_host(device):
    x, y = pairs(40, dtype=torch.float32)
    found = SnapshotMoments(5, device=device).update(x, y)
    assert found.mean_x.device.type == "cpu"
    assert torch.equal(found.c_yx, SnapshotMoments(5).update(x, y).c_yx)
