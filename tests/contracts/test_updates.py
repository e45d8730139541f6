import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, lr_scheduler

from tests.contracts.small import fails, results_of
from workbench.contracts import updates
from workbench.contracts.lab import all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status

PASSED, UNKNOWN, ABSENT = Status.PASSED, Status.NOT_TESTED, Status.NOT_APPLICABLE


def net(dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype or torch.float32)


def loss_of(model):
    x = torch.randn(8, 4).to(next(model.parameters()).dtype)
    return functional.cross_entropy(model(x).float(), torch.arange(8) % 3)


def nothing():
    pass


def train(model, *optimizers, n=8, k=1, each_pass=nothing, before=nothing, after=nothing):
    """Train with functions that run after each pass, before each update, and after it."""
    for _ in range(n):
        model.zero_grad()
        for _ in range(k):
            (loss_of(model) / k).backward()
            each_pass()
        before()
        for each in optimizers:
            each.step()
        after()


def trained(model, make, n=8, sees_all=True, **options):
    """Return what is found in a training with optimizers, which ``make`` creates, or which exist already."""

    def loop():
        made = make() if callable(make) else make
        train(model, *(made if isinstance(made, list) else [made]), n=n, **options)

    return results_of(updates, loop, n, sees_all=sees_all)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_sound_training_keeps_all(kind):
    model = net()
    found = trained(model, lambda: kind(model.parameters(), lr=1e-2, weight_decay=0.1))
    for id in ("optimizer_covers", "update_as_predicted", "lost_to_rounding"):
        assert found[id].status is PASSED, found[id]
    for id in ("schedule", "loss_scale", "clipping_order"):
        assert found[id].status is ABSENT, found[id]


def test_a_replaced_head_is_not_in_the_optimizer():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(8, 3)
    assert fails(trained(model, optimizer)["optimizer_covers"], "2.weight, 2.bias", "no called module")


@pytest.mark.parametrize(
    ("is_held", "sees_all", "words"),
    [
        (lambda name: name != "2.bias", True, "2.bias"),
        (lambda name: "bias" in name, False, None),  # may be trained alone on purpose
        (lambda name: name[0] == "2", False, None),  # the body may be frozen on purpose
        (lambda name: name[0] == "2", True, "random values"),  # nothing was loaded
    ],
)
def test_parameters_of_no_optimizer(is_held, sees_all, words):
    model = net()
    held = [p for name, p in model.named_parameters() if is_held(name)]
    found = trained(model, SGD(held, lr=0.1), sees_all=sees_all)["optimizer_covers"]
    assert fails(found, words) if words else found.status is UNKNOWN


@pytest.mark.parametrize(("sees_all", "status"), [(True, Status.NOT_TESTED), (False, PASSED)])
def test_most_parameters_frozen_at_random_values_are_a_question(sees_all, status):
    model = net()
    model[0].requires_grad_(False)
    found = trained(model, SGD(model[2].parameters(), lr=0.1), sees_all=sees_all)["optimizer_covers"]
    assert found.status is status
    assert status is PASSED or found.where == "0.weight, 0.bias"


def test_parameters_that_are_moved_by_hand_need_no_optimizer():
    model = net()

    def move():
        with torch.no_grad():
            for p in model[0].parameters():
                p.sub_(p.grad)

    found = trained(model, lambda: SGD(model[2].parameters(), lr=0.1), after=move)
    assert found["optimizer_covers"].status is PASSED


def test_two_optimizers_with_one_gradient():
    model = net()
    found = trained(model, [SGD(model.parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())])
    assert fails(found["optimizer_covers"])
    assert found["optimizer_covers"].where == "2.weight, 2.bias"


def test_a_second_update_with_the_same_gradient():
    model = net()
    assert fails(trained(model, [SGD(model.parameters(), lr=0.1)] * 2)["update_as_predicted"], "had used already")


