"""The trials of third-party models detect injected faults and report them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.report import cell
from benchmarks.third_party import input_trials, trial
from benchmarks.third_party.trial import Trial
from benchmarks.third_party.written_models import WIDTH, WRITTEN, states_of, tokens
from benchmarks.third_party_models import GROUPS, count_row

NANOGPT = next(t for t in WRITTEN if t.name == "nanoGPT")


def shifted(model, inputs):
    states = states_of(model, inputs)
    return [*states[:2], states[2] + 0.1 * torch.randn_like(states[2]), *states[3:]]


class Raising(nn.Module):
    """Module whose submodules cannot be listed."""

    def children(self):
        raise KeyError("injected")

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("changes", "outcome", "note"),
    [
        ({}, "works", ""),
        ({"rejection": "none"}, "wrong", "was measured, expected a rejection"),
        ({"n_blocks": 5}, "wrong", "4 states for 5 blocks"),
        ({"states": shifted}, "wrong", "layer 1: energy gain"),
        ({"options": {"n_snapshots": 50}}, "wrong", "50 states, expected 144"),
        ({"options": {"stack": "nothing"}}, "rejected unexpectedly", "There is no stack 'nothing'"),
        ({"options": {"stack": "nothing"}, "rejection": "injected"}, "rejected as listed", "There is no stack"),
        ({"needs": ("no_such_package",)}, "skipped", "no_such_package not installed"),
        ({"build": lambda: (Raising(), tokens()), "rejection": "injected"}, "crash", "KeyError"),
        ({"build": lambda: 1 / 0}, "crash", "the trial itself: ZeroDivisionError"),
        ({"states": "blocks.*"}, "works", ""),
        ({"width": WIDTH // 2, "states": states_of}, "wrong", ""),
    ],
)
def test_outcomes(changes, outcome, note):
    result = trial.run(replace(NANOGPT, **changes))
    assert (result.outcome, note in result.note) == (outcome, True), result.note


def test_a_changed_model_is_detected(monkeypatch):
    profile = trial.wb.profile

    def leave_a_hook(model, inputs, **options):
        found = profile(model, inputs, **options)
        model.blocks[0].register_forward_hook(lambda *_: None)
        return found

    monkeypatch.setattr(trial.wb, "profile", leave_a_hook)
    assert trial.run(NANOGPT).note == "hooks of the model changed"


def test_names_of_trials_are_unique():
    for trials in GROUPS.values():
        assert len({t.name for t in trials}) == len(trials)
        assert all(isinstance(t, Trial) for t in trials)
    assert sum(map(len, GROUPS.values())) >= 179
    assert len({g.name for g in input_trials.INPUTS}) == len(input_trials.INPUTS) >= 78


def test_rows_of_tables():
    results = [trial.Result("works"), trial.Result("works"), trial.Result("crash")]
    assert count_row("some", results) == "| some | 2 | 0 | 0 | 0 | 1 | 0 | 3 |"
    assert cell("a | b\nc") == "a \\| b c"
