"""Comparison of gradients with known ground truth: gradients of several ranks are summed, with or without a fault."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.about import says
from workbench.callbacks.faults.communication import LowPrecisionReduction, ring_sum
from workbench.errors import OptionError
from workbench.probes.gradient_agreement import GradientVerdict as Verdict
from workbench.probes.gradient_agreement import ProjectedGradients
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import project, random_signs

SIZES = (200, 64, 1, 30, 2, 500, 16, 8)
SIGNS = random_signs(0)


def gradients(n_ranks, seed=0, *, sizes=SIZES, dtype=torch.float32, signal=1.0, least=-9):
    """Return gradients of each rank and parameter: a common part and noise, of magnitudes from 10^least to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.linspace(least, 3, len(sizes))[torch.randperm(len(sizes), generator=generator)]
    common = [torch.randn(n, generator=generator) for n in sizes]
    return [
        [
            (scale * (signal * each + torch.randn(each.shape, generator=generator))).to(dtype)
            for each, scale in zip(common, scales, strict=True)
        ]
        for _ in range(n_ranks)
    ]


def added(ranks):
    """Return the mean over ranks as in DDP: each rank divides in the format of the gradients, then they are summed."""
    means = []
    for parts in zip(*ranks, strict=True):
        total = parts[0] / len(parts)
        for part in parts[1:]:
            total = total + part / len(parts)
        means.append(total)
    return means


def projected(tensors):
    return np.concatenate([project(tensor[None], SIGNS[:, : len(tensor)]).numpy() for tensor in tensors])


def step(ranks, received, *, on_rank=None, passes=None):
    """Return the projections of a step; ``on_rank``: received by single ranks instead; ``passes``: backward passes."""
    local = np.stack([projected(rank) for rank in ranks])
    taken = [projected((on_rank or {}).get(rank, received))[:, :-1] for rank in range(len(ranks))]
    return ProjectedGradients(
        computed=local[..., :-1],
        accumulated=local[..., :-1],
        received=np.stack(taken),
        size=local[..., -1],
        n_elements=np.array([tensor.numel() for tensor in ranks[0]]),
        formats=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in ranks[0]),
        n_passes=1 if passes is None else len(passes),
        passes=None if passes is None else np.stack([projected(each)[:, :-1] for each in passes]),
    )


FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    n_ranks=st.integers(1, 9),
    dtype=st.sampled_from(sorted(FORMATS)),
    exponent=st.integers(-30, 30),
    signal=st.sampled_from([0.0, 1.0, 10.0]),
    least=st.sampled_from([-9, -42]),  # 1e-42 is below the smallest normal number of float32
    data=st.data(),
)
def test_correct_sums_are_as_computed_at_any_scale_and_in_any_format(
    seed, n_ranks, dtype, exponent, signal, least, data
):
    ranks = gradients(n_ranks, seed, dtype=FORMATS[dtype], signal=signal, least=least)
    for rank in ranks:
        for i in data.draw(st.sets(st.integers(0, len(SIZES) - 1))):  # no gradient on this rank, like an unused expert
            rank[i] = torch.zeros_like(rank[i])
    scale = 1.7 * 2.0 ** (exponent if dtype != "float16" else -abs(exponent) // 10)
    received = [mean * scale for mean in added(ranks)]
    found = compare_gradients(step(ranks, received))
    assert found.verdict in (Verdict.AS_COMPUTED, Verdict.NOT_MEASURED)
    # Numbers below the smallest normal one have few digits, and so has their scale.
    if dtype in ("float32", "float64") and least > -42 and found.verdict == Verdict.AS_COMPUTED:
        assert found.scale == pytest.approx(scale, rel=1e-4)
        assert (found.weights[np.isfinite(found.weights)] == pytest.approx(1, abs=0.3)) or n_ranks == 1
        assert found.missing_ranks == ()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n_ranks=st.integers(2, 6),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    lost=st.sets(st.integers(0, len(SIZES) - 1), min_size=1, max_size=len(SIZES)),
)
@example(seed=0, n_ranks=2, dtype="float32", lost={0, 1, 3, 4, 5, 6, 7})
def test_exactly_the_lost_parameters_are_named(seed, n_ranks, dtype, lost):
    ranks = gradients(n_ranks, seed, dtype=FORMATS[dtype])
    received = [torch.zeros_like(g) if i in lost else 0.3 * g for i, g in enumerate(added(ranks))]
    found = compare_gradients(step(ranks, received))
    judged = {i for i, state in enumerate(found.states) if state != Verdict.NOT_MEASURED}
    assert set(found.parameters(Verdict.PARAMETERS_MISSING)) == lost & judged
    everything = set(range(len(SIZES)))
    # Parameter 2 has only one number, which agrees with any scale.
    hidden = {2} if everything - lost == {2} else set()
    assert dtype == "bfloat16" or judged == everything - hidden
    assert all(found.states[i] == Verdict.AS_COMPUTED for i in judged - lost)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n_ranks=st.integers(2, 6),
    share=st.sampled_from(["all", "some"]),
    data=st.data(),
)
def test_the_rank_whose_gradients_are_missing_is_named(seed, n_ranks, share, data):
    ranks, rank = gradients(n_ranks, seed), data.draw(st.integers(0, n_ranks - 1))
    lost = range(len(SIZES)) if share == "all" else (0, 3, 5)
    sent = [[0 * g if r == rank and i in lost else g for i, g in enumerate(of)] for r, of in enumerate(ranks)]
    found = compare_gradients(step(ranks, [7.0 * g for g in added(sent)]))
    assert found.verdict == Verdict.RANK_MISSING
    assert found.missing_ranks == (rank,)
    assert set(lost) - {2, 4} <= set(found.parameters(Verdict.RANK_MISSING)) <= set(lost)
    expected = np.ones(n_ranks)
    expected[rank] = 0
    assert found.weights == pytest.approx(expected, abs=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n_passes=st.integers(2, 6),
    share=st.sampled_from(["all", "some"]),
    scale=st.sampled_from([0.25, 1.0, 7.0]),
    data=st.data(),
)
def test_the_backward_pass_whose_gradients_are_missing_is_named(seed, n_passes, share, scale, data):
    passes, missing = gradients(n_passes, seed), data.draw(st.integers(0, n_passes - 1))
    lost = range(len(SIZES)) if share == "all" else (0, 3, 5)
    whole = [sum(parts) for parts in zip(*passes, strict=True)]
    sent = [total - passes[missing][i] if i in lost else total for i, total in enumerate(whole)]
    known = step([whole], [scale * g for g in sent], passes=passes)
    found = compare_gradients(known)
    assert (found.verdict, found.missing_passes) == (Verdict.PASS_MISSING, (missing,))
    assert set(lost) - {2, 4} <= set(found.parameters(Verdict.PASS_MISSING)) <= set(lost)
    assert f"backward pass {missing} of the step" in found.sentence
    sound = compare_gradients(step([whole], [scale * g for g in whole], passes=passes))
    assert (sound.verdict, sound.missing_passes) == (Verdict.AS_COMPUTED, ())
    assert compare_gradients(replace(known, passes=None)).missing_passes == ()


def test_two_buckets_may_miss_different_ranks():
    ranks = gradients(4)
    sent = [
        [0 * g if (r, i) in ((1, 0), (1, 1), (3, 5), (3, 6)) else g for i, g in enumerate(of)]
        for r, of in enumerate(ranks)
    ]
    found = compare_gradients(step(ranks, added(sent)))
    assert found.missing_ranks == (1, 3)
    assert found.parameters(Verdict.RANK_MISSING) == (0, 1, 5, 6)


def test_unequal_weights_of_ranks_are_estimated():
    ranks = gradients(3)
    weights = (1.0, 1.0, 2.5)
    received = added([[weight * g for g in of] for weight, of in zip(weights, ranks, strict=True)])
    found = compare_gradients(step(ranks, received))
    assert found.verdict == Verdict.RANKS_UNEQUAL
    assert found.weights / found.weights[0] == pytest.approx(weights, rel=1e-3)
    assert "are weighted unequally, by 0.4 to 1, in 7 of 7 parameters." in found.sentence