class Copying(torch.optim.Optimizer):
    """An optimizer that moves a copy."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.clone().sub_(p.grad)


def test_an_update_of_a_copy():
    model = net()
    assert fails(trained(model, Copying(model.parameters()))["update_as_predicted"], "left every entry")


class Tripled(SGD):
    pass


def test_optimizers_of_others_are_not_computed_again():
    model = net()
    assert trained(model, Tripled(model.parameters(), lr=0.1))["update_as_predicted"].status is UNKNOWN


def test_updates_that_something_changes():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    found = []

    def again(of, args, kwargs):
        with torch.no_grad():
            model[0].weight.sub_(0.1 * model[0].weight.grad)

    with Observer(8, lambda seen: found.extend(all_results(seen, (), show_progress(False)))) as seen:
        # A hook of the optimizer, which runs before that of the observer.
        optimizer.register_step_post_hook(again)
        train(model, optimizer)
        seen.finish()
    assert fails(next(each for each in found if each.id == "update_as_predicted"), "otherwise than SGD", "0.weight")


def test_a_training_without_updates():
    model = net()
    found = results_of(updates, lambda: train(model, n=6), 6)
    assert fails(found["update_as_predicted"], "6 backward passes")


@pytest.mark.parametrize("is_swapped", [False, True])
def test_an_average_that_pulls_the_model_back(is_swapped):
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    here, there = (model, average) if is_swapped else (average, model)

    def follow():
        with torch.no_grad():
            for p, q in zip(here.parameters(), there.parameters(), strict=True):
                p.lerp_(q, 0.1)

    found = trained(model, lambda: SGD(model.parameters(), lr=0.1), after=follow)["update_as_predicted"]
    assert fails(found, "10 %") if is_swapped else found.status is PASSED


def test_weights_that_are_clamped_on_purpose():
    model = net()

    def clamp():
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)

    found = trained(model, lambda: SGD(model.parameters(), lr=0.1), after=clamp)
    assert found["update_as_predicted"].status is PASSED


@pytest.mark.parametrize(("lr", "status"), [(0.5, PASSED), (1e-3, Status.FAILED)])
def test_updates_lost_to_rounding(lr, status):
    model = net(torch.bfloat16)
    found = trained(model, lambda: SGD(model.parameters(), lr=lr))
    assert found["lost_to_rounding"].status is status
    assert found["update_as_predicted"].status is PASSED


def scheduled(make, at="after", n=12, k=1, every=1):
    """Train with a schedule that moves at some place of the loop, every so many updates."""
    model = net()

    def loop():
        optimizer = SGD(model.parameters(), lr=0.1)
        schedule = loop.held = make(optimizer)
        calls = iter(range(1, 1 + n * k))
        move = {at: lambda: schedule.step() if next(calls) % every == 0 else None}
        train(model, optimizer, n=n, k=k, **{name: do for name, do in move.items() if name != "never"})

    return results_of(updates, loop, n)["schedule"]


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cosine, {}),
        (cosine, {"every": 4}),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50), {}),
        # The first update of a warm-up may have a rate of 0, and the last.
        (lambda o: lr_scheduler.LambdaLR(o, lambda i: i / 20), {}),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=11), {}),
    ],
)
def test_sound_schedules(make, options):
    assert scheduled(make, **options).status is PASSED


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (cosine, {"at": "each_pass", "k": 2}, ["2 times for each update", "50 updates instead of 100"]),
        (cosine, {"at": "before"}, ["first rate"]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.0), {"at": "never"}, ["0 in all 12 updates"]),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=6), {}, ["from update 7 on"]),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.3), {}, ["of the largest, from update 9 on"]),
    ],
)
def test_broken_schedules(make, options, words):
    assert fails(scheduled(make, **options), *words)


def test_a_schedule_that_never_moves():
    assert scheduled(cosine, at="never").status is UNKNOWN


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_of_the_wrong_kind(mode):
    model = net()

    def loop():
        optimizer = SGD(model.parameters(), lr=0.5)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=50)
        x, y = torch.randn(8, 4), torch.arange(8) % 3
        for _ in range(8):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step(loss.item())

    found = results_of(updates, loop, 8)["schedule"]
    assert fails(found, 'mode="min"') if mode == "max" else found.status is PASSED


def scaled(order=("unscale", "clip", "step"), scale=1024.0, limit=1.0, k=1, n=8):
    """Return what is found in a training with a gradient scaler that does some things in this order."""
    model = net()

    def loop():
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        acts = {
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), limit),
            "step": lambda: (scaler.step(optimizer), scaler.update()),
            "plain step": optimizer.step,
        }
        for _ in range(n):
            optimizer.zero_grad()
            for _ in range(k):
                scaler.scale(loss_of(model)).backward()
                if "clip each" in order:
                    acts["clip"]()
            for each in order:
                acts.get(each, nothing)()

    return results_of(updates, loop, n)


def test_scales_that_are_divided_out():
    found = scaled()
    for id in ("loss_scale", "clipping_order", "update_as_predicted"):
        assert found[id].status is PASSED
    # A limit that is scaled as well is on purpose.
    assert scaled(order=("clip", "step"), limit=1024.0)["clipping_order"].status is PASSED
    assert scaled(k=2)["clipping_order"].status is PASSED


@pytest.mark.parametrize(
    ("id", "options", "words"),
    [
        ("clipping_order", {"order": ("clip", "step")}, "1.02e+03 times too large"),
        ("clipping_order", {"order": ("step", "clip")}, "after the update"),
        ("clipping_order", {"order": ("clip each", "step"), "k": 2, "scale": 1.0}, "between the 2 passes"),
        ("loss_scale", {"order": ("plain step",)}, "1.02e+03 times too large"),
        ("loss_scale", {"scale": 2.0**-20}, "smallest normal number"),
    ],
)
def test_scales_and_clippings_in_a_wrong_order(id, options, words):
    assert fails(scaled(**options)[id], words)


def test_updates_without_gradients_beside_a_frozen_parameter():
    model = net()
    model[0].bias.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert fails(trained(model, optimizer, before=model.zero_grad)["update_as_predicted"], "none of its 3 parameters")


@pytest.mark.parametrize("is_used", [False, True])
def test_clipping_without_parameters(is_used):
    model = net()
    parameters = model.parameters()
    if is_used:
        list(parameters)
    found = trained(
        model, SGD(model.parameters(), lr=0.1), 4, before=lambda: nn.utils.clip_grad_norm_(list(parameters), 1.0)
    )
    assert fails(found["clipping_order"], "used up")


@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_half_precision_without_a_scale(factor):
    model = net()

    def loop():
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(torch.randn(8, 4))
            (functional.cross_entropy(logits.float(), torch.arange(8) % 3) * factor).backward()
            optimizer.step()

    found = results_of(updates, loop, 3)["loss_scale"]
    assert fails(found, "GradScaler") if factor < 1 else found.status is PASSED


def test_the_experiments_leave_everything_as_it_was():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state(seen):
        copies = [(c.before, c.gradient, c.after, c.state) for update in seen.updates for c in update.copies]
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), copies))

    def ready(seen):
        before = state(seen)
        assert all_results(seen, (), show_progress(False))
        torch.testing.assert_close(state(seen), before, rtol=0, atol=0)

    with Observer(4, ready) as seen:
        train(model, optimizer, n=4)
        seen.finish()
    assert seen.is_over


def test_sparse_gradients_are_gradients():
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Embedding(8, 3, sparse=True) for _ in range(2))

        def forward(self, x):
            return (self.a(x.long()[:, 0] % 8) * self.b(x.long()[:, 1] % 8)).float()

    model = Factors()
    whole = trained(model, lambda: torch.optim.SparseAdam(list(model.parameters()), lr=1e-2))
    assert whole["optimizer_covers"].status is PASSED
    assert whole["update_as_predicted"].status is UNKNOWN
    model = Factors()
    part = trained(model, lambda: torch.optim.SparseAdam(list(model.a.parameters()), lr=1e-2))
    assert fails(part["optimizer_covers"], "b.weight")


def test_an_optimizer_of_a_module_that_no_loss_reaches():
    model, maker = net(), nn.Linear(4, 4)

    def loop():
        made = SGD(model.parameters(), lr=0.1), SGD(maker.parameters(), lr=0.1)
        for _ in range(8):
            for each in made:
                each.zero_grad()
            functional.cross_entropy(model(maker(torch.randn(8, 4)).detach()), torch.arange(8) % 3).backward()
            for each in made:
                each.step()

    assert fails(results_of(updates, loop, 8)["update_as_predicted"], "none of its 2 parameters with a gradient")


def test_clippings_without_an_update_are_unknown():
    model = net()

    def loop():
        for _ in range(4):
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert results_of(updates, loop, 8)["clipping_order"].status is UNKNOWN


def test_experiments_between_a_forward_and_a_backward_pass_leave_its_graph_alone():
    def trained_pair(watches):
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
        of_maker, of_critic = (SGD(each.parameters(), lr=0.1) for each in (maker, critic))

        def loop():
            for _ in range(8):
                critic.zero_grad()
                fake = maker(torch.randn(16, 4))
                (critic(fake.detach()) - critic(torch.randn(16, 4))).mean().backward()
                of_critic.step()
                maker.zero_grad()
                (-critic(fake)).mean().backward()  # before this call the experiments are made
                of_maker.step()

        if watches:
            with Observer(4, lambda seen: all_results(seen, (), show_progress(False))) as seen:
                loop()
            assert seen.interrupted is not None
        else:
            loop()
        return [p.detach().clone() for each in (maker, critic) for p in each.parameters()]

    for plain, observed in zip(trained_pair(False), trained_pair(True), strict=True):
        assert torch.equal(plain, observed)


class InList(nn.Module):
    """Layers in a list, where `parameters` does not find them."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = [nn.Linear(4, 8), nn.Linear(8, 8)], nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("is_held", [False, True])
def test_modules_in_a_plain_list(is_held):
    def make():
        hidden = [p for layer in model.layers for p in layer.parameters()] if is_held else []
        return SGD([*model.parameters(), *hidden], lr=0.1)

    model = InList()
    found = trained(model, make)["optimizer_covers"]
    assert found.status is (PASSED if is_held else Status.FAILED)
    assert is_held or found.where == "layers"


def test_an_optimizer_without_updates_is_a_question():
    model = net()
    idle = SGD(model[2].parameters(), lr=0.1)
    found = trained(model, lambda: SGD(model[0].parameters(), lr=0.1))["optimizer_covers"]
    assert found.status is UNKNOWN
    assert "2.weight" in found.where
    assert len(idle.param_groups) == 1
