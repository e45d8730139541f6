"""The trials of third-party models, inputs and checkpoints, each with the outcome that it states in advance.

A model or an input *works* if its spectra are those of independently recorded states; a checkpoint, if its parameters
and the spectra, in memory and streamed, are those of the model that was written. Rejections must have the stated
reason, and no code of a file may run. ``python -m benchmarks.third_party_models`` also tries whole libraries.
"""

from collections import Counter

import pytest

from benchmarks import third_party_checkpoints
from benchmarks.third_party import input_trials, trial
from benchmarks.third_party.written_models import WRITTEN


@pytest.mark.parametrize("model", WRITTEN, ids=lambda model: model.name)
def test_models_written_by_hand(model):
    found = trial.run(model)
    assert found.outcome == ("rejected as listed" if model.rejection else "works"), found.note


@pytest.mark.parametrize("inputs", input_trials.INPUTS, ids=lambda inputs: inputs.name)
def test_inputs(inputs):
    found = input_trials.run(inputs)
    is_rejected = inputs.same is None and inputs.n_states is None
    assert found.outcome == ("rejected as listed" if is_rejected else "works"), found.note


def checkpoints():
    """Yield all trials; those that open a model are slow, except for the first two of each group."""
    opened = Counter()
    for one in third_party_checkpoints.all_trials():
        opened[one.group] += not one.rejection
        marks = () if one.rejection else pytest.mark.medium if opened[one.group] <= 2 else pytest.mark.slow
        yield pytest.param(one, marks=marks, id=f"{one.group}: {one.name}")


@pytest.mark.parametrize("checkpoint", list(checkpoints()))
@pytest.mark.filterwarnings("ignore")
def test_checkpoints(checkpoint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resident, streamed = third_party_checkpoints.run(checkpoint)
    for found, rejection in (
        (resident, checkpoint.rejection),
        (streamed, checkpoint.not_streamed or checkpoint.rejection),
    ):
        if found.word == "not run":
            pytest.skip(found.detail)
        assert found.word == ("rejected as expected" if rejection else "works"), found.detail
