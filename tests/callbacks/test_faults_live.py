import threading

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import run_to
from workbench.errors import OptionError

SETTINGS = {"n_steps": 12, "learning_rate": 1e-2, "seed": 5}
MAKE = {name: entry.make for name, entry in wb.faults.catalog().items()}
#: Options with which each fault acts on small batches, draws random numbers and keeps a state, where applicable.
OPTIONS = {
    "small_batch": {"n_rows": 4},
    "corrupted_data": {"what": "tokens", "share": 0.5},
    "large_rate": {"factor": 3, "ramp": 6},
    "stale_reduction": {"delay": 3, "share": 0.5},
    "dropped_bucket": {"share": 0.5, "lost_from": "one_rank"},
}


def make_fault(name, **options):
    return MAKE[name](**OPTIONS.get(name, {}), **options)


def model_for(name, make_model):
    if name != "no_auxiliary_loss":
        return make_model()
    return wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=16, n_experts=4, seed=1)


def train(model, task, *faults, **settings):
    return list(wb.train(model, task, **{**SETTINGS, **settings}, faults=faults))


def fault_events(store):
    events = wb.open_run(store)["events"].to_dataset()
    names = ("step", "source", "message")
    rows = zip(*(events[name].values.tolist() for name in names), strict=True)
    return [row for row, kind in zip(rows, events["kind"].values, strict=True) if kind == "fault"]


@pytest.mark.parametrize("name", MAKE)
def test_a_fault_changes_training_only_while_it_is_on(name, make_model, task):
    models = {}
    for when, options in (("off", {}), ("on", {"start": 4})):
        model = model_for(name, make_model)
        fault = make_fault(name, **options)
        records = train(model, task, fault, n_steps=6)
        models[when] = model
        is_on = [record.active_faults == (name,) for record in records]
        assert is_on == [when == "on" and step >= 4 for step in range(6)]
    control = model_for(name, make_model)
    if name == "low_precision_attention":  # off, its attention is exact, but not bitwise identical to that of torch
        train(control, task, MAKE[name](n_bits=0, start=0), n_steps=6)
    else:
        train(control, task, n_steps=6)
    assert same_weights(models["off"], control)
    assert not same_weights(models["on"], control)


def test_switches_are_events_and_override_the_schedule(make_model, task, tmp_path):
    fault = wb.faults.low_precision_attention(n_bits=8, start=2, stop=4)
    idle = wb.faults.large_rate(factor=40)
    active = []
    for record in wb.train(make_model(), task, **SETTINGS, store=tmp_path / "a.zarr", faults=[fault, idle]):
        active.append(record.active_faults)
        if record.step in (6, 8):
            fault.enabled = not fault.enabled
        if record.step == 7:
            idle.enabled = True
    name = "low_precision_attention"
    assert active == [(), (), (name,), (name,), (), (), (), (name,), (name, "large_rate"), *[("large_rate",)] * 3]
    on = "low_precision_attention on: 8 bits of O and dO are cut in the backward pass."
    assert fault_events(tmp_path / "a.zarr") == [
        (2, name, on),
        (4, name, "low_precision_attention off."),
        (7, name, on),
        (8, "large_rate", "large_rate on: the learning rate is multiplied by 40."),
        (9, name, "low_precision_attention off."),
    ]
    wb.schema.runs.validate_events(wb.open_run(tmp_path / "a.zarr")["events"].to_dataset())


def test_observers_receive_each_switch_once():
    fault, received = wb.faults.small_batch(start=3), []
    remove = fault.observe(lambda *change: received.append(change))
    for step in range(5):
        fault.begin_step(step)
    fault.enabled = True  # unchanged
    fault.enabled = False
    remove()
    fault.enabled = True
    assert received == [("enabled", False, True), ("enabled", True, False)]


@pytest.mark.medium
def test_a_fault_may_be_switched_from_other_threads(make_model, task, tmp_path):
    fault, is_over = wb.faults.large_rate(factor=2), threading.Event()

    def flip():
        while not is_over.wait(0.002):
            fault.enabled = not fault.enabled

    threads = [threading.Thread(target=flip) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        records = train(make_model(), task, fault, n_steps=40, store=tmp_path / "a.zarr")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    # The record shows which steps the fault was on, and every change is an event.
    is_on = [bool(record.active_faults) for record in records]
    assert [record.learning_rate for record in records] == pytest.approx([0.02 if on else 0.01 for on in is_on])
    switches = [step for step in range(40) if is_on[step] != (is_on[step - 1] if step else False)]
    assert [step for step, _, _ in fault_events(tmp_path / "a.zarr")] == switches


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("large_rate", "stale_reduction") else pytest.mark.slow) for n in MAKE]
)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(name, make_model, task, tmp_path):
    uninterrupted, resumed = model_for(name, make_model), model_for(name, make_model)
    complete = {"store": tmp_path / "uninterrupted.zarr", "checkpoint_every": 5}
    train(uninterrupted, task, make_fault(name, start=2, stop=10), **complete)
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 5}
    run_to(6, model_for(name, make_model), task, **settings, faults=[make_fault(name, start=2, stop=10)])
    first, *_ = train(resumed, task, make_fault(name, start=2, stop=10), **settings, resume=True)
    assert (first.step, first.active_faults) == (7, (name,))
    assert same_weights(resumed, uninterrupted)
    assert fault_events(tmp_path / "run.zarr") == fault_events(tmp_path / "uninterrupted.zarr")
    assert [step for step, _, _ in fault_events(tmp_path / "run.zarr")] == [2, 10]


