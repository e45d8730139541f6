"""Each miswired training breaks the contract of its fault, and the sound ones none."""

import inspect

import pytest
import torch

import workbench as wb
from workbench.contracts.lab import CONTRACTS
from workbench.course.miswirings import KINDS, MISWIRED
from workbench.errors import OptionError

NAMES = {kind: name for name, kind in KINDS.items()}
#: Contracts of several processes.
OF_RANKS = {"ranks_see_different_data", "gradients_reduced", "replicas_equal", "shards_equal", "random_states"}


def fast_first(faults):
    """Return fault and kind; those of other kinds, and that which compiles, are medium tests."""
    return [
        pytest.param(fault.name, NAMES[kind], marks=pytest.mark.medium if i or kind is KINDS["compiled"] else ())
        for fault in faults
        for i, kind in enumerate(fault.kinds)
    ]


@pytest.mark.parametrize(("fault", "kind"), fast_first(MISWIRED.values()))
def test_the_check_finds_it(fault, kind):
    one = MISWIRED[fault]
    failed = {each.id for each in wb.course.miswired(fault, kind).check().failed}
    assert one.contract in failed <= {one.contract, *one.follows}


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "compiled"])
def test_a_sound_training_breaks_nothing(kind):
    assert not wb.course.miswired(kind=kind).check().failed


@pytest.mark.medium
def test_a_sound_compiled_training_breaks_nothing():
    assert not wb.course.miswired(kind="compiled").check().failed


def test_each_contract_of_one_process_is_broken():
    assert {fault.contract for fault in MISWIRED.values()} == {*CONTRACTS} - OF_RANKS
    assert {kind for fault in MISWIRED.values() for kind in fault.kinds} == {*KINDS.values()}


@pytest.mark.parametrize("fault", MISWIRED.values(), ids=lambda fault: fault.name)
def test_a_fault_is_one_other_line_of_a_step(fault):
    sound, wrong = fault.lines
    assert sound != wrong
    for kind in fault.kinds:
        # A class that was looked up by its public name checks the arguments of its methods.
        steps = [inspect.unwrap(getattr(of, fault.where, ...)) for of in (kind, kind.network)]
        assert inspect.unwrap(fault.step) in steps


@pytest.mark.parametrize("fault", ["padding in the loss", "left in eval mode", "no causal mask"])
def test_the_plain_check_finds_it_too(fault):
    training = wb.course.miswired(fault)
    report = wb.check(training.model, training.optimizer, training.loader(4), training.loss, progress=False)
    assert [each.id for each in report.failed] == [MISWIRED[fault].contract]


def test_others_are_rejected():
    with pytest.raises(OptionError, match="fault"):
        wb.course.miswired("no loss")
    with pytest.raises(OptionError, match="kind"):
        wb.course.miswired("no causal mask", "images")


def test_it_learns_and_random_states_are_kept():
    before = torch.get_rng_state()
    training = wb.course.miswired()
    losses = training.train(60)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[-1] < 0.5 * losses[0]
