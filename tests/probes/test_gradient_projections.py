"""Gradients of real backward passes in one process; test_reduction.py uses two."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.about import says
from tests.launches import Launches
from tests.small_training import SMALL, same_weights
from workbench.errors import OptionError
from workbench.models.readable_weights import read_arrays
from workbench.probes.gradient_agreement import GradientVerdict as Verdict
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import (
    N_ENTRIES,
    N_PROJECTIONS,
    GradientProjections,
    Places,
    entries_of,
    project,
    random_signs,
)
from workbench.training.callback import Callback


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def inputs(seed=0, n=6):
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))


def agreement(model, passes, change=lambda model: None):
    """Compare the gradients of a step with several backward passes, which are changed afterwards."""
    with GradientProjections(model.parameters()) as projections:
        for one in passes:
            one(model)
        change(model)
        return compare_gradients(projections.take())


def one_pass(model):
    model(inputs()).square().sum().backward()


# Projections


def projected(tensor, turn=0, seed=3, row=0, whole=None):
    """Return the projections of a tensor, or of the rows of a larger one from ``row`` on, and their norm."""
    places = Places.of(tensor if whole is None else whole, turn).after(row)
    entries = entries_of(tensor, places).flatten()
    signs = random_signs(seed)[:, places.n_before : places.n_before + len(entries)]
    return project(entries[None], signs)[0]


@pytest.mark.parametrize("shape", [(7,), (3, 5), (), (0, 4)])
def test_a_projection_is_a_sum_with_random_signs(shape):
    n = math.prod(shape)
    signs = torch.stack([projected(row.view(shape))[:-1] for row in torch.eye(n)]) if n else torch.zeros(0, 8)
    assert signs.abs().eq(1).all()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = projected(gradient)
    assert found[:-1] == pytest.approx(gradient.double().flatten() @ signs.double())
    assert found[-1] == pytest.approx(gradient.norm().item())


SHAPES = st.sampled_from([(7,), (100, 64), (3000, 48), (257, 33), (5, 4096), (20_000,), (70, 3, 40), (65, 1024)])


@given(shape=SHAPES, turn=st.integers(0, 1000), n_ranks=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_projections_of_shards_sum_to_that_of_the_full_tensor(shape, turn, n_ranks):
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n_rows = -(-shape[0] // n_ranks)
    parts = [projected(whole[i : i + n_rows], turn, row=i, whole=whole) for i in range(0, shape[0], n_rows)]
    torch.testing.assert_close(sum(part[:-1] for part in parts), projected(whole, turn)[:-1])
    torch.testing.assert_close(sum(part[-1] ** 2 for part in parts), projected(whole, turn)[-1] ** 2)


@given(shape=SHAPES)
@settings(deadline=None)
def test_turns_project_each_entry_once_and_few_at_a_time(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    spacing = Places.of(numbers, 0).spacing
    turns = [entries_of(numbers, Places.of(numbers, turn)).flatten() for turn in range(spacing)]
    assert torch.cat(turns).sort().values.equal(numbers.flatten())
    assert all(len(entries) <= N_ENTRIES for entries in turns)
    assert all(Places.of(numbers, turn).n_entries == len(entries) for turn, entries in enumerate(turns))
    assert spacing == 1 or min(map(len, turns)) > N_ENTRIES / 4
    if len(shape) == 2 and shape[1] % 2 == 0 and spacing > 1:  # all columns are seen in every turn
        assert {int(column) for column in turns[0] % shape[1]} == set(range(shape[1]))


def test_signs_are_independent_of_each_other_and_of_the_seed():
    signs = torch.stack([random_signs(seed)[:, :64] for seed in range(20)])
    assert signs.abs().eq(1).all()
    for axis in (0, 1, 2):
        correlation = (signs * signs.roll(1, axis)).mean()
        assert abs(correlation) < 5 / math.sqrt(signs.numel())
    assert abs(signs.mean()) < 5 / math.sqrt(signs.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_projection_sums_without_rounding(dtype):
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = torch.view_as_real(gradient) if dtype.is_complex else gradient
    assert torch.equal(projected(gradient), projected(exact.double()))


# Gradients seen by the hooks


def test_the_projections_are_those_of_the_gradients():
    model = small()
    with GradientProjections(model.parameters(), seed=4) as projections:
        one_pass(model)
        step = projections.take()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert step.computed.shape == (1, 6, N_PROJECTIONS)
    for name in ("computed", "accumulated", "received"):
        assert np.array_equal(getattr(step, name), step.computed)
    assert np.square(step.computed[0]).mean(1) ** 0.5 == pytest.approx([g.norm().item() for g in gradients], rel=1.5)
    assert step.size[0] == pytest.approx([g.norm().item() for g in gradients])
    assert step.n_passes == 1


def test_passes_are_summed():
    model = small()
    found = agreement(model, [lambda m, i=i: m(inputs(i)).square().sum().backward() for i in range(5)])
    assert found.verdict == Verdict.AS_COMPUTED
    assert 0 < np.nanmax(found.residual) < 1e-6  # float32 rounds .grad, the projections do not


def with_gradients_set_aside(n_passes, lost=()):
    """Emulate ranks: gradients of each pass are stored, and their mean is restored at the end."""
    kept = []

    def shard(model, i):
        model.zero_grad()
        model(inputs(i)).square().sum().backward()
        kept.append([p.grad for p in model.parameters()])

    def reduce(model):
        for parameter, parts in zip(model.parameters(), zip(*kept, strict=True), strict=True):
            parameter.grad = sum(part for i, part in enumerate(parts) if i not in lost) / n_passes

    return agreement(small(), [lambda m, i=i: shard(m, i) for i in range(n_passes)], reduce)


def test_the_mean_over_passes_is_as_computed_at_its_scale():
    found = with_gradients_set_aside(4)
    assert (found.verdict, found.scale) == (Verdict.AS_COMPUTED, pytest.approx(0.25, rel=1e-6))


@pytest.mark.parametrize(("n_passes", "verdict"), [(3, Verdict.PASS_MISSING), (9, Verdict.NOT_COMPUTED)])
def test_a_lost_pass_of_emulated_ranks_is_named(n_passes, verdict):
    """Up to eight passes are stored separately."""
    found = with_gradients_set_aside(n_passes, lost=[1])
    assert found.verdict == verdict
    assert found.missing_passes == ((1,) if verdict == Verdict.PASS_MISSING else ())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_discarded_passes_are_sound_if_the_parameters_have_moved(set_to_none, moves):
    """As in SAM, where only the second pass is used; otherwise a micro-batch is lost."""

    def second(model):
        with torch.no_grad():
            for weight in model.parameters() if moves else ():
                weight.data.add_(0.01)  # leaves no mark on the tensor
        model.zero_grad(set_to_none=set_to_none)
        model(inputs(1)).square().sum().backward()

    found = agreement(small(), [one_pass, second])
    assert found.verdict == (Verdict.AS_COMPUTED if moves else Verdict.DISCARDED)


def test_nothing_is_said_of_gradients_from_before_arming():
    """They may be of the same update, or of one before that was not cleared."""
    model = small()
    one_pass(model)
    found = agreement(model, [lambda m: m(inputs(1)).square().sum().backward()])
    assert (found.verdict, "may be meant" in found.sentence) == (Verdict.NOT_MEASURED, True)


def test_a_shared_parameter_is_seen_with_the_sum_of_its_uses():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.out = nn.Linear(4, 9, bias=False)
            self.out.weight = self.embedding.weight
            self.mix = nn.Linear(4, 4)

        def forward(self, tokens):
            return self.out(self.mix(self.mix(self.embedding(tokens))))

    model, tokens = Tied(), torch.arange(6)
    found = agreement(model, [lambda m: cross_entropy(m(tokens), tokens).backward()])
    assert found.verdict == Verdict.AS_COMPUTED
    assert len(found.states) == 3


def test_unused_frozen_and_sparse_parameters():
    used, unused, frozen = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
    sparse = nn.Embedding(20, 5, sparse=True)
    model = nn.ModuleList([used, unused, frozen, sparse])
    found = agreement(model, [lambda m: frozen(used(sparse(torch.tensor([1, 1, 7])))).square().sum().backward()])
    assert found.verdict == Verdict.AS_COMPUTED
    assert found.parameters(Verdict.NOT_MEASURED) == (2, 3, 4, 5)


def test_gradients_outside_of_backward_are_not_counted():
    """Gradients from ``torch.autograd.grad`` do not enter ``.grad``."""

    def measure(model):
        torch.autograd.grad(model(inputs(3)).square().sum(), list(model.parameters()))

    assert agreement(small(), [measure, one_pass]).verdict == Verdict.AS_COMPUTED


def test_complex_parameters_are_pairs_of_real_numbers():
    weights = nn.ParameterList([torch.randn(3, 4, dtype=torch.complex64), torch.randn((), dtype=torch.complex128)])
    found = agreement(weights, [lambda both: (both[0].abs().square().sum() * both[1].abs()).backward()])
    assert found.states == (Verdict.AS_COMPUTED,) * 2


# Large and many parameters


def large(n=5, size=(300, 200), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList([torch.randn(size, generator=generator) for _ in range(n)])


def quadratic(weights):
    sum(weight.pow(3).sum() for weight in weights).backward()


def rounded_to(n_bits):
    """Round gradients to some significant bits."""

    def change(weights):
        for weight in weights:
            mantissa, exponent = weight.grad.double().frexp()
            weight.grad = torch.ldexp((mantissa * 2**n_bits).round() / 2**n_bits, exponent).float()

    return change


@pytest.mark.parametrize("n_bits", [1, 2, 4, 8, 12, 16])
def test_significant_bits_are_counted_on_a_part_of_large_gradients(n_bits):
    found = agreement(large(), [quadratic], rounded_to(n_bits))
    assert (found.verdict, found.n_bits) == (Verdict.LOW_PRECISION, pytest.approx(n_bits, abs=0.5))
    assert agreement(large(), [quadratic], rounded_to(24)).verdict == Verdict.AS_COMPUTED


def test_a_wrong_part_of_a_large_gradient_is_found_in_its_turn():
    """It is found in every turn if it is as large as the distance of the entries, else in one of them."""
    weights = large(2)
    spacing = Places.of(weights[0], 0).spacing
    projections, is_found = GradientProjections(weights.parameters()), []
    for turn in range(spacing):
        weights.zero_grad()
        projections.arm(turn=turn)
        quadratic(weights)
        weights[0].grad[:4] += 1
        weights[1].grad[250, 150] += 1e3
        found = compare_gradients(projections.take())
        assert found.states[0] == Verdict.NOT_COMPUTED
        is_found.append(found.states[1] == Verdict.NOT_COMPUTED)
    assert is_found.count(True) == 1


def test_only_some_parameters_are_measured():
    model = small()
    projections = GradientProjections(model.parameters())
    projections.arm([1, 3, 4])
    one_pass(model)
    model[0].weight.grad.zero_()
    model[2].bias.grad.zero_()
    step = projections.take()
    found = compare_gradients(step)
    expected = [Verdict.NOT_MEASURED, Verdict.AS_COMPUTED] * 3
    expected[3:] = [Verdict.PARAMETERS_MISSING, Verdict.AS_COMPUTED, Verdict.NOT_MEASURED]
    assert found.states == tuple(expected)
    assert step.n_elements.tolist() == [0, 7, 0, 7, 21, 0]
    assert "in 1 of 3 parameters" in found.sentence


def counted(n, n_passes):
    """Return what a measurement launches, without the passes themselves, and what it yields."""
    weights = large(n, size=(8, 8))
    projections = GradientProjections(weights.parameters())
    with Launches() as plain:
        for _ in range(n_passes):
            quadratic(weights)
    weights.zero_grad()
    projections.arm()
    with Launches() as probed:
        for _ in range(n_passes):
            quadratic(weights)
        tensors = next(projections.measured())
    assert not probed.waits
    return probed.operations - plain.operations, tensors


@pytest.mark.parametrize("n_passes", [1, 2, 3])
def test_only_copies_depend_on_the_number_of_parameters(n_passes):
    few, _ = counted(16, n_passes)
    many, tensors = counted(48, n_passes)
    assert many - few == {"clone": 32 * (2 * n_passes - 1)}  # of gradients and, after the first pass, of .grad
    assert sum(each.numel() for each in tensors) < 48 * (n_passes + 2) * (N_PROJECTIONS + 1) + 9


def test_a_measurement_may_be_completed_after_the_next_one_has_begun():
    model = small()
    projections = GradientProjections(model.parameters())
    projections.arm()
    one_pass(model)
    model[0].weight.grad.zero_()
    measurement = projections.measured()
    values = read_arrays(next(measurement))
    model.zero_grad()
    projections.arm([5])
    one_pass(model)
    with pytest.raises(StopIteration) as late:
        measurement.send(values)
    assert compare_gradients(projections.gathered(late.value.value)).parameters(Verdict.PARAMETERS_MISSING) == (0,)
    assert compare_gradients(projections.take()).parameters(Verdict.AS_COMPUTED) == (5,)


# Scales


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**60, 3.7])
def test_a_loss_scale_is_common_to_all(unscale, scale):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=scale), []

    def change(model):
        if unscale:
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))

    found = agreement(model, [lambda m: scaler.scale(m(inputs()).square().sum() * 1e-3).backward()], change)
    assert found.verdict == Verdict.AS_COMPUTED
    assert norms[0] > 1e-3
    assert found.scale == pytest.approx(1e-3 / norms[0] / (scale if unscale else 1), rel=1e-3)


def test_copies_that_an_optimizer_updates_are_not_measured():
    model = small()
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    with GradientProjections(copies) as projections:
        one_pass(model)
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.grad.clone()
        assert "the optimizer may update copies" in compare_gradients(projections.take()).sentence


# In training


class Probing(Callback):
    """Compares the gradients of every step."""

    name = "probing"

    def setup(self, run):
        super().setup(run)
        self.projections = GradientProjections([p for group in run.optimizer.param_groups for p in group["params"]])
        self.steps = []

    def begin_step(self, step):
        self.projections.arm()

    def before_update(self, step, numbers):
        self.steps.append(self.projections.take())


def train(*faults, model=None, n_steps=8, task=None, **settings):
    probing = Probing()
    model = wb.zoo.transformer("pre_ln", **SMALL) if model is None else model
    task = task or wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)
    for _ in wb.train(model, task, n_steps=n_steps, learning_rate=1e-2, faults=faults, callbacks=[probing], **settings):
        pass
    return probing.steps


FAULTS = {
    "control": (wb.faults.low_precision_reduction(dtype="float32", start=0), Verdict.AS_COMPUTED),
    "lost": (wb.faults.dropped_bucket(share=0.5, start=0), Verdict.PARAMETERS_MISSING),
    "lost from one": (wb.faults.dropped_bucket(share=1.0, lost_from="one_rank", start=0), Verdict.PASS_MISSING),
    "late": (wb.faults.stale_reduction(delay=1, start=0), Verdict.STALE),
    "very late": (wb.faults.stale_reduction(delay=5, start=0), Verdict.STALE),
    "partly late": (wb.faults.stale_reduction(delay=1, share=0.7, start=0), Verdict.STALE),
    "bfloat16": (wb.faults.low_precision_reduction(start=0), Verdict.LOW_PRECISION),
    "5 bits": (wb.faults.low_precision_reduction(n_bits=3, start=0), Verdict.LOW_PRECISION),
    "2 bits": (wb.faults.low_precision_reduction(n_bits=6, start=0), Verdict.LOW_PRECISION),
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_training_are_distinguished(kind):
    fault, verdict = FAULTS[kind]
    steps = train(fault)
    found = compare_gradients(steps[-1], steps[-2::-1])
    assert found.verdict == verdict
    if verdict == Verdict.STALE:
        assert found.delay == fault.delay
    if verdict == Verdict.LOW_PRECISION:
        assert found.n_bits == pytest.approx(8 - fault.n_bits, abs=1)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["dense", "moe", "clipped"])
def test_training_is_bitwise_identical_and_as_computed(kind):
    def make():
        return wb.zoo.moe(n_experts=4, **SMALL) if kind == "moe" else wb.zoo.transformer("pre_ln", **SMALL)

    settings = {"clip_norm": 0.1} if kind == "clipped" else {}
    task = wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)
    plain, probed = make(), make()
    list(wb.train(plain, task, n_steps=8, learning_rate=1e-2, **settings))
    state = torch.get_rng_state()
    steps = train(model=probed, **settings)
    assert torch.equal(state, torch.get_rng_state())
    assert same_weights(plain, probed)
    assert {compare_gradients(step, steps[:i][::-1]).verdict for i, step in enumerate(steps)} == {Verdict.AS_COMPUTED}


def correct_step(generator):
    """Return a correct step of a tiny model with random format, sizes, experts, accumulation, scale and clipping."""

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype = draw(torch.float32, torch.float32, torch.bfloat16, torch.float64)
    width = draw(2, 5, 16)
    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    embedding, scale = nn.Embedding(11, width), nn.Parameter(torch.ones(()))
    model = nn.ModuleList([embedding, experts, nn.ParameterList([scale])]).to(dtype)
    factor = 10.0 ** draw(-30, -8, 0, 0, 4)
    embedding.weight.requires_grad_(draw(True, True, False))

    def micro_batch(model):
        tokens = torch.randint(11, (2, 4), generator=generator)
        states = embedding(tokens)
        for _ in range(draw(1, 2)):  # the same expert may be used twice
            states = states + model[2][0] * draw(*experts)(states).tanh() * draw(1, 1, 0)
        loss = cross_entropy((states @ embedding.weight.T).flatten(0, 1).double(), tokens.flatten())
        (loss * factor).backward()

    def change(model):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None and factor != 1:
                    parameter.grad /= factor
        if draw(True, False):
            nn.utils.clip_grad_norm_(model.parameters(), draw(0.01, 1.0))

    return model, [micro_batch] * draw(1, 1, 3, 8), change


@pytest.mark.slow
def test_correct_steps_raise_no_false_alarm():
    generator = torch.Generator().manual_seed(0)
    verdicts = [agreement(*correct_step(generator)).verdict for _ in range(400)]
    assert {Verdict.AS_COMPUTED} <= set(verdicts) <= {Verdict.AS_COMPUTED, Verdict.NOT_MEASURED}
    assert verdicts.count(Verdict.AS_COMPUTED) > 350


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_have_no_recompilation_and_no_graph_breaks(backend):
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    counter, model = CompileCounterWithBackend(backend), small()
    compiled = torch.compile(model, backend=counter)
    projections = GradientProjections(model.parameters())
    for i in range(6):
        model.zero_grad()
        if i % 2:
            projections.arm()
        compiled(inputs(i)).square().sum().backward()
        if i % 2:
            assert compare_gradients(projections.take()).verdict == Verdict.AS_COMPUTED
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    reset()


# Hooks and invalid arguments


def test_hooks_are_removed_in_any_case():
    model = small()
    projections = GradientProjections(model.parameters())
    with pytest.raises(ZeroDivisionError), projections:
        1 / 0  # noqa: B018
    assert not projections.is_armed
    one_pass(model)
    assert not projections._step.n_passes
    projections.arm()
    projections.arm()
    model.zero_grad()
    one_pass(model)
    assert projections.take().n_passes == 1
    assert not projections.is_armed


def test_take_before_arm_is_rejected():
    with pytest.raises(OptionError, check=says("The projections are not armed; call arm() before the first")):
        GradientProjections(small().parameters()).take()


def test_an_empty_list_of_parameters_is_rejected():
    with pytest.raises(OptionError, check=says("There are no parameters; pass those of the optimizer.")):
        GradientProjections([])


def test_devices_without_float64_are_rejected():
    class OnMetal(nn.Parameter):
        device = torch.device("mps")

    with pytest.raises(OptionError, check=says("have no float64 to project gradients in; use another device.")):
        GradientProjections([OnMetal(torch.zeros(2))])
