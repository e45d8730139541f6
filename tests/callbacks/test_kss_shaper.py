import copy
import math
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.about import says
from tests.launches import Launches
from tests.small_training import same_weights
from workbench.callbacks.kss import KSSOptions, PenaltyShape, TrustRegion
from workbench.callbacks.kss.penalty import ILL_DEFINED, NOT_FINITE, layer_penalties
from workbench.callbacks.kss.shaper import GRADIENT_NOT_FINITE, NO_GRADIENT
from workbench.errors import OptionError, SnapshotError
from workbench.koopman.stacked import StackedMoments
from workbench.models.readable_weights import complete

#: All states of a batch are used, and the full spectrum is taken, so that the results are known.
EVERYTHING = {"penalty": PenaltyShape(rank=None), "n_snapshots": 10_000}


def kss_with(*, strength=1.0, interval=1, layers="all", enabled=True, **options):
    """KSS that acts in every step."""
    options = KSSOptions(**{**EVERYTHING, **options})
    return wb.KSS(strength=strength, interval=interval, layers=layers, enabled=enabled, options=options)


def loss_of(model, batch):
    tokens, targets = batch
    output = model(tokens)
    logits = getattr(output, "logits", output)
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def run(model, optimizer, task, n_steps, kss=None, after=lambda shaper: None):
    """Train in a standard loop, with a call of ``after`` after each step."""
    with nullcontext() if kss is None else kss.attach(model, optimizer) as shaper:
        for i in range(n_steps):
            step(model, optimizer, task.batch(i))
            after(shaper)
    return model


def sgd(model, rate=0.01):
    return torch.optim.SGD(model.parameters(), lr=rate)


def penalty_of(model, tokens, layers=(0, 1), shape=EVERYTHING["penalty"]):
    """Mean penalty over the layers, from an explicit forward pass."""
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))
    total = 0.0
    for i, block in enumerate(model.blocks):
        y = block(x)
        if i in layers:
            stack = StackedMoments({i: (x.flatten(0, 1), y.flatten(0, 1))})
            part = complete(layer_penalties([stack], shape, gamma=0.4))[i]
            # The second term is zero; its gradient is that of the penalty.
            change = sum((g * (state - state.detach())).sum() for state, g in stack.gradients({i: part.slopes}))
            total = total + (part.value + change) / len(layers)
        x = y
    return total


def gradients_of(value, model):
    parameters = [*model.parameters()]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def assert_close(found, expected, tolerance=2e-5):
    """Check that two lists of tensors agree, relative to the largest entry of the second."""
    largest = max(float(tensor.detach().abs().max()) for tensor in expected)
    assert largest > 0
    for left, right in zip(found, expected, strict=True):
        assert float((left - right).detach().abs().max()) <= tolerance * largest


def hooks_of(model, optimizer):
    modules = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        for module in model.modules()
    ]
    return modules, len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


@pytest.fixture
def unstable(make_model):
    """A model without normalization, at a scale at which its modes are unstable."""
    return lambda: make_model("none", init_std=0.15)


