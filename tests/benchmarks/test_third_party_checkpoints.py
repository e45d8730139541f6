"""The trials of checkpoints detect injected faults."""

import pytest
import torch

from benchmarks import third_party_checkpoints
from benchmarks.third_party.checkpoint_trial import CODE_RAN, Saved, Trial, hugging_face, llama


def outcome(write, rejection="", **options):
    return [one.word for one in third_party_checkpoints.run(Trial("injected", "fault", write, rejection, **options))]


def test_an_unchanged_checkpoint_works():
    assert outcome(lambda folder: Saved(folder, hugging_face(folder))) == ["works", "works"]


def test_different_values_are_detected():
    def write(folder):
        model = hugging_face(folder)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
        return Saved(folder, model)

    assert outcome(write) == ["silently wrong", "silently wrong"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_different_dtype_is_detected(dtype):
    def write(folder):
        hugging_face(folder)
        return Saved(folder, llama(dtype=dtype))

    assert outcome(write) == ["silently wrong", "silently wrong"]


@pytest.mark.slow
def test_a_rejection_must_be_listed_with_its_reason():
    def without_parameters(folder):
        llama().config.save_pretrained(folder)
        return Saved(folder)

    assert outcome(without_parameters) == ["rejected", "rejected"]
    assert outcome(without_parameters, "code") == ["wrong reason", "wrong reason"]
    assert outcome(without_parameters, "incomplete") == ["rejected as expected", "rejected as expected"]
    assert outcome(lambda folder: Saved(folder, hugging_face(folder)), "damaged") == ["not rejected", "not rejected"]


def test_other_exceptions_and_executed_code_are_detected(monkeypatch):
    def raising(*arguments, **options):
        raise ValueError("not an exception of the workbench")

    monkeypatch.setattr(third_party_checkpoints.wb, "open_checkpoint", raising)
    assert outcome(lambda folder: Saved(folder)) == ["raw crash", "raw crash"]
    monkeypatch.setattr(third_party_checkpoints.wb, "open_checkpoint", lambda *a, **o: CODE_RAN.touch() or raising())
    assert outcome(lambda folder: Saved(folder)) == ["code ran", "code ran"]
    CODE_RAN.unlink()


def test_a_trial_without_its_package_is_not_run():
    assert outcome(lambda folder: Saved(folder), needs="no_such_package") == ["not run", "not run"]


def test_the_trials_differ_and_their_reasons_are_listed():
    trials = third_party_checkpoints.all_trials()
    assert len({(trial.group, trial.name) for trial in trials}) == len(trials) > 250
    reasons = {reason for trial in trials for reason in (trial.rejection, trial.not_streamed)} - {""}
    assert reasons == set(third_party_checkpoints.REASONS)
