"""Settings that change without a plan are reported at their step; correct loops raise no report."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import workbench as wb
from tests.about import about
from workbench.callbacks.alarms.settings_sentinel import SettingsChange, SettingsSentinel, planned_settings
from workbench.callbacks.observation import changed_setting
from workbench.callbacks.recorder.settings import settings_of
from workbench.errors import OptionError


def observed(values, *, name, sentinel=None, first=0):
    """Return the changes of one setting that is observed at all steps."""
    sentinel = SettingsSentinel() if sentinel is None else sentinel
    return [change for step, value in enumerate(values, first) for change in sentinel.observe(step, {name: value})]


def steps_of(changes):
    return [(change.since, change.step, change.before, change.after) for change in changes]


# Constants


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("weight_decay", [0.1], [0.2]),
        ("weight_decay", [0.1], [0.0]),
        ("betas", [[0.9, 0.999]], [[0.9, 0.95]]),
        ("eps", [1e-8], [1e-6]),
        ("seed", 1, 2),
        ("clip_norm", 1.0, 2.0),
        ("parameter_dtype", "float32", "bfloat16"),
        ("attention", "sdpa", "eager"),
        ("maximize", [False], [True]),
        ("version of torch", "2.12.0", "2.13.0"),
        ("n_optimized", 1000, 900),
        ("balance_weight", 0.01, 0.0),
    ],
)
def test_a_changed_constant_and_its_return_are_reported_immediately(name, before, after):
    changes = observed([before] * 20 + [after] * 10 + [before] * 10, name=name)
    first, second = (value[0] if isinstance(value, list) else value for value in (before, after))
    assert steps_of(changes) == [(20, 20, first, second), (30, 30, second, first)]


@pytest.mark.parametrize("at", [1, 2])
def test_a_number_that_changes_once_at_the_beginning_is_reported_at_most_one_step_late(at):
    changes = observed([0.1] * at + [0.2] * 10, name="weight_decay")
    assert [(change.since, change.before, change.after) for change in changes] == [(at, 0.1, 0.2)]
    assert changes[0].step <= at + 1


def test_an_unknown_value_is_not_a_change():
    values = [None, 0.1, math.nan, None, 0.1, None, 0.2, math.nan, None]
    assert steps_of(observed(values * 1, name="clip_norm")) == [(6, 6, 0.1, 0.2)]
    assert observed([None, "float32", None, "float32"], name="gradient_dtype") == []


def test_groups_that_change_together_are_one_change():
    sentinel = SettingsSentinel()
    for step in range(10):
        assert sentinel.observe(step, {"weight_decay": [0.1, 0.0, 0.1]}) == []
    (change,) = sentinel.observe(10, {"weight_decay": [0.2, 0.0, 0.2]})
    assert change.groups == (0, 2)
    assert change.sentence == "The weight decay of groups 0 and 2 rose from 0.1 to 0.2 at step 10."
    (change,) = sentinel.observe(11, {"weight_decay": [0.3, 0.1, 0.3, 0.3]})  # the change of 0 and 2 continues
    assert change.groups == (1,)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda step: 0.04 + 0.36 * (1 - math.cos(math.pi * step / 2000)) / 2,
        lambda step: 0.04 + 0.36 * step / 2000,
        lambda step: min(0.95, 0.85 + 0.1 * step / 300),
        lambda step: 1 - (step + 1) ** -0.8,
    ],
    ids=["cosine", "linear", "warm-up of momentum", "second beta of PaLM"],
)
def test_options_that_are_scheduled_from_the_first_step_are_planned(schedule):
    values = [schedule(step) for step in range(2000)]
    assert observed(values, name="weight_decay") == []
    changes = observed(values[:1000] + [value * 1.5 for value in values[1000:]], name="weight_decay")
    assert changes[0].step == 1000


# Plans


@pytest.mark.parametrize("factor", [0.1, 0.99, 1.001, 1.5, 40.0])
def test_with_a_plan_every_departure_is_reported_at_its_step(factor):
    plan = wb.TrainingPlan(n_steps=600, learning_rate=3e-3, warmup=50, schedule="cosine")
    rates = [3e-3 * plan.rate_factor(step) * (factor if 200 <= step < 400 else 1) for step in range(601)]
    sentinel = SettingsSentinel(planned={"learning_rate": plan.rate_factor})
    changes = observed(rates, name="learning_rate", sentinel=sentinel)
    assert [change.step for change in changes] == [200, 400]
    assert (
        f"; the planned value is {wb.formatting.number_in_words(3e-3 * plan.rate_factor(200))}." in changes[0].sentence
    )
    assert changes[1].sentence.endswith("at step 400; it follows its plan again.")


def test_a_plan_of_groups_and_of_stages_that_rise():
    """A second stage with a higher rate is planned if it is in the scheduler."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 1e-4}])
    stages = [lambda step: 1.0 if step < 50 else 5.0, lambda step: 0.9**step]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, stages)
    sentinel = SettingsSentinel(planned={"learning_rate": lambda step: scheduler.get_last_lr()})
    changes = []
    for step in range(100):
        if step == 80:
            optimizer.param_groups[1]["lr"] *= 1.5
        changes += sentinel.observe(step, settings_of(optimizer, model))
        optimizer.step()
        scheduler.step()
    assert [(change.step, change.groups) for change in changes] == [(80, (1,)), (81, (1,))]