def test_the_gradient_that_reaches_the_parameters(unstable, task):
    model, batch = unstable(), task.batch(0)
    of_task = gradients_of(loss_of(model, batch), model)
    expected = gradients_of(penalty_of(model, batch[0]), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run(model, sgd(model, 1.0), task, 1, kss_with(strength=3.0))
    changes = zip(before, model.parameters(), of_task, strict=True)
    assert_close([(p - after.detach() - g) / 3.0 for p, after, g in changes], expected, tolerance=1e-4)


@pytest.mark.parametrize("coupling", ["decoupled", "projection"])
def test_what_is_subtracted_after_the_update(unstable, task, coupling):
    shape = PenaltyShape(rank=None, unstable_term="log", beta=0.0)
    control, model, batch = unstable(), unstable(), task.batch(0)
    step(control, torch.optim.AdamW(control.parameters(), lr=0.01), batch)
    penalty = penalty_of(control, batch[0], shape=shape)
    expected = gradients_of(penalty, control)
    size = 0.01 if coupling == "decoupled" else float(penalty.detach() / sum(g.square().sum() for g in expected))
    kss = kss_with(strength=0.5, coupling=coupling, penalty=shape)
    run(model, torch.optim.AdamW(model.parameters(), lr=0.01), task, 1, kss)
    changes = zip(control.parameters(), model.parameters(), strict=True)
    assert_close([(p - after) / (0.5 * size) for p, after in changes], expected, tolerance=1e-3)


def test_the_penalty_is_a_mean_over_the_measured_layers(unstable, task):
    model, batch = unstable(), task.batch(0)
    expected = penalty_of(model, batch[0], layers=(1,)).detach()
    seen = []
    run(model, sgd(model), task, 1, kss_with(layers=(1,)), after=lambda shaper: seen.append(shaper.last))
    assert seen[0].penalty == pytest.approx(float(expected), rel=1e-5)
    assert (seen[0].layers, seen[0].n_acting, seen[0].skipped) == ((1,), 1, {})


def test_only_as_many_examples_as_needed_are_used(unstable, task):
    """After the first pass, the number of examples is that which yields the requested snapshots."""
    model, n_examples = unstable(), []
    model.blocks[0].register_forward_hook(
        lambda block, args, output: None if block.training else n_examples.append(len(args[0]))
    )
    run(model, sgd(model), task, 4, kss_with(n_snapshots=24))
    *_, second, third, fourth = n_examples
    assert (second, third, fourth) == (2, 2, 2)  # of 8, with 12 tokens each


@pytest.mark.medium
def test_half_of_the_layers_are_drawn_in_each_step(make_model, task):
    def drawn(seed):
        found, model = [], make_model(n_layers=4)
        run(model, sgd(model), task, 12, kss_with(layers="half", seed=seed), lambda s: found.append(s.last.layers))
        return found

    first = drawn(0)
    assert {len(layers) for layers in first} == {2}
    assert {layer for layers in first for layer in layers} == {0, 1, 2, 3}
    assert len(set(first)) > 2
    assert drawn(0) == first
    assert drawn(1) != first


class Counting(nn.Module):
    """A block that counts its calls in a buffer, has batch statistics, and draws random numbers in eval mode, too."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n_calls += 1
        update = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return x + nn.functional.dropout(update, 0.2, self.training) + 0.01 * torch.rand(())


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks, width=8, vocabulary=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(make_block=lambda: Counting(8), n_blocks=3, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Stack([make_block() for _ in range(n_blocks)])


def test_the_pass_of_kss_changes_no_state(task):
    model = stack()
    model.blocks[1].eval()
    model.blocks[2].norm.eval()
    flags = [module.training for module in model.modules()]
    control = copy.deepcopy(model)
    torch.manual_seed(1)
    step(control, sgd(control), task.batch(0))
    state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002 (the global state must not change)
    torch.manual_seed(1)
    seen = []
    run(model, sgd(model), task, 1, kss_with(), after=lambda shaper: seen.append(shaper.last))
    assert seen[0].n_acting == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    assert [module.training for module in model.modules()] == flags
    assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in control.buffers()]
    assert not same_weights(model, control)


def test_detaching_removes_hooks_and_effects(unstable, task):
    model, control = unstable(), unstable()
    optimizer = sgd(model)
    before = hooks_of(model, optimizer)
    with kss_with().attach(model, optimizer) as shaper:
        assert hooks_of(model, optimizer) != before
    shaper.detach()  # a second call has no effect
    assert hooks_of(model, optimizer) == before
    run(model, optimizer, task, 2)
    assert same_weights(model, run(control, sgd(control), task, 2))


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("update failed")


def test_a_pass_that_fails_leaves_the_model_unchanged(unstable, task):
    model, is_failing = unstable(), True

    def fail(block, args):
        if is_failing and not block.training:
            raise ValueError("pass failed")

    model.blocks[1].register_forward_pre_hook(fail)
    optimizer = sgd(model)
    before = hooks_of(model, optimizer)
    with pytest.raises(Exception, match="pass failed"), kss_with().attach(model, optimizer):
        step(model, optimizer, task.batch(0))
    assert hooks_of(model, optimizer) == before
    assert all(module.training for module in model.modules())
    is_failing = False
    run(model, optimizer, task, 1, kss_with())


def test_layers_that_are_not_finite_are_skipped_and_counted(make_model, task):
    model = make_model("none", n_layers=4, init_std=0.15)
    model.blocks[2].register_forward_hook(lambda block, args, y: y if block.training else y * math.inf)
    seen = []
    kss = kss_with()
    shaper = kss.attach(model, optimizer := sgd(model))
    for i in range(3):
        step(model, optimizer, task.batch(i))
        seen.append(shaper.last)
    assert [s.skipped for s in seen] == [{2: NOT_FINITE, 3: NOT_FINITE}] * 3
    assert [s.n_acting for s in seen] == [2] * 3
    assert shaper.n_skipped == {NOT_FINITE: 6}
    assert all(math.isfinite(s.penalty) and math.isfinite(s.spectral_radius) for s in seen)
    assert seen[0].monitors()["kss_skipped"] == 2
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_a_skipped_layer_does_not_increase_the_weight_of_the_others(make_model, task):
    model, expected = (make_model("none", init_std=0.15) for _ in range(2))
    penalty = penalty_of(expected, task.batch(0)[0], layers=(0,))
    gradients = [g / 2 for g in gradients_of(penalty, expected)]
    task_gradients = gradients_of(loss_of(model, task.batch(0)), model)
    model.blocks[1].register_forward_hook(lambda block, args, y: y if block.training else y * math.nan)
    before = [weight.detach().clone() for weight in model.parameters()]
    run(model, sgd(model, 1.0), task, 1, kss_with())
    changes = [b - p.detach() - g for b, p, g in zip(before, model.parameters(), task_gradients, strict=True)]
    assert_close(changes, gradients, tolerance=1e-4)


class Linear(nn.Module):
    """A block that multiplies by a matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x):
        return x @ self.matrix.T


