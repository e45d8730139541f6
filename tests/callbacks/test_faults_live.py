import threading

import numpy as np
import pytest
import torch

import workbench as wb
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from tests.training.test_resuming import run_to
from workbench.errors import OptionError, StoreError

SETTINGS = {"n_steps": 12, "learning_rate": 1e-2, "seed": 5}
MAKE = {name: entry.make for name, entry in wb.faults.catalog().items()}
#: Options that make each fault act on small batches, with all that it draws and keeps.
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
def test_a_fault_that_is_off_changes_nothing_and_one_that_is_on_does(name, make_model, task):
    weights = {}
    for when, options in (("off", {}), ("on", {"start": 4})):
        model = model_for(name, make_model)
        fault = make_fault(name, **options)
        records = train(model, task, fault, n_steps=6)
        weights[when] = model
        is_on = [record.active_faults == (name,) for record in records]
        assert is_on == [when == "on" and step >= 4 for step in range(6)]
    plain = model_for(name, make_model)
    if name == "low_precision_attention":  # off, its attention is exact, but not torch's to the bit
        train(plain, task, MAKE[name](n_bits=0, start=0), n_steps=6)
    else:
        train(plain, task, n_steps=6)
    assert same_weights(weights["off"], plain)
    assert not same_weights(weights["on"], plain)


def test_switches_are_events_and_the_schedule_rules_until_a_hand_does(make_model, task, tmp_path):
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
    wb.schema.validate_events(wb.open_run(tmp_path / "a.zarr")["events"].to_dataset())


def test_a_hand_overrides_a_schedule_for_good():
    fault = wb.faults.small_batch(start=3, stop=6)
    assert [fault.begin_step(step) for step in range(8)] == [False] * 3 + [True] * 3 + [False] * 2
    fault.begin_step(4)
    fault.enabled = False
    assert [fault.begin_step(step) for step in range(8)] == [False] * 8
    fault.enabled = True
    assert [fault.begin_step(step) for step in range(8)] == [True] * 8


def test_observers_hear_every_switch_once_whoever_made_it():
    fault, heard = wb.faults.small_batch(start=3), []
    stop = fault.observe(lambda *change: heard.append(change))
    for step in range(5):
        fault.begin_step(step)
    fault.enabled = True  # as it is
    fault.enabled = False
    stop()
    fault.enabled = True
    assert heard == [("enabled", False, True), ("enabled", True, False)]


@pytest.mark.medium
def test_it_may_be_turned_from_other_threads(make_model, task, tmp_path):
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
    # What is recorded is what was done, and every change of it is an event.
    is_on = [bool(record.active_faults) for record in records]
    assert [record.learning_rate for record in records] == pytest.approx([0.02 if on else 0.01 for on in is_on])
    switches = [step for step in range(40) if is_on[step] != (is_on[step - 1] if step else False)]
    assert [step for step, _, _ in fault_events(tmp_path / "a.zarr")] == switches


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("large_rate", "stale_reduction") else pytest.mark.slow) for n in MAKE]
)
def test_a_resumed_run_has_the_bits_of_one_that_ran_through(name, make_model, task, tmp_path):
    through, resumed = model_for(name, make_model), model_for(name, make_model)
    train(through, task, make_fault(name, start=2, stop=10), store=tmp_path / "through.zarr", checkpoint_every=5)
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 5}
    run_to(6, model_for(name, make_model), task, **settings, faults=[make_fault(name, start=2, stop=10)])
    first, *_ = train(resumed, task, make_fault(name, start=2, stop=10), **settings, resume=True)
    assert (first.step, first.active_faults) == (7, (name,))
    assert same_weights(resumed, through)
    assert fault_events(tmp_path / "run.zarr") == fault_events(tmp_path / "through.zarr")
    assert [step for step, _, _ in fault_events(tmp_path / "run.zarr")] == [2, 10]


@pytest.mark.medium
def test_all_faults_at_once_resume_too(task, tmp_path):
    def faults():
        return [make_fault(name, start=2) for name in MAKE]

    through, resumed = (model_for("no_auxiliary_loss", None) for _ in range(2))
    records = train(through, task, *faults(), n_steps=9, precision="bfloat16")
    assert records[2].active_faults == tuple(MAKE)
    settings = {**SETTINGS, "n_steps": 9, "checkpoints": tmp_path, "checkpoint_every": 3, "precision": "bfloat16"}
    run_to(5, model_for("no_auxiliary_loss", None), task, **settings, faults=faults())
    train(resumed, task, *reversed(faults()), **settings, resume=True)  # their order means nothing
    assert same_weights(resumed, through)


