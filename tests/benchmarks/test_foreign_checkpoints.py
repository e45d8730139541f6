"""The trials of checkpoints must notice what is wrong: each fault here is planted."""

import pytest
import torch

from benchmarks import foreign_checkpoints
from benchmarks.foreign.checkpoint_trial import CODE_RAN, Saved, Trial, hugging_face, llama


def outcome(write, refusal="", **options):
    return [one.word for one in foreign_checkpoints.run(Trial("planted", "fault", write, refusal, **options))]


def test_a_checkpoint_that_is_what_was_written_works():
    assert outcome(lambda folder: Saved(folder, hugging_face(folder))) == ["works", "works"]


def test_other_values_are_noticed():
    def write(folder):
        model = hugging_face(folder)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
        return Saved(folder, model)

    assert outcome(write) == ["silently wrong", "silently wrong"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_dtype_is_noticed(dtype):
    def write(folder):
        hugging_face(folder)
        return Saved(folder, llama(dtype=dtype))

    assert outcome(write) == ["silently wrong", "silently wrong"]


def test_a_refusal_must_be_listed_and_for_its_reason():
    def without_weights(folder):
        llama().config.save_pretrained(folder)
        return Saved(folder)

    assert outcome(without_weights) == ["refused", "refused"]
    assert outcome(without_weights, "code") == ["wrong reason", "wrong reason"]
    assert outcome(without_weights, "incomplete") == ["refused as expected", "refused as expected"]
    assert outcome(lambda folder: Saved(folder, hugging_face(folder)), "damaged") == ["no refusal", "no refusal"]


def test_an_error_of_python_and_code_that_runs_are_noticed(monkeypatch):
    def raising(*arguments, **options):
        raise ValueError("of Python")

    monkeypatch.setattr(foreign_checkpoints.wb, "open_checkpoint", raising)
    assert outcome(lambda folder: Saved(folder)) == ["raw crash", "raw crash"]
    monkeypatch.setattr(foreign_checkpoints.wb, "open_checkpoint", lambda *a, **o: CODE_RAN.touch() or raising())
    assert outcome(lambda folder: Saved(folder)) == ["code ran", "code ran"]
    CODE_RAN.unlink()


def test_a_trial_without_its_package_is_not_run():
    assert outcome(lambda folder: Saved(folder), needs="no_such_package") == ["not run", "not run"]


def test_the_trials_differ_and_their_reasons_are_listed():
    trials = foreign_checkpoints.all_trials()
    assert len({(trial.group, trial.name) for trial in trials}) == len(trials) > 250
    reasons = {reason for trial in trials for reason in (trial.refusal, trial.not_streamed)} - {""}
    assert reasons == set(foreign_checkpoints.REASONS)