@pytest.mark.parametrize("n_ranks", [8, 16])
def test_in_a_coarse_format_a_missing_rank_is_found_from_all_parameters_jointly(n_ranks):
    """Rounding explains the difference in each single parameter."""
    sizes = (400,) * 40
    ranks = gradients(n_ranks, sizes=sizes, dtype=torch.bfloat16)
    sent = [[0 * g if r == 5 else g for g in of] for r, of in enumerate(ranks)]
    found = compare_gradients(step(ranks, added(sent)))
    assert (found.verdict, found.missing_ranks) == (Verdict.RANK_MISSING, (5,))
    assert compare_gradients(step(ranks, added(ranks))).verdict == Verdict.AS_COMPUTED


@pytest.mark.parametrize("age", [1, 5])
@pytest.mark.parametrize("stale", [range(8), (0, 3)])
def test_the_age_of_stale_gradients_is_found_with_earlier_steps(age, stale):
    steps = [gradients(2, seed) for seed in range(7)]
    earlier = [step(ranks, added(ranks)) for ranks in steps[5::-1]]  # the latest first
    now, before = added(steps[6]), added(steps[6 - age])
    received = [3.0 * (before if i in stale else now)[i] for i in range(len(now))]
    found = compare_gradients(step(steps[6], received), earlier)
    assert (found.verdict, found.delay) == (Verdict.STALE, age)
    assert found.parameters(Verdict.STALE) == tuple(stale)
    unknown = compare_gradients(step(steps[6], received))
    assert unknown.verdict == Verdict.NOT_COMPUTED
    assert unknown.delay is None


@pytest.mark.parametrize("n_bits", range(7))
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_the_significant_bits_after_a_reduction_are_counted(n_bits, n_ranks):
    fault = LowPrecisionReduction(n_ranks=n_ranks, n_bits=n_bits)
    ranks = gradients(n_ranks, sizes=(400,) * 20)
    received = [ring_sum(parts, fault) / n_ranks for parts in zip(*ranks, strict=True)]
    found = compare_gradients(step(ranks, received))
    assert found.verdict == Verdict.LOW_PRECISION
    assert found.n_bits == pytest.approx(8 - n_bits, abs=1)
    assert f"about {round(found.n_bits)} significant bit" in found.sentence


def test_underflow_in_a_coarser_format_counts_as_low_precision():
    ranks = gradients(2, sizes=(400,) * 20, least=-2)
    for rank in ranks:
        rank[3] *= 1e-9 / rank[3].norm()
    received = [(a.half() + b.half()).float() for a, b in zip(*ranks, strict=True)]
    assert not received[3].any()
    found = compare_gradients(step(ranks, received))
    assert found.verdict == Verdict.LOW_PRECISION
    assert found.n_bits == pytest.approx(11, abs=1)


def flip_exponent(gradient):
    gradient = gradient.clone()
    gradient.view(torch.int32)[0] ^= 1 << 24
    return gradient


