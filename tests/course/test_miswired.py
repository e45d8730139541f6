"""Each miswired training breaks the contract of its fault, and the sound one none."""

import pytest
import torch

import workbench as wb
from workbench.errors import OptionError

BROKEN = {
    "": [],
    "labels shifted twice": ["labels_aligned"],
    "no causal mask": ["causal"],
    "padding in the loss": ["padding_ignored"],
    "head replaced after the optimizer": ["optimizer_covers"],
    "positions forgotten": [],  # a question, as it may be meant
    "left in eval mode": ["train_mode"],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_check_finds_it(fault):
    training = wb.course.miswired(fault)
    report = wb.check(training.model, training.optimizer, training.texts(4), training.loss, progress=False)
    assert [each.id for each in report.failed] == BROKEN[fault]


def test_every_fault_is_tested_and_others_are_rejected():
    assert {*BROKEN} == {"", *wb.course.MISWIRED}
    with pytest.raises(OptionError, match="fault"):
        wb.course.miswired("no loss")


def test_it_learns_and_random_states_are_kept():
    before = torch.get_rng_state()
    training = wb.course.miswired()
    assert torch.equal(torch.get_rng_state(), before)
    losses = [training.update(ids) for ids in training.texts(40)]
    assert losses[-1] < 0.5 * losses[0]