def test_a_resumed_run_restores_the_switch(make_model, task, tmp_path):
    settings = {**SETTINGS, "checkpoints": tmp_path, "checkpoint_every": 4}
    fault = wb.faults.large_rate(factor=2, start=0)
    run = wb.train(make_model(), task, **settings, faults=[fault])
    for record in run:
        if record.step == 2:
            fault.enabled = False
        if record.step == 5:
            break
    run.close()
    other = wb.faults.large_rate(factor=2, start=0)
    records = train(make_model(), task, other, **settings, resume=True)
    assert not other.enabled
    assert {record.active_faults for record in records} == {()}


@pytest.mark.parametrize("name", MAKE)
def test_mixed_precision_with_a_hugging_face_model(name, task):
    model = model_for(name, None) if name == "no_auxiliary_loss" else dropout_model()
    before = torch.get_rng_state()
    records = train(model, task, make_fault(name, start=1), n_steps=4, precision="bfloat16")
    assert np.isfinite([[record.loss, record.grad_norm] for record in records]).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["low_precision_attention", "large_rate", "small_batch", "corrupted_data"])
@pytest.mark.parametrize("optimizer", ["LBFGS", "SAM"])
def test_faults_act_in_closures(name, optimizer, make_model, task):
    options = {"optimizer": wb.baselines.SAM(0.05)}
    if optimizer == "LBFGS":
        options = {"optimizer": "LBFGS", "optimizer_options": {"max_iter": 3}}
    settings = {"n_steps": 3, "learning_rate": 0.05, **options}
    off, on, seen = make_model(), make_model(), []
    train(off, task, make_fault(name), **settings)
    on.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    records = train(on, task, make_fault(name, start=1), **settings)
    assert np.isfinite([record.loss for record in records]).all()
    assert not same_weights(off, on)
    if name == "small_batch":
        assert set(seen[-2:]) == {4}


def test_a_run_that_diverges_because_of_a_fault_ends(make_model, task, tmp_path):
    fault = wb.faults.large_rate(factor=1e30, start=2)
    records = train(make_model("none"), task, fault, store=tmp_path / "a.zarr")
    assert records[-1].diverged
    assert records[-1].step < 6
    assert wb.open_run(tmp_path / "a.zarr").attrs["state"] == "diverged"
    not_finite = make_model()
    with torch.no_grad():
        not_finite.blocks[0].attention.value.weight[0, 0] = float("nan")
    faults = [make_fault(name, start=0) for name in MAKE if name != "no_auxiliary_loss"]
    assert [record.cause for record in train(not_finite, task, *faults)] == ["non-finite"]


def test_the_catalog_contains_all_kinds():
    for name, (make, meaning) in wb.faults.catalog().items():
        fault = make()
        assert fault.name == fault.kind == name
        assert getattr(wb.faults, name) is make
        assert not fault.enabled
        assert len(fault.effect) > 10
        assert 10 < len(meaning) < 80
        assert set(fault.describe()) >= {"start", "stop"}


def test_invalid_schedules_are_rejected():
    for options in ({"start": 5, "stop": 5}, {"stop": 5}):
        with pytest.raises(OptionError, check=about("stop", 5)):
            wb.faults.large_rate(**options)
    with pytest.raises(OptionError, check=about("start", -1)):
        wb.faults.large_rate(start=-1)


def test_only_the_switch_may_be_changed():
    fault = wb.faults.large_rate(factor=3)
    with pytest.raises(OptionError, check=says("factor of large_rate cannot be changed; create")):
        fault.factor = 5
    assert fault.factor == 3


def test_invalid_lists_are_rejected(make_model, task):
    for faults, value in (
        ([wb.faults.large_rate(), wb.faults.large_rate(factor=40)], "large_rate"),
        (["large_rate"], "large_rate"),
        (wb.faults.large_rate(), "LargeRate"),
    ):
        with pytest.raises(OptionError, check=about("faults", value)):
            wb.train(make_model(), task, n_steps=1, faults=faults)