CORRUPTIONS = {
    "one flipped bit of one exponent": lambda g: [*g[:5], flip_exponent(g[5]), *g[6:]],
    "permuted elements": lambda g: [*g[:5], g[5].flip(0), *g[6:]],
    "the sign": lambda g: [*g[:5], -g[5], *g[6:]],
    "not finite": lambda g: [*g[:5], g[5] / 0, *g[6:]],
    "noise": lambda g: [*g[:5], g[5] + 1e-3 * g[5].norm() * torch.ones(500), *g[6:]],
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_only_the_corrupted_parameter_is_named(kind):
    ranks = gradients(3)
    found = compare_gradients(step(ranks, CORRUPTIONS[kind](added(ranks))))
    assert found.verdict == Verdict.NOT_COMPUTED
    assert found.parameters(Verdict.NOT_COMPUTED) == (5,)
    assert found.scale == pytest.approx(1, rel=1e-6)


def test_a_minority_does_not_shift_the_common_scale():
    """The other parameters may be wrong in any way, and may have most of the norm."""
    ranks = gradients(2)
    mean = [0.01 * g for g in added(ranks)]
    received = [0 * mean[0], 5 * mean[1], mean[2], mean[3], mean[4], mean[5].flip(0), mean[6], mean[7]]
    found = compare_gradients(step(ranks, received))
    assert found.scale == pytest.approx(0.01, rel=1e-5)
    assert found.parameters(Verdict.AS_COMPUTED) == (2, 3, 4, 6, 7)
    assert found.parameters(Verdict.SCALED) == (1,)


@pytest.mark.parametrize("n_clipped", [3, 8])
def test_clipping_single_parameters_is_not_a_fault(n_clipped):
    ranks = gradients(2)
    received = [g / g.norm() if i < n_clipped else g for i, g in enumerate(added(ranks))]
    found = compare_gradients(step(ranks, received))
    assert found.verdict == Verdict.SCALED
    assert not found.verdict.is_fault
    assert len(found.parameters(Verdict.SCALED)) >= min(n_clipped, 7)


def test_a_single_rank_may_receive_other_gradients():
    ranks = gradients(3)
    mean = added(ranks)
    found = compare_gradients(step(ranks, mean, on_rank={1: [0 * mean[0], *mean[1:]]}))
    assert (found.verdict, found.receivers) == (Verdict.PARAMETERS_MISSING, (1,))
    assert "in 1 of 8 parameters on rank 1." in found.sentence


def test_ranks_with_equal_gradients_have_equal_weights():
    """Parallel gradients cannot be attributed to a rank."""
    ranks = gradients(1) * 4
    found = compare_gradients(step(ranks, added(ranks)))
    assert found.verdict == Verdict.AS_COMPUTED
    assert found.weights == pytest.approx(np.ones(4))


def test_discarded_gradients_are_not_expected():
    """Only the second pass of SAM is used, for which the parameters have moved; without that fact nothing is said."""
    ranks = gradients(2)
    first = gradients(2, 1)
    both = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(ranks, first, strict=True)]
    found = step(ranks, added(ranks))
    whole = step(both, added(ranks)).computed
    moved = replace(found, computed=whole, has_moved=True)
    assert compare_gradients(moved).verdict == Verdict.AS_COMPUTED
    assert compare_gradients(replace(moved, has_moved=None)).verdict == Verdict.NOT_MEASURED
    assert compare_gradients(replace(moved, has_moved=False)).verdict == Verdict.NOT_MEASURED
    alone = replace(moved, has_moved=False, is_last_alone=np.ones(found.n_elements.shape, dtype=bool))
    assert compare_gradients(alone).verdict == Verdict.DISCARDED
    assert compare_gradients(replace(alone, is_left_over=alone.is_last_alone)).verdict == Verdict.NOT_CLEARED
    assert compare_gradients(replace(found, computed=whole, accumulated=whole)).verdict.is_fault


def test_a_gradient_that_no_rank_computed_is_found():
    ranks = gradients(2)
    mean = added(ranks)
    for rank in ranks:
        rank[5] = torch.zeros_like(rank[5])
    assert compare_gradients(step(ranks, mean)).parameters(Verdict.NOT_COMPUTED) == (5,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: replace(one, n_passes=0), "no backward pass reached"),
        (lambda one: replace(one, computed=one.computed * np.inf), "not finite"),
        (lambda one: replace(one, computed=one.computed * 0, size=one.size * 0, received=one.received * 0), "no param"),
        (
            lambda one: replace(
                one, formats=("bfloat16",) * 8, n_passes=10_000, received=one.received + one.size[..., None]
            ),
            "rounding explains",
        ),
    ],
)
def test_steps_that_cannot_be_measured_have_a_reason(change, reason):
    ranks = gradients(2)
    one = change(step(ranks, added(ranks)))
    found = compare_gradients(replace(one, accumulated=one.computed))
    assert found.verdict == Verdict.NOT_MEASURED
    assert reason in found.sentence
    assert np.isnan(found.residual).all()
    assert math.isnan(found.scale)


def test_earlier_steps_of_other_parameters_are_rejected():
    ranks, fewer = gradients(2), gradients(2, sizes=(3, 4))
    with pytest.raises(OptionError, check=says("pass steps of the same parameters and ranks.")):
        compare_gradients(step(ranks, added(ranks)), [step(fewer, added(fewer))])
