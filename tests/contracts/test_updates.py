import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from workbench.contracts import updates
from workbench.contracts.check import CONTRACTS, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status

FAILED, PASSED, UNKNOWN, ABSENT = Status.FAILED, Status.PASSED, Status.NOT_TESTED, Status.NOT_APPLICABLE


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    mine = {id: function for id, function in CONTRACTS.items() if function.__module__ == updates.__name__}
    monkeypatch.setattr("workbench.contracts.lab.CONTRACTS", mine)


def net(dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype or torch.float32)


def loss_of(model):
    x = torch.randn(8, 4).to(next(model.parameters()).dtype)
    return functional.cross_entropy(model(x).float(), torch.arange(8) % 3)


def results(loop, n_updates=8, sees_all=True):
    found = {}
    with Observer(
        n_updates, lambda seen: found.update({each.id: each for each in all_results(seen, (), show_progress(False))})
    ) as seen:
        seen.sees_all = sees_all
        loop()
        seen.finish()
    return found


def trained(model, optimizer, n=8, after=lambda: None, before=lambda: None, **options):
    """Train with optimizers that are made under observation; ``before`` and ``after`` run around each update."""

    def loop():
        made = optimizer() if callable(optimizer) else optimizer
        for _ in range(n):
            loss_of(model).backward()
            before()
            for each in made if isinstance(made, list) else [made]:
                each.step()
            after()
            model.zero_grad()

    return results(loop, n, **options)


def sgd(model, lr=0.1, **options):
    return lambda: torch.optim.SGD(model.parameters(), lr=lr, **options)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(8, 3)
    found = trained(model, optimizer)["optimizer_covers"]
    assert found.status is FAILED
    assert "2.weight, 2.bias" in found.where
    assert "no called module" in found.evidence


def test_a_bias_that_was_left_out():
    model = net()
    found = trained(model, torch.optim.SGD([p for n, p in model.named_parameters() if n != "2.bias"], lr=0.1))
    assert found["optimizer_covers"].status is FAILED
    assert "2.bias" in found["optimizer_covers"].where


def test_biases_alone_may_be_trained_on_purpose():
    model = net()
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    assert trained(model, biases, sees_all=False)["optimizer_covers"].status is UNKNOWN


def test_a_body_without_an_optimizer_may_be_frozen_on_purpose():
    model = net()
    of_head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    assert trained(model, of_head, sees_all=False)["optimizer_covers"].status is UNKNOWN
    # If nothing was loaded, it stays at its random values.
    assert trained(model, of_head)["optimizer_covers"].status is FAILED


def test_parameters_that_are_moved_by_hand_need_no_optimizer():
    model = net()

    def move():
        with torch.no_grad():
            for p in model[0].parameters():
                p.sub_(p.grad)

    found = trained(model, lambda: torch.optim.SGD(model[2].parameters(), lr=0.1), after=move)
    assert found["optimizer_covers"].status is PASSED


def test_two_optimizers_with_one_gradient():
    model = net()
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    found = trained(model, both)["optimizer_covers"]
    assert found.status is FAILED
    assert found.where == "2.weight, 2.bias"


def test_a_second_update_with_the_same_gradient():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = trained(model, [optimizer, optimizer])["update_as_predicted"]
    assert found.status is FAILED
    assert "had used already" in found.evidence


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
    found = trained(model, Copying(model.parameters()))["update_as_predicted"]
    assert found.status is FAILED
    assert "left every entry" in found.evidence


class Tripled(torch.optim.SGD):
    pass


def test_updates_that_something_changes(monkeypatch):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def again(of, args, kwargs):
        with torch.no_grad():
            model[0].weight.sub_(0.1 * model[0].weight.grad)

    with Observer(8) as seen:
        # A hook of the optimizer, which runs before that of the observer.
        optimizer.register_step_post_hook(again)
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        found = {each.id: each for each in all_results(seen, (), show_progress(False))}["update_as_predicted"]
    assert found.status is FAILED
    assert found.where.startswith("0.weight")


def test_optimizers_of_others_are_not_computed_again():
    model = net()
    assert trained(model, Tripled(model.parameters(), lr=0.1))["update_as_predicted"].status is UNKNOWN


def test_a_training_without_updates():
    model = net()

    def loop():
        torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model.zero_grad()
            loss_of(model).backward()

    found = results(loop)["update_as_predicted"]
    assert found.status is FAILED
    assert "6 backward passes" in found.evidence


def averaging(swapped):
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    def follow():
        here, there = (model, average) if swapped else (average, model)
        with torch.no_grad():
            for p, q in zip(here.parameters(), there.parameters(), strict=True):
                p.lerp_(q, 0.1)

    return trained(model, sgd(model), after=follow)["update_as_predicted"]


def test_an_average_that_pulls_the_model_back():
    assert averaging(swapped=False).status is PASSED
    found = averaging(swapped=True)
    assert found.status is FAILED
    assert "10 %" in found.evidence


def test_weights_that_are_clamped_on_purpose():
    model = net()

    def clamp():
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)

    assert trained(model, sgd(model), after=clamp)["update_as_predicted"].status is PASSED


@pytest.mark.parametrize(("lr", "status"), [(0.5, PASSED), (1e-3, FAILED)])
def test_updates_lost_to_rounding(lr, status):
    model = net(torch.bfloat16)
    found = trained(model, sgd(model, lr))
    assert found["lost_to_rounding"].status is status
    assert found["update_as_predicted"].status is PASSED