def test_a_rate_where_the_plan_is_zero():
    sentinel = SettingsSentinel(planned={"learning_rate": lambda step: max(0.0, 1 - step / 10)})
    rates = [max(0.0, 1 - step / 10) for step in range(15)] + [0.1, 0.0]
    changes = observed(rates, name="learning_rate", sentinel=sentinel)
    assert [change.step for change in changes] == [15]
    assert changes[0].sentence == "The learning rate rose from 0 to 0.1 at step 15; the planned value is 0."


def test_a_growing_batch_is_planned_only_with_its_plan():
    sizes = [32 * 2 ** (step // 100) for step in range(300)]
    assert len(observed(sizes, name="batch_size")) == 2
    sentinel = SettingsSentinel(planned={"batch_size": lambda step: 2 ** (step // 100)})
    changes = observed(sizes, name="batch_size", sentinel=sentinel)
    assert [(change.step, change.factor) for change in changes] == [(100, 1.0), (200, 1.0)]
    sizes[150:200] = [16] * 50
    sentinel = SettingsSentinel(planned={"batch_size": lambda step: 2 ** (step // 100)})
    changes = observed(sizes, name="batch_size", sentinel=sentinel)
    assert steps_of(changes) == [(100, 100, 32, 64), (150, 151, 64, 16), (200, 201, 32, 128)]


# Batches


@settings(max_examples=100, deadline=None)
@given(
    n_examples=st.integers(33, 5000),
    size=st.integers(2, 32),
    accumulation=st.sampled_from([1, 2, 4]),
    n_steps=st.integers(100, 1500),
)
def test_smaller_batches_at_the_end_of_epochs_are_not_changes(n_examples, size, accumulation, n_steps):
    loader = [min(size, n_examples - start) for start in range(0, n_examples, size)]
    updates = [loader[i : i + accumulation] for i in range(0, len(loader), accumulation)]
    updates = [updates[step % len(updates)] for step in range(n_steps)]
    assert observed([sum(update) for update in updates], name="batch_size") == []
    assert observed([len(update) for update in updates], name="accumulation") == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n_sizes=st.integers(2, 40))
def test_packed_and_bucketed_batches_are_not_changes(seed, n_sizes):
    sizes = np.random.default_rng(seed).integers(n_sizes, size=1500) + 1
    assert observed([int(size) for size in sizes], name="batch_size") == []


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5])
def test_occasional_odd_batches_are_rarely_a_change(share):
    random = np.random.default_rng(0)
    runs = [np.where(random.random(2000) < share, 24.0, 32.0).tolist() for _ in range(60)]
    assert sum(bool(observed(run, name="batch_size")) for run in runs) <= 3


@pytest.mark.parametrize("n_before", [20, 50, 1000])
@pytest.mark.parametrize("after", [2, 31, 64])
def test_a_new_batch_size_is_reported_at_its_second_occurrence(n_before, after):
    changes = observed([32] * n_before + [after] * 10 + [32] * 10, name="batch_size")
    n = n_before
    assert steps_of(changes) == [(n, n + 1, 32, after), (n + 10, n + 11, after, 32)]
    verb = "rose" if after > 32 else "fell"
    assert (
        changes[0].sentence == f"The batch size {verb} from 32 to {after} at step {n:d}; it has stayed at this value."
    )


def test_a_new_size_among_epochs_with_smaller_ends_is_reported_within_a_few_updates():
    epoch = [32] * 19 + [7]
    assert [change.since for change in observed(epoch * 20 + [8] * 10, name="batch_size")] == [400]
    changes = observed(epoch * 20 + [7] * 10, name="batch_size")
    assert len(changes) == 1
    assert changes[0].step <= 400 + 6


# Terms of the loss


def test_an_auxiliary_loss_that_vanishes_is_reported_immediately():
    random = np.random.default_rng(0)
    losses = (0.01 * (1 + 0.2 * random.random(100))).tolist()
    for gone in (0.0, math.nan):
        changes = observed(losses + [gone] * 20 + losses, name="auxiliary_loss")
        assert [change.step for change in changes] == [100, 120]
        assert changes[0].before == losses[-1]
    assert "to missing at step 100; it was far from 0 in the steps before." in changes[0].sentence


@pytest.mark.parametrize(
    "loss",
    [
        lambda step, noise: max(0.0, 1 - step / 200 + 0.3 * noise),  # a penalty on values above a limit
        lambda step, noise: 0.1 if step % 5 == 0 else math.nan,  # only at some steps
        lambda step, noise: 0.1 * max(0.0, 1 - step / 300),  # its weight is annealed
        lambda step, noise: math.nan,
        lambda step, noise: 0.0 if step < 100 else 0.1,  # it begins later
    ],
)
def test_losses_that_may_vanish_are_not_reported(loss):
    noise = np.random.default_rng(0).normal(size=500)
    assert observed([loss(step, noise[step]) for step in range(500)], name="auxiliary_loss") == []


# Resuming


def test_a_resumed_run_reports_changes_at_its_first_step():
    before = {
        "learning_rate": [1e-3, 1e-4],
        "seed": 1,
        "version of torch": "2.12.0",
        "parameter_dtype": "float32",
        "batch_size": 32,
        "betas": [[0.9, 0.999], [0.9, 0.999]],
    }
    sentinel = SettingsSentinel()
    for step in range(50):
        assert sentinel.observe(step, before) == []
    state = json.loads(json.dumps(sentinel.state_dict(), allow_nan=False))

    same = SettingsSentinel()
    same.load_state_dict(state)
    assert [change for step in range(50, 80) for change in same.observe(step, before)] == []

    other = SettingsSentinel()
    other.load_state_dict(state)
    after = {**before, "seed": 2, "version of torch": "2.13.0", "parameter_dtype": "bfloat16"}
    after["learning_rate"] = [5e-4, 1e-4]
    changes = other.observe(50, after)
    assert {(change.setting, change.groups) for change in changes} == {
        ("learning_rate", (0,)),
        ("seed", ()),
        ("version of torch", ()),
        ("parameter_dtype", ()),
    }
    assert [change for step in range(51, 80) for change in other.observe(step, after)] == []


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 399), has_plan=st.booleans())
def test_saving_and_restoring_the_state_changes_nothing(cut, has_plan):
    plan = wb.TrainingPlan(n_steps=400, learning_rate=3e-3, warmup=50, schedule="cosine")

    def settings_at(step):
        rate = 3e-3 * plan.rate_factor(step) * (10 if 150 <= step < 250 else 1)
        batch = 8 if step % 40 == 39 or 300 <= step < 350 else 32
        auxiliary = math.nan if step > 370 else 0.01
        momentum = 0.85 + 0.1 * math.cos(step / 100)
        return {"learning_rate": rate, "batch_size": batch, "auxiliary_loss": auxiliary, "betas": [[momentum, 0.99]]}

    def make():
        return SettingsSentinel(planned={"learning_rate": plan.rate_factor} if has_plan else None)

    whole, first, second = make(), make(), make()
    expected = [whole.observe(step, settings_at(step)) for step in range(400)]
    found = [first.observe(step, settings_at(step)) for step in range(cut)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [second.observe(step, settings_at(step)) for step in range(cut, 400)]
    assert found == expected
    assert sum(map(bool, expected)) == 5


def test_a_setting_that_gains_or_loses_its_plan_starts_without_a_past():
    sentinel = SettingsSentinel()
    observed([1e-3] * 50, name="learning_rate", sentinel=sentinel)
    planned = SettingsSentinel(planned={"learning_rate": lambda step: 1e-3})
    planned.load_state_dict(sentinel.state_dict())
    assert observed([2e-3] * 50, name="learning_rate", sentinel=planned) == []
    sentinel.load_state_dict(planned.state_dict())
    assert observed([1e-3] * 50, name="learning_rate", sentinel=sentinel) == []


# Sentences and invalid settings


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("seed", 1, 2), "The seed rose from 1 to 2 at step 300."),
        (("n_optimized", 12345, 12000), "The number of parameters in the optimizer fell from 12,345 to 12,000 "
         "at step 300."),
        (("is_training", True, False), "The training mode of the model changed from yes to no at step 300."),
        (("betas", [0.9, 0.999], [0.9, 0.95]), "The betas changed from (0.9, 0.999) to (0.9, 0.95) at step 300."),
        (("weight_decay", 0.1, 0.10001), "The weight decay rose from 0.1 to 0.10001 at step 300."),
        (("version of torch", "2.12", "2.13"), "The version of torch changed from 2.12 to 2.13 at step 300."),
    ],
)  # fmt: skip
def test_sentences(change, sentence):
    assert SettingsChange(300, *change, since=300).sentence == sentence


def test_invalid_settings_are_rejected_before_anything_is_changed():
    sentinel = SettingsSentinel()
    with pytest.raises(OptionError, check=about("seed", "object")):
        sentinel.observe(0, {"weight_decay": 0.1, "seed": object()})
    assert sentinel.state_dict()["rules"] == {}
    with pytest.raises(OptionError, check=about("attention", "sdpa")):
        SettingsSentinel(planned={"attention": lambda step: 1.0}).observe(0, {"attention": "sdpa"})
    with pytest.raises(OptionError, check=about("planned['learning_rate']", 0.1)):
        SettingsSentinel(planned={"learning_rate": 0.1})


# Settings of a loop


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))


