"""The known answer alone, and both measurements in two processes with results from ranked_reduction.py."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about
from workbench.errors import OptionError
from workbench.probes.gradient_agreement import GradientVerdict as Verdict
from workbench.probes.reduction import KnownAnswer, contribution, known_answer_all_reduce, received

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def answer(sums, n_ranks, dtype=torch.float32):
    """Return the result if each rank received one of the sums."""
    weights, errors, wrong = np.stack([received(total, n_ranks) for total in sums], axis=1)
    return KnownAnswer(str(dtype).removeprefix("torch."), weights, errors, wrong[:, 0] == 0)


def sent(n_ranks, dtype=torch.float32):
    return [contribution(rank, n_ranks, dtype) for rank in range(n_ranks)]


# The known answer


@settings(deadline=None, max_examples=25)
@given(n_ranks=st.sampled_from([1, 2, 3, 8, 63, 520]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_the_sum_is_exact_in_any_order(n_ranks, dtype, seed):
    order = torch.randperm(n_ranks, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [contribution(rank, n_ranks, dtype) for rank in order]
    while len(parts) > 1:  # alternately a tree and a chain
        pairs = zip(parts[::2], parts[1::2], strict=False)
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [a + b for a, b in pairs] + odd if len(parts) % 3 else [parts[0] + parts[1], *parts[2:]]
    assert torch.equal(parts[0].double(), torch.stack(sent(n_ranks, dtype)).double().sum(0))
    assert answer(parts, n_ranks, dtype).is_exact


@settings(deadline=None, max_examples=25)
@given(n_ranks=st.integers(2, 16), dtype=st.sampled_from(DTYPES), data=st.data())
def test_the_rank_whose_contribution_is_missing_is_named(n_ranks, dtype, data):
    lost = data.draw(st.sets(st.integers(0, n_ranks - 1), min_size=1, max_size=n_ranks))
    total = sum(part * (rank not in lost) for rank, part in enumerate(sent(n_ranks, dtype)))
    found = answer([total] * n_ranks, n_ranks, dtype)
    assert found.missing == found.wrong == tuple(sorted(lost))
    assert found.receivers == tuple(range(n_ranks))
    assert f" {max(lost)} is missing in the sum over {n_ranks} ranks." in found.sentence


@pytest.mark.parametrize("n_bits", [2, 4, 8, 11])
def test_the_bits_of_a_rounded_sum_are_counted(n_bits):
    def rounded(total):
        mantissa, exponent = torch.frexp(total)
        return torch.ldexp((mantissa * 2**n_bits).round() / 2**n_bits, exponent)

    found = answer([rounded(sum(sent(4)))] * 4, 4)
    assert found.n_bits == pytest.approx(n_bits, abs=0.4)
    assert f"is rounded to about {n_bits} significant bits." in found.sentence


def test_one_rounded_contribution_is_named():
    parts = sent(3)
    parts[2] = parts[2].bfloat16().float()
    assert answer([sum(parts)] * 3, 3).sentence == (
        "The contribution of rank 2 to the sum over 3 ranks in float32 is rounded to about 8 significant bits."
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 5, 1023, 1024, 2047])
def test_one_wrong_bit_is_found(dtype, place):
    total = sum(sent(4, dtype))
    bits = total.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[total.element_size()])
    bits[place] ^= 1
    found = answer([sum(sent(4, dtype)), total, sum(sent(4, dtype))], 4, dtype)
    assert found.is_exact is False
    assert found.receivers == (1,)
    assert found.wrong == ((place % 4,) if place < 1024 else ())


def test_a_value_that_is_not_finite_is_wrong():
    total = sum(sent(2))
    total[0] = math.nan
    found = answer([total, sum(sent(2))], 2)
    assert (found.wrong, found.receivers, found.missing) == ((0,), (0,), ())
    assert "rank 0 is wrong on rank 0" in found.sentence


def test_one_process_has_nothing_to_reduce():
    found = known_answer_all_reduce(torch.zeros(3))
    assert (found.n_ranks, found.is_exact) == (0, None)
    assert found.sentence == "There is only one process, so there is nothing to reduce."


def test_an_integer_format_is_rejected():
    with pytest.raises(OptionError, check=about("like.dtype", "int64", ("float16", "bfloat16", "float32", "float64"))):
        known_answer_all_reduce(torch.zeros(1, dtype=torch.int64))


# Two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each rank, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.probes.ranked_reduction", str(folder)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("none", "The sum over 2 ranks in float32 is exact on every rank."),
        ("torch.bfloat16", "The sum over 2 ranks in bfloat16 is exact on every rank."),
        ("torch.float64", "The sum over 2 ranks in float64 is exact on every rank."),
        ("missing", "The contribution of rank 1 is missing in the sum over 2 ranks."),
        ("doubled", "The contribution of rank 1 is wrong: its weight is 2 instead of 1."),
        ("rounded", "The sum over 2 ranks in float32 is rounded to about 8 significant bits."),
        ("one receiver", "The sum over 2 ranks in float32 is wrong on rank 0; no single rank explains it."),
    ],
)
def test_all_ranks_know_what_is_wrong_with_their_sums(ranks, fault, sentence):
    assert [rank["known"][fault].sentence for rank in ranks] == [sentence] * 2


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("scenario", "verdict"),
    [
        ("honest", Verdict.AS_COMPUTED),
        ("accumulated", Verdict.AS_COMPUTED),
        ("bfloat16", Verdict.AS_COMPUTED),
        ("rank missing", Verdict.RANK_MISSING),
        ("lost bucket", Verdict.PARAMETERS_MISSING),
        ("compressed", Verdict.LOW_PRECISION),
        ("late", Verdict.STALE),
        ("corrupted", Verdict.NOT_COMPUTED),
    ],
)
def test_faults_of_ddp_are_distinguished(ranks, scenario, verdict):
    for first, second in zip(*(rank[scenario]["found"] for rank in ranks), strict=True):
        assert first.verdict == second.verdict == verdict
        assert first.sentence == second.sentence
        assert first.missing_ranks == ((1,) if verdict == Verdict.RANK_MISSING else ())
        assert first.delay == (2 if verdict == Verdict.STALE else None)
        assert first.receivers == ((1,) if scenario == "corrupted" else (0, 1))
        if verdict == Verdict.LOW_PRECISION:
            assert first.n_bits == pytest.approx(8, abs=1)
        if scenario == "lost bucket":
            assert 0 < len(first.parameters(verdict)) < len(first.states)
        if verdict == Verdict.AS_COMPUTED:
            assert first.weights == pytest.approx([1, 1], abs=1e-2 if scenario == "bfloat16" else 1e-5)


@pytest.mark.subprocess
def test_ddp_training_is_bitwise_identical(ranks):
    for rank in ranks:
        pairs = zip(rank["honest"]["parameters"], rank["plain"]["parameters"], strict=True)
        assert all(torch.equal(probed, plain) for probed, plain in pairs)


@pytest.mark.subprocess
def test_sharded_parameters_are_rejected(ranks):
    assert "Parameter 0 is sharded over ranks (tensor parallel, ZeRO, or FSDP without model=)" in ranks[0]["sharded"]
