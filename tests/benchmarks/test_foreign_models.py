"""The trials of other people's models can fail, and say in which way."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.foreign import given, trial
from benchmarks.foreign.trial import Trial
from benchmarks.foreign.written_models import WIDTH, WRITTEN, Model, own_states, tokens
from benchmarks.foreign_models import GROUPS, cell, counted

PLAIN = next(t for t in WRITTEN if t.name == "nanoGPT")


def shifted(model, inputs):
    states = own_states(model, inputs)
    return [*states[:2], states[2] + 0.1 * torch.randn_like(states[2]), *states[3:]]


class Noisy(Model):
    """Changes its own weights when it runs without gradients in eval mode."""

    def forward(self, ids):
        with torch.no_grad():
            self.head.bias.add_(1.0)
        return super().forward(ids)


class Raising(nn.Module):
    """Breaks whatever looks at its parts."""

    def children(self):
        raise KeyError("planted")

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("changes", "outcome", "note"),
    [
        ({}, "works", ""),
        ({"refusal": "none"}, "wrong", "was measured, expected a refusal"),
        ({"n_blocks": 5}, "wrong", "4 states for 5 blocks"),
        ({"states": shifted}, "wrong", "layer 1: energy gain"),
        ({"options": {"n_snapshots": 50}}, "wrong", "50 states, expected 144"),
        ({"options": {"stack": "nothing"}}, "refused unexpectedly", "There is no stack 'nothing'"),
        ({"options": {"stack": "nothing"}, "refusal": "planted"}, "refused as listed", "There is no stack"),
        ({"needs": ("no_such_package",)}, "skipped", "no_such_package not installed"),
        ({"build": lambda: (Raising(), tokens()), "refusal": "planted"}, "crash", "KeyError"),
        ({"build": lambda: 1 / 0}, "crash", "the trial itself: ZeroDivisionError"),
        ({"states": "blocks.*"}, "works", ""),
        ({"width": WIDTH // 2, "states": own_states}, "wrong", ""),
    ],
)
def test_outcomes(changes, outcome, note):
    result = trial.run(replace(PLAIN, **changes))
    assert (result.outcome, note in result.note) == (outcome, True), result.note


def test_a_model_that_is_not_as_before_is_noticed(monkeypatch):
    profile = trial.wb.profile

    def careless(model, inputs, **options):
        found = profile(model, inputs, **options)
        model.blocks[0].register_forward_hook(lambda *_: None)
        return found

    monkeypatch.setattr(trial.wb, "profile", careless)
    assert trial.run(PLAIN).note == "hooks of the model changed"


def test_every_trial_has_a_name_of_its_own_and_every_refusal_a_reason():
    for trials in GROUPS.values():
        assert len({t.name for t in trials}) == len(trials)
        assert all(isinstance(t, Trial) for t in trials)
    assert sum(map(len, GROUPS.values())) >= 179
    assert len({g.name for g in given.INPUTS}) == len(given.INPUTS) >= 78


@pytest.mark.parametrize("name", ["lists of different lengths", "padded on the left", "nested tensor", "dict of lists"])
def test_inputs(name):
    result = given.run(next(g for g in given.INPUTS if g.name == name))
    assert result.outcome == ("refused as listed" if name == "nested tensor" else "works")


def test_rows_of_tables():
    results = [trial.Result("works"), trial.Result("works"), trial.Result("crash")]
    assert counted("some", results) == "| some | 2 | 0 | 0 | 0 | 1 | 0 | 3 |"
    assert cell("a | b\nc") == "a \\| b c"