def test_settings_of_adamw_with_two_groups():
    model = make_model()
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias], "lr": 0.02}]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    model(torch.ones(3, 4)).sum().backward()
    found = settings_of(optimizer, model, seed=3, autocast=torch.bfloat16)
    assert found["optimizer"] == "AdamW"
    assert found["learning_rate"] == [0.01, 0.02]
    assert found["weight_decay"] == [0.01, 0.0]
    assert found["betas"] == [[0.9, 0.95], [0.9, 0.95]]
    assert found["maximize"] == [False, False]
    assert (found["n_groups"], found["n_optimized"], found["n_trainable"]) == (2, 58, 58)
    assert (found["parameter_dtype"], found["gradient_dtype"], found["device"]) == ("float32", "float32", "cpu")
    assert (found["is_training"], found["n_in_eval"]) == (True, 0)
    assert (found["autocast"], found["seed"]) == ("bfloat16", 3)
    assert found["version of torch"] == torch.__version__
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_settings_of_a_model_in_bfloat16_and_of_sgd():
    model = make_model().bfloat16()
    model[0].requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=torch.tensor(0.1), momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    found = settings_of(optimizer, model)
    assert (found["parameter_dtype"], found["gradient_dtype"]) == ("bfloat16", "bfloat16")
    assert (found["n_optimized"], found["n_trainable"], found["n_in_eval"]) == (18, 18, 1)
    assert (found["nesterov"], found["momentum"]) == ([True], [pytest.approx(0.95)])
    assert found["learning_rate"] == [pytest.approx(0.04)]  # a tensor on the CPU is read
    assert found["noted_rates"] == [[pytest.approx(0.04), 1.0]]
    assert scheduler.get_last_lr() == [pytest.approx(0.04)]


