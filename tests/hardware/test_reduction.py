from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hardware.known_gradients import Known, emulation
from workbench.hardware.emulation import GradientLayout, NotMeasured, ShareGradients, Terms, compare
from workbench.hardware.number_formats import (
    accumulation_error,
    accumulation_shrinkage,
    allreduce_error,
    allreduce_shrinkage,
    bucket_layout,
    measure_sum,
    plan_buckets,
    reduced,
    reduction_order,
    running_sum,
    tree_sum,
)

EPS = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}


def as_terms(values: torch.Tensor) -> Terms:
    n = values.shape[1]
    return Terms(values, torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64), 1, True)


def test_a_bfloat16_buffer_stops_at_256_ones() -> None:
    ones = torch.ones(1024, 3)
    assert running_sum(ones, "bfloat16").tolist() == [256.0] * 3
    assert tree_sum(ones, "bfloat16").tolist() == [1024.0] * 3
    assert running_sum(ones, "float32").tolist() == [1024.0] * 3
    found = measure_sum(as_terms(ones), "bfloat16", 1.0, running_sum)
    assert found.shrinkage == found.relative_error == 0.75
    assert found.cosine == pytest.approx(1.0)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(2, 40),
    dtype=st.sampled_from([*EPS]),
    order=st.sampled_from(["ring", "tree"]),
    seed=st.integers(0, 99),
)
def test_sums_are_within_their_error_bound(n: int, dtype: str, order: str, seed: int) -> None:
    terms = torch.randn(n, 50, generator=torch.Generator().manual_seed(seed))
    found = reduced(terms, dtype, order).double()
    # Each term and each of n - 1 sums is rounded: gamma_n of Higham, Accuracy and Stability, eq. 4.4.
    unit = EPS[dtype]
    bound = n * unit / (1 - n * unit) * terms.double().abs().sum(0)
    assert bool(((found - terms.double().sum(0)).abs() <= bound).all())


def test_a_comparison_states_the_missing_fraction_and_the_block() -> None:
    reference = torch.tensor([3.0, 4.0, 0.0, 10.0])
    found = torch.tensor([3.0, 4.0, 0.0, 5.0])
    result = compare(found, reference, torch.ones(4).double(), torch.tensor([0, 0, 1, -1]), 2)
    assert result.error_norm == 5.0
    assert result.relative_error == pytest.approx(5 / math.sqrt(125))
    assert result.shrinkage == pytest.approx(1 - 75 / 125)
    assert result.layer_errors[0] == 0
    assert math.isnan(result.layer_errors[1])