def test_a_defective_operator_is_skipped_and_counted(task):
    jordan = 1.2 * torch.eye(8, dtype=torch.float64) + torch.diag(torch.ones(7, dtype=torch.float64), 1)
    sound = torch.diag(torch.linspace(0.5, 1.3, 8, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Stack([Linear(jordan), Linear(sound)]).double()
    seen = []
    run(model, sgd(model, 1e-9), task, 2, kss_with(), after=lambda shaper: seen.append(shaper.last))
    assert [s.skipped for s in seen] == [{0: ILL_DEFINED}] * 2
    assert [s.n_acting for s in seen] == [1, 1]
    assert seen[0].spectral_radius > 1.25  # that of both layers is recorded


def test_a_gradient_that_is_not_finite_is_not_applied(unstable, task):
    def make_nan(block, to_inputs, of_outputs):
        return None if block.training else tuple(gradient * math.nan for gradient in to_inputs)

    control, model, seen = unstable(), unstable(), []
    model.blocks[0].register_full_backward_hook(make_nan)
    run(model, sgd(model), task, 2, kss_with(), after=lambda shaper: seen.append(shaper.last))
    assert [s.skipped for s in seen] == [dict.fromkeys((0, 1), GRADIENT_NOT_FINITE)] * 2
    assert seen[0].n_acting == 0
    assert same_weights(model, run(control, sgd(control), task, 2))


def test_layers_without_trained_parameters_before_them_are_counted(unstable, task):
    model = unstable()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(("blocks.1", "final_norm", "head")))
    frozen = copy.deepcopy(model.blocks[0])
    shaper = kss_with().attach(model, optimizer := sgd(model))
    step(model, optimizer, task.batch(0))
    assert shaper.last.skipped == {0: NO_GRADIENT}
    assert shaper.last.n_acting == 1
    assert same_weights(model.blocks[0], frozen)


def test_controls_are_read_once_per_step(unstable, task):
    """A change by another thread during a step takes effect, and is an event, in the next step."""
    model, kss = unstable(), kss_with(strength=1.0)
    optimizer = sgd(model)
    shaper = kss.attach(model, optimizer)

    def change_controls(block, args):
        if not block.training:  # in the pass of KSS, during the update
            thread = threading.Thread(target=kss.set, kwargs={"strength": kss.strength + 1, "gamma": 0.5})
            thread.start()
            thread.join()

    handle = model.blocks[1].register_forward_pre_hook(change_controls)
    shaper.read_anatomy(task.batch(0)[0])
    kss.set(strength=1.0, gamma=0.4)
    step(model, optimizer, task.batch(0))
    assert (shaper.last.control.strength, kss.strength) == (1.0, 2.0)
    assert shaper._changes == []
    handle.remove()
    step(model, optimizer, task.batch(1))
    assert shaper.last.control.strength == 2.0
    assert shaper._changes == ["strength 1.0 -> 2.0", "gamma 0.4 -> 0.5"]


def test_an_update_that_moves_a_layer_out_of_its_band_is_undone(unstable, task):
    region = TrustRegion(measure="spectral_radius", highest=1.5, rise=0.01)
    control, model = unstable(), unstable()
    before = [weight.detach().clone() for weight in model.parameters()]
    seen = []
    kss = kss_with(coupling="trust_region", trust_region=region)
    run(model, sgd(model, 5.0), task, 1, kss, after=lambda shaper: seen.append(shaper.last))
    assert seen[0].n_acting > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    run(model, sgd(model, 1e-4), task, 3, kss, after=lambda shaper: seen.append(shaper.last))
    assert [s.n_acting for s in seen[1:]] == [0, 0, 0]
    assert same_weights(model, run(control, sgd(control, 1e-4), task, 3))


def test_the_optimizer_may_compute_the_gradient_by_a_closure(unstable, task):
    """As in Lightning; the result is the same as with a gradient that is computed before."""
    one, other, kinds = unstable(), unstable(), []
    run(one, sgd(one), task, 3, kss_with())
    optimizer = sgd(other)
    with kss_with().attach(other, optimizer) as shaper:
        for i in range(3):

            def closure(i=i):
                optimizer.zero_grad()
                loss = loss_of(other, task.batch(i))
                loss.backward()
                return loss

            loss = optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)
            kinds.append((loss.item() > 0, shaper.last.n_acting))
    assert kinds == [(True, 2)] * 3
    assert same_weights(one, other)