def test_a_rate_on_another_device_is_not_read():
    """A meta tensor represents one that a device is still computing: reading it fails."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="meta")
    found = settings_of(optimizer, model)
    assert found["learning_rate"] == [None]
    assert settings_of(optimizer, model, learning_rate=[1e-3])["learning_rate"] == [1e-3]
    sentinel = SettingsSentinel()
    assert sentinel.observe(0, found) + sentinel.observe(1, found) == []


def test_state_that_optimizers_store_in_their_groups_is_not_a_setting():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0] |= {"step": 3, "d": 1e-6, "weight_sum": 0.1, "d_numerator": torch.ones(1)}
    assert not {"step", "d", "weight_sum", "d_numerator"} & set(settings_of(optimizer, model))


@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (lambda model, optimizer: model.eval(), {"is_training", "n_in_eval"}),
        (lambda model, optimizer: model[1].eval(), {"n_in_eval"}),
        (lambda model, optimizer: model[0].requires_grad_(False), {"n_trainable"}),
        (lambda model, optimizer: model.double(), {"parameter_dtype"}),
        (lambda model, optimizer: optimizer.param_groups[0].update(maximize=True), {"maximize"}),
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=0.1), {"learning_rate"}),
        (lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.999)), {"betas"}),
        (
            lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
            {"n_groups", "n_optimized"},
        ),
        (lambda model, optimizer: setattr(model.config, "_attn_implementation", "eager"), {"attention"}),
    ],
)
def test_changes_in_a_loop_are_reported(act, changed):
    model = make_model()
    model.config = SimpleNamespace(_attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentinel = SettingsSentinel()
    for step in range(20):
        assert sentinel.observe(step, settings_of(optimizer, model)) == []
    act(model, optimizer)
    assert {change.setting for change in sentinel.observe(20, settings_of(optimizer, model))} == changed
    assert sentinel.observe(21, settings_of(optimizer, model)) == []


def test_flags_of_torch_are_settings():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    before, precision = settings_of(optimizer, model), torch.get_float32_matmul_precision()
    deterministic, flash = torch.backends.cudnn.deterministic, torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.deterministic = not deterministic
        torch.backends.cuda.enable_flash_sdp(not flash)
        after = settings_of(optimizer, model)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cuda.enable_flash_sdp(flash)
    differing = {name for name in before if before[name] != after[name]}
    assert differing == {"matmul_precision", "cpu_matmul_precision", "cudnn_is_deterministic", "flash_attention"}
    with torch.autocast("cpu", torch.bfloat16):
        assert settings_of(optimizer, model)["autocast"] == "bfloat16"
    assert before["autocast"] == "off"


@pytest.mark.recorded
def test_recorded_runs():
    """Among the failed runs, only the one with a wrong learning rate is reported."""

    def changes_of(run):
        monitors = run["monitors"].to_dataset()
        names = [name for name in ("learning_rate", "batch_size", "auxiliary_loss") if name in monitors]
        sentinel = SettingsSentinel()
        for i, step in enumerate(monitors["step"].values):
            yield from sentinel.observe(int(step), {name: float(monitors[name][i]) for name in names})

    assert [change.sentence for change in changes_of(wb.open_run(wb.samples.failed_run("hyperparameter")))] == [
        "The learning rate rose from 0.004 to 0.06 at step 110; no schedule seen so far explains it."
    ]
    for cause in ("architecture", "precision"):
        assert list(changes_of(wb.open_run(wb.samples.failed_run(cause)))) == []


SIZES = {0: 8, 100: 16, 200: 32}
FORMS = {
    "mapping of steps": {"batch_size": SIZES},
    "function of each": {"batch_size": lambda step: 8 * 2 ** (step // 100)},
    "function of all": lambda step: {"batch_size": 8 * 2 ** (step // 100)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_planned_ramp_is_reported_as_planned(form):
    sentinel = SettingsSentinel(planned=planned_settings(FORMS[form]))
    sizes = [SIZES[step // 100 * 100] for step in range(300)]
    changes = [change for step, size in enumerate(sizes) for change in sentinel.observe(step, {"batch_size": size})]
    assert [(change.step, change.factor) for change in changes] == [(100, 1.0), (200, 1.0)]
    assert changes[0].sentence == "The batch size rose from 8 to 16 at step 100; as planned."


def test_a_setting_may_be_free_at_some_steps():
    def plan(step):
        return {"learning_rate": None if step < 50 else 0.1}

    sentinel = SettingsSentinel(planned=planned_settings(plan))
    rates = [0.1 if step % 3 else 7.0 for step in range(50)] + [0.1] * 20 + [0.3]
    changes = [change for step, rate in enumerate(rates) for change in sentinel.observe(step, {"learning_rate": rate})]
    assert [change.step for change in changes] == [70]
    free = SettingsSentinel(planned=planned_settings({"weight_decay": None}))
    assert not [change for step in range(90) for change in free.observe(step, {"weight_decay": step % 7})]


def test_a_schedule_that_is_extended_or_resumed_follows_its_plan():
    def rate(step, n):
        return 0.5 + 0.5 * math.cos(math.pi * min(step / n, 1))

    n_steps = {"n": 200}
    sentinel = SettingsSentinel(planned=planned_settings({"learning_rate": lambda step: rate(step, n_steps["n"])}))
    changes = []
    for step in range(400):
        n_steps["n"] = 200 if step < 150 else 400  # extended at step 150, where the rate jumps
        changes += sentinel.observe(step, {"learning_rate": rate(step, n_steps["n"])})
    assert changes == []


def test_the_signals_of_a_run_start_anew_after_a_planned_change():
    """Gradients of twice the parameters are larger: no alarm, but a later jump is one."""

    def raised(planned):
        alarms, noise = wb.Alarms(), np.random.default_rng(0)
        for step in range(600):
            norm = (4.0 if step >= 400 else 1.0) * (8.0 if step >= 500 else 1.0) * math.exp(0.05 * noise.normal())
            alarms.observe(wb.alarms.Observation(step, "monitors", {"grad_norm": np.array(norm)}))
            if step == 399 and planned:
                alarms.observe(changed_setting(step, "n_trainable", 1.0, "More parameters require a gradient."))
        return [alarm.step for alarm in alarms.raised]

    assert raised(planned=False)[0] < 420
    assert 500 <= raised(planned=True)[0] < 520


@pytest.mark.parametrize("plan", [5, {"batch_size": "8"}, {"batch_size": {}}, {"batch_size": True}])
def test_plans_of_other_forms_are_refused(plan):
    with pytest.raises(OptionError):
        planned_settings(plan)
    with pytest.raises(OptionError, check=about("plan(0)", 3)):
        planned_settings(lambda step: 3)