def known_shares(n: int, rows: int, n_entries: int = 4000, seed: int = 0) -> tuple[ShareGradients, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean = 0.1 * torch.randn(n_entries, generator=generator)
    noise = torch.randn(n, n_entries, generator=generator) * 0.5 / math.sqrt(rows)
    layout = GradientLayout((1,), (n_entries,), (-1,), 0)
    return ShareGradients(mean + noise, rows, layout), mean


def test_noise_and_length_of_the_gradient_are_found() -> None:
    shares, mean = known_shares(16, 2)
    assert shares.row_variance == pytest.approx(4000 * 0.25, rel=0.05)
    assert shares.noise(100) == pytest.approx(math.sqrt(10), rel=0.05)
    # The measured mean is much longer than the true gradient; the estimate is corrected.
    assert float(shares.mean.square().sum()) > 1.5 * float(mean.square().sum())
    assert shares.squared_norm == pytest.approx(float(mean.square().sum()), rel=0.2)


def test_resampled_terms_have_the_length_and_noise_of_the_requested_examples() -> None:
    shares, mean = known_shares(16, 2)
    terms = shares.terms(400, 8, torch.Generator().manual_seed(1))
    assert not terms.are_measured
    n_entries = float(terms.factor.sum())
    assert n_entries == pytest.approx(4000, rel=0.01)
    average = terms.exact_sum / 400
    spread = ((terms.values.double() - average).square() * terms.factor).sum(1).mean()
    assert float(spread) == pytest.approx(4000 * 0.25 / 8, rel=0.1)
    assert float((average.square() * terms.factor).sum()) == pytest.approx(float(mean.square().sum()), rel=0.3)


def test_accumulation_that_stops_is_shrinkage() -> None:
    plan = {"hardware": {"accumulation": 1024, "accumulation_dtype": "bfloat16"}}
    finding = accumulation_shrinkage(emulation(Known(), plan))
    assert finding.effect == pytest.approx(0.75)
    assert not finding.is_extrapolated
    assert finding.growth[256] == 0
    assert finding.growth[512] == pytest.approx(0.5)
    exact = accumulation_shrinkage(emulation(Known(), {"hardware": {"accumulation": 1024}}))
    assert exact.effect == 0


def test_more_terms_than_the_maximum_are_extrapolated() -> None:
    plan = {"hardware": {"data_parallel": 4096, "gradient_dtype": "bfloat16", "reduction_order": "ring"}}
    finding = allreduce_shrinkage(emulation(Known(), plan))
    assert finding.is_extrapolated
    assert "extrapolated" in finding.how
    assert 0.75 < finding.effect <= 1
    tree = {"hardware": plan["hardware"] | {"reduction_order": "tree"}}
    assert allreduce_shrinkage(emulation(Known(), tree)).effect == 0


def noisy(n_ranks: int, dtype: str, **more: object) -> dict:
    return {"hardware": {"data_parallel": n_ranks, "gradient_dtype": dtype, **more}, "training": {"batch_size": 32}}


class Slopes(torch.nn.Module):
    """A model whose gradient is the mean of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(200))
        self.bias = torch.nn.Parameter(torch.ones(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :200] * self.weight).sum(-1) + (x[:, 200:] * self.bias).sum(-1)


def rows(n_batches: int = 4, n_rows: int = 8) -> list:
    generator = torch.Generator().manual_seed(3)
    return [(0.1 + torch.randn(n_rows, 250, generator=generator), torch.zeros(n_rows)) for _ in range(n_batches)]


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.mean()


@pytest.mark.parametrize("dtype", [*EPS])
def test_the_error_of_a_reduction_is_that_of_the_sum_of_the_gradients_of_the_ranks(dtype: str) -> None:
    data = rows()
    finding = allreduce_error(emulation(Slopes(), noisy(8, dtype), loss=mean_loss, data=data))
    ranks = torch.cat([x for x, _ in data]).view(8, 4, 250).mean(1)
    # The order of the parameters is that of the model: the first 200 columns, then the remaining ones.
    error = (reduced(ranks, dtype, "ring").double() - ranks.double().sum(0)).norm()
    assert finding.relative_error == pytest.approx(
        float(error / ranks.double().sum(0).norm()), rel=0.02 if dtype != "float32" else 0.5
    )
    spread = torch.cat([x for x, _ in data]).var(0).sum() / 32
    assert finding.error_over_noise == pytest.approx(
        float(error / 8 / spread.sqrt()), rel=0.3 if dtype != "float32" else 0.7
    )
    assert "8 shares of the measured examples" in finding.how


def test_order_and_buckets_change_only_the_last_bits() -> None:
    data = rows()
    for dtype, unit in EPS.items():
        for measure in (reduction_order, bucket_layout):
            finding = measure(emulation(Slopes(), noisy(8, dtype), loss=mean_loss, data=data))
            assert 0 < finding.relative_error < 8 * unit


def test_buckets_are_those_of_the_plan() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    plan = {"hardware": {"bucket_mb": 0.5, "data_parallel": 2}}
    assert plan_buckets(emulation(model, plan)) == [[7, 6], [5, 4], [3, 2], [1, 0]]
    assert len(plan_buckets(emulation(model, {}))) == 2


def test_a_float16_sum_overflows_at_a_scale_that_is_too_large() -> None:
    plan = noisy(8, "float16", loss_scale=1e6)
    finding = allreduce_error(emulation(Slopes(), plan, loss=mean_loss, data=rows()))
    assert not math.isfinite(finding.effect)
    finding = allreduce_error(emulation(Slopes(), noisy(8, "float16"), loss=mean_loss, data=rows()))
    assert finding.relative_error < 8 * EPS["float16"]


def test_a_sum_of_one_term_is_not_measured() -> None:
    for measure in (allreduce_error, reduction_order, bucket_layout, accumulation_error):
        with pytest.raises(NotMeasured):
            measure(emulation(Known(), {}))