def test_a_resumed_run_takes_up_the_switch(make_model, task, tmp_path):
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


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ([wb.faults.large_rate(factor=3, start=2)], "faults.large_rate.factor = 2, this call says 3"),
        ([wb.faults.large_rate(factor=2, start=3)], "faults.large_rate.start = 2, this call says 3"),
        ([], "faults.large_rate.start = 2, this call says nothing"),
        ([wb.faults.large_rate(factor=2, start=2), wb.faults.small_batch()], "faults.small_batch.start = nothing"),
    ],
)
def test_other_faults_are_another_run(make_model, task, tmp_path, faults, sentence):
    settings = {**SETTINGS, "checkpoints": tmp_path, "checkpoint_every": 4}
    run_to(5, make_model(), task, **settings, faults=[wb.faults.large_rate(factor=2, start=2)])
    with pytest.raises(StoreError, match=sentence):
        train(make_model(), task, *faults, **settings, resume=True)


@pytest.mark.parametrize("name", MAKE)
def test_mixed_precision_and_a_model_of_hugging_face(name, task):
    model = model_for(name, None) if name == "no_auxiliary_loss" else dropout_model()
    before = torch.get_rng_state()
    records = train(model, task, make_fault(name, start=1), n_steps=4, precision="bfloat16")
    assert np.isfinite([[record.loss, record.grad_norm] for record in records]).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["low_precision_attention", "large_rate", "small_batch", "corrupted_data"])
@pytest.mark.parametrize("optimizer", ["LBFGS", "SAM"])
def test_closures_see_the_fault_too(name, optimizer, make_model, task):
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


def test_it_goes_with_kss(make_model, task):
    faults = [wb.faults.low_precision_attention(start=0), wb.faults.large_rate(factor=5, start=0)]
    model = make_model("none")
    records = train(model, task, *faults, kss=wb.KSS.recommended())
    assert all(record.kss_enabled and len(record.active_faults) == 2 for record in records)
    assert records[0].shaping.control.enabled


def test_a_run_that_breaks_ends_as_a_divergence(make_model, task, tmp_path):
    fault = wb.faults.large_rate(factor=1e30, start=2)
    records = train(make_model("none"), task, fault, store=tmp_path / "a.zarr")
    assert records[-1].diverged
    assert records[-1].step < 6
    assert wb.open_run(tmp_path / "a.zarr").attrs["state"] == "diverged"
    poisoned = make_model()
    with torch.no_grad():
        poisoned.blocks[0].attention.value.weight[0, 0] = float("nan")
    every = [make_fault(name, start=0) for name in MAKE if name != "no_auxiliary_loss"]
    assert [record.cause for record in train(poisoned, task, *every)] == ["non-finite"]


def test_two_runs_with_one_fault_object_do_not_meet(make_model, task):
    """What a run keeps of a fault is the run's own."""
    fault = wb.faults.stale_reduction(delay=2, start=0)
    alone, one, two = make_model(), make_model(), make_model()
    train(alone, task, wb.faults.stale_reduction(delay=2, start=0), n_steps=5)
    runs = [wb.train(model, task, **{**SETTINGS, "n_steps": 5}, faults=[fault]) for model in (one, two)]
    for _ in zip(*runs, strict=True):
        pass
    assert same_weights(one, alone)
    assert same_weights(two, alone)


def test_the_catalog_makes_each_of_them():
    for name, (make, meaning) in wb.faults.catalog().items():
        fault = make()
        assert fault.name == fault.kind == name
        assert getattr(wb.faults, name) is make
        assert not fault.enabled
        assert len(fault.effect) > 10
        assert 10 < len(meaning) < 80
        assert set(fault.describe()) >= {"start", "stop"}


@pytest.mark.parametrize("name", MAKE)
def test_schedules_that_make_no_sense_are_refused(name):
    for options, sentence in (
        ({"start": 5, "stop": 5}, "stop is 5, expected a step after start = 5"),
        ({"stop": 5}, "stop is 5 but start is not given; pass start= too"),
        ({"start": -1}, "start is -1, expected at least 0"),
        ({"start": 0.5}, "start is 0.5, expected a whole number"),
    ):
        with pytest.raises(OptionError, match=sentence):
            MAKE[name](**options)


def test_only_the_switch_may_be_turned():
    fault = wb.faults.large_rate(factor=3)
    with pytest.raises(OptionError, match="factor of large_rate cannot be changed, only enabled can; make a new"):
        fault.factor = 5
    assert fault.factor == 3


def test_lists_that_make_no_sense_are_refused(make_model, task):
    for faults, sentence in (
        ([wb.faults.large_rate(), wb.faults.large_rate(factor=40)], "faults holds large_rate twice, expected one of"),
        (["large_rate"], r"faults holds a str, expected faults such as wb.faults.large_rate\(\)"),
        (wb.faults.large_rate(), r"faults is one large_rate, expected a sequence; pass \[it\]"),
    ):
        with pytest.raises(OptionError, match=sentence):
            wb.train(make_model(), task, n_steps=1, faults=faults)