def test_kss_acts_on_the_inner_optimizer_of_a_wrapper(unstable, task):
    """SAM evaluates the gradient at other parameters; the penalty belongs to the update by its base optimizer."""
    from pytorch_optimizer import SAM

    def trained(kss):
        model = unstable()
        optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
        shaper = None if kss is None else kss.attach(model, optimizer)
        batch = task.batch(0)

        def closure():
            loss_of(model, batch).backward()

        closure()
        optimizer.step(closure)
        return model, shaper

    model, batch = unstable(), task.batch(0)
    expected = gradients_of(penalty_of(model, batch[0]), model)
    (without, _), (with_kss, shaper) = trained(None), trained(kss_with(strength=2.0))
    assert (shaper.step, shaper.last.n_acting) == (1, 2)
    changes = zip(without.parameters(), with_kss.parameters(), strict=True)
    assert_close([(p - q) / (0.1 * 2.0) for p, q in changes], expected, tolerance=1e-4)


def test_unsuitable_optimizers_are_rejected(unstable, task):
    model, other = unstable(), unstable()
    before = hooks_of(model, sgd(model))
    with pytest.raises(OptionError, check=says("KSS cannot act inside LBFGS, which takes several losses")):
        wb.KSS().attach(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptionError, check=says("The optimizer updates no parameter of Transformer; attach")):
        wb.KSS().attach(model, sgd(other))
    with pytest.raises(OptionError, check=says("The optimizer updates no parameter of Transformer; attach")):
        wb.KSS().attach(model.requires_grad_(False), sgd(model))
    assert hooks_of(model, sgd(model)) == before


def test_a_model_that_does_not_run_raises(unstable, task):
    """If KSS is attached to a part that the loop never calls, or to a model in eval mode."""
    model = unstable()
    optimizer = sgd(model)
    unused = nn.ModuleDict({"unused": model, "other": nn.Linear(2, 2)})
    loss_of(model, task.batch(0)).backward()
    with (
        kss_with().attach(unused, optimizer),
        pytest.raises(SnapshotError, check=says("ModuleDict did not run in training mode before this update;")),
    ):
        optimizer.step()
    with kss_with().attach(model.eval(), optimizer):
        loss_of(model, task.batch(0)).backward()
        with pytest.raises(SnapshotError, check=says("Transformer did not run in training mode before this")):
            optimizer.step()
    with pytest.raises(OptionError, check=says("but the model has the layers")):
        run(model.train(), optimizer, task, 1, kss_with(layers=(0, 7)))


def test_a_wrapper_around_the_model(unstable, task):
    """The loop may call the model inside the module that KSS is attached to."""
    model, control = unstable(), unstable()
    wrapper = nn.Module()
    wrapper.inner = model
    optimizer, optimizer_of_control = sgd(model), sgd(control)
    with kss_with().attach(wrapper, optimizer), kss_with().attach(control, optimizer_of_control):
        for i in range(2):
            step(model, optimizer, task.batch(i))
            step(control, optimizer_of_control, task.batch(i))
    assert same_weights(model, control)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kss", "n_of_two", "n_of_each"), [(wb.KSS.recommended(), 40, 1), (wb.KSS.published(interval=1), 130, 6)]
)
def test_the_number_of_operations_hardly_grows_with_the_number_of_layers(make_model, task, kss, n_of_two, n_of_each):
    """Apart from the passes of the model itself, each block costs the choice of its tokens and their gradient."""

    def added(n_layers):
        model = make_model(n_layers=n_layers, d_model=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
        batches = [task.batch(i) for i in range(5)]
        with kss.attach(model, optimizer):
            for batch in batches[:-1]:
                step(model, optimizer, batch)
            loss_of(model, batches[-1]).backward()
            with Launches() as step_with_kss:
                optimizer.step()
        with Launches() as alone:
            loss = model(batches[-1][0]).sum()
            if kss.options.coupling == "gradient":
                loss.backward()
        return step_with_kss.n_operations - alone.n_operations

    of_two, of_eight = added(2), added(8)
    assert of_two <= n_of_two
    assert of_eight - of_two <= 6 * n_of_each