def scheduled(make, at="update", n=12, lr=0.1, k=1, **options):
    model = net()

    def loop():
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = make(optimizer)
        for i in range(n):
            optimizer.zero_grad()
            for _ in range(k):
                (loss_of(model) / k).backward()
                if at == "pass":
                    schedule.step()
            if at == "before":
                schedule.step()
            optimizer.step()
            if at == "update" or (at == "epoch" and i % 4 == 3):
                schedule.step()
        loop.held = schedule

    return results(loop, n, **options)["schedule"]


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def test_schedules_by_update_and_by_epoch():
    assert scheduled(cosine).status is PASSED
    assert scheduled(cosine, at="epoch").status is PASSED
    assert scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50)).status is PASSED


def test_a_schedule_that_moves_in_each_micro_batch():
    found = scheduled(cosine, at="pass", k=2)
    assert found.status is FAILED
    assert "2 times for each update" in found.evidence
    assert "50 updates instead of 100" in found.evidence


def test_a_schedule_that_moves_before_the_update():
    found = scheduled(cosine, at="before")
    assert found.status is FAILED
    assert "first rate" in found.evidence


def test_a_schedule_that_never_moves():
    assert scheduled(cosine, at="never").status is UNKNOWN


def test_a_rate_of_0():
    found = scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.0), at="never")
    assert found.status is FAILED
    assert "0 in all 12 updates" in found.evidence
    found = scheduled(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=6))
    assert found.status is FAILED
    assert "from update 7 on" in found.evidence
    # The first update of a warm-up may have a rate of 0, and the last.
    assert scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda i: i / 20)).status is PASSED
    assert scheduled(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=11)).status is PASSED


def test_a_plateau_of_the_wrong_kind():
    found = {}
    for mode in ("min", "max"):
        model = net()

        def loop(model=model, mode=mode):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            schedule = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=50)
            x, y = torch.randn(8, 4), torch.arange(8) % 3
            for _ in range(8):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step(loss.item())

        found[mode] = results(loop)["schedule"]
    assert found["min"].status is PASSED
    assert found["max"].status is FAILED
    assert 'mode="min"' in found["max"].remedy


def scaled(n=8, order=("unscale", "clip", "step"), scale=1024.0, limit=1.0, k=1):
    model = net()

    def loop():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(n):
            optimizer.zero_grad()
            for _ in range(k):
                scaler.scale(loss_of(model)).backward()
                if "clip each" in order:
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
            for each in order:
                if each == "unscale":
                    scaler.unscale_(optimizer)
                elif each == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
                elif each == "step":
                    scaler.step(optimizer)
                    scaler.update()
                elif each == "plain step":
                    optimizer.step()

    return results(loop, n)


def test_scales_that_are_divided_out():
    found = scaled()
    assert found["loss_scale"].status is PASSED
    assert found["clipping_order"].status is PASSED
    assert found["update_as_predicted"].status is PASSED


def test_clipping_of_scaled_gradients():
    found = scaled(order=("clip", "step"))["clipping_order"]
    assert found.status is FAILED
    assert "1.02e+03 times too large" in found.evidence
    # A limit that is scaled as well is on purpose.
    assert scaled(order=("clip", "step"), limit=1024.0)["clipping_order"].status is PASSED


def test_clipping_after_the_update():
    found = scaled(order=("step", "clip"))["clipping_order"]
    assert found.status is FAILED
    assert "after the update" in found.evidence


def test_clipping_in_each_micro_batch():
    assert scaled(order=("unscale", "clip", "step"), k=2)["clipping_order"].status is PASSED
    found = scaled(order=("clip each", "step"), k=2, scale=1.0)["clipping_order"]
    assert found.status is FAILED
    assert "between the 2 passes" in found.evidence


def test_clipping_without_parameters():
    model = net()

    def loop():
        optimizer, parameters = torch.optim.SGD(model.parameters(), lr=0.1), model.parameters()
        list(parameters)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(list(parameters), 1.0)
            optimizer.step()

    assert "used up" in results(loop, 4)["clipping_order"].evidence


def test_updates_with_scaled_gradients():
    found = scaled(order=("plain step",))["loss_scale"]
    assert found.status is FAILED
    assert "1.02e+03 times too large" in found.evidence


def test_a_scale_below_normal_numbers():
    found = scaled(scale=2.0**-20)["loss_scale"]
    assert found.status is FAILED
    assert "smallest normal number" in found.evidence


def test_half_precision_without_a_scale():
    model = net()

    def loop(factor):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(torch.randn(8, 4))
            (functional.cross_entropy(logits.float(), torch.arange(8) % 3) * factor).backward()
            optimizer.step()

    assert results(lambda: loop(1.0), 3)["loss_scale"].status is PASSED
    found = results(lambda: loop(1e-6), 3)["loss_scale"]
    assert found.status is FAILED
    assert "GradScaler" in found.remedy


def test_the_experiments_leave_everything_as_it_was():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def ready(seen):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
        assert all_results(seen, (), show_progress(False))
        for a, b in zip(before[0].values(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(before[2], torch.get_rng_state())
        for key, state in before[1]["state"].items():
            assert all(torch.equal(value, optimizer.state_dict()["state"][key][name]) for name, value in state.items())

    with Observer(4, ready) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        seen.finish()
    assert seen.is_over
