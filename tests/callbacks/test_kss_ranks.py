"""Two processes under DDP are equivalent to one with all examples; ddp_shaping.py computes the results of each rank."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about
from tests.callbacks import ddp_shaping
from workbench.callbacks.kss.penalty import NOT_FINITE
from workbench.errors import OptionError
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.stacked import StackedMoments

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of each rank, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.callbacks.ddp_shaping", str(folder)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def assert_ranks_are_identical(ranks, scenario):
    one, other = (rank[scenario]["weights"] for rank in ranks)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def in_one_process(coupling, n_steps=3):
    examples = [[ddp_shaping.examples_of(rank, i) for rank in range(2)] for i in range(n_steps)]
    batches = [tuple(torch.cat(part) for part in zip(*of_ranks, strict=True)) for of_ranks in examples]
    return ddp_shaping.train(ddp_shaping.model(), ddp_shaping.kss(coupling), batches)


def largest_difference(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("coupling", ddp_shaping.COUPLINGS)
def test_two_ranks_are_equivalent_to_one_process(ranks, coupling):
    expected = in_one_process(coupling)
    assert_ranks_are_identical(ranks, coupling)
    for rank in ranks:
        found = rank[coupling]
        assert found["penalty"] == pytest.approx(expected["penalty"], rel=1e-8, nan_ok=True)
        assert found["radius"] == pytest.approx(expected["radius"], rel=1e-8, nan_ok=True)
        assert found["radius"][0] > 0  # a trust region on the gain takes eigenvalues in some steps
        assert found["acting"] == expected["acting"]
        assert largest_difference(found["weights"], expected["weights"]) < 1e-9
    assert max(expected["acting"]) > 0
    start = [weight.detach() for weight in ddp_shaping.model().parameters()]
    assert largest_difference(expected["weights"], start) > 1e-3


def test_a_layer_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks):
    assert_ranks_are_identical(ranks, "one broken")
    for rank in ranks:
        assert rank["one broken"]["skipped"] == [{2: NOT_FINITE, 3: NOT_FINITE}] * 2
        assert rank["one broken"]["acting"] == [2, 2]


def test_a_rank_without_states_does_not_block_the_others(ranks):
    assert_ranks_are_identical(ranks, "one without states")
    assert [rank["one without states"]["skipped"] for rank in ranks] == [[dict.fromkeys(range(4), NOT_FINITE)]] * 2


def test_the_controls_of_the_first_rank_apply_to_all(ranks):
    assert_ranks_are_identical(ranks, "changed controls")
    for rank in ranks:
        found = rank["changed controls"]
        assert found["strength"] == [0.5, 0.25, 0.25, 0.25, 0.25]
        assert found["enabled"] == [True, True, True, False, False]
        assert found["layers"] == [(0, 1, 2, 3), (1, 3), (1, 3), (), ()]
        assert found["end"] == {"enabled": False, "strength": 0.25, "interval": 1, "gamma": 0.4, "layers": [1, 3]}
        # Observers on the other rank receive the changes.
        assert ("strength", 0.5, 0.25) in found["observed"]
        assert ("enabled", True, False) in found["observed"]


def test_ranks_with_batches_of_different_size_measure_the_same_layers(ranks):
    assert_ranks_are_identical(ranks, "uneven")
    one, other = (rank["uneven"] for rank in ranks)
    assert one["layers"] == other["layers"]
    assert len(set(one["layers"])) > 2
    assert one["end"] == other["end"]


def test_moments_and_gradients_of_all_ranks_are_those_of_all_snapshots(ranks):
    leaves = [tuple(values.clone().requires_grad_() for values in part) for part in ddp_shaping.parts()]
    stack = StackedMoments({0: tuple(torch.cat(part) for part in zip(*leaves, strict=True))})
    xx, dx = stack.project(DmdOptions(rank=3))[0]
    states, in_states = zip(
        *stack.gradients({0: np.stack([xx.detach().cos().numpy(), dx.detach().numpy()])}), strict=True
    )
    for own, rank in zip(leaves, ranks, strict=True):
        found = rank["moments"]
        assert torch.allclose(found["facts"], stack.facts.expand(2, -1), rtol=1e-12)
        assert torch.allclose(found["xx"], xx, rtol=1e-10, atol=1e-12)
        assert torch.allclose(found["dx"], dx, rtol=1e-10, atol=1e-12)
        expected = torch.autograd.grad(states, own, in_states, retain_graph=True)
        assert largest_difference(found["gradients"], expected) < 1e-10


def test_lightning_under_ddp(ranks):
    expected = in_one_process("gradient")
    assert_ranks_are_identical(ranks, "lightning")
    for rank in ranks:
        assert rank["lightning"]["acting"] == [4, 4, 4]
        assert rank["lightning"]["penalty"] == pytest.approx(expected["penalty"], rel=1e-8)
        assert largest_difference(rank["lightning"]["weights"], expected["weights"]) < 1e-9


def test_sharded_parameters_are_rejected(make_model):
    """As with FSDP and tensor parallelism."""

    class Sharded(nn.Parameter):
        def full_tensor(self):
            """The method by which sharded parameters are recognized."""

    model = make_model()
    model.head.weight = Sharded(model.head.weight.detach())
    with pytest.raises(OptionError, check=about("model", "Transformer")):
        wb.KSS().attach(model, torch.optim.SGD(model.parameters()))
