import warnings

import numpy as np
import pytest

from tests.about import about
from workbench.callbacks.observation import Observation
from workbench.callbacks.recorder.recorder import logging_observer, numbers
from workbench.errors import OptionError
from workbench.io.run_output import RecordingWarning

TERMS = ["D2", "D3"]


def attention(step=10):
    ranks = np.arange(12.0).reshape(2, 3, 2)
    ranks[1, 2] = np.nan  # no such head
    entropy = np.full((2, 3), np.nan)
    coords = {"layer": np.arange(2), "head": np.arange(3), "term": np.array(TERMS)}
    return Observation(step, "attention", {"effective_rank": ranks, "attention_entropy": entropy}, coords)


def monitors(step=10, loss=0.5):
    return Observation(step, "monitors", {"loss": np.array(loss), "n_tokens": np.array(64.0)})


EXPECTED = {
    "attention/effective_rank/D2/mean": 4.0,  # of 0, 2, 4, 6, 8
    "attention/effective_rank/D2/min": 0.0,
    "attention/effective_rank/D2/max": 8.0,
    "attention/effective_rank/D3/mean": 5.0,
    "attention/effective_rank/D3/min": 1.0,
    "attention/effective_rank/D3/max": 9.0,
}


def test_arrays_become_their_mean_minimum_and_maximum_for_each_term():
    assert numbers(attention()) == EXPECTED


def test_scalars_are_unchanged():
    assert numbers(monitors()) == {"monitors/loss": 0.5, "monitors/n_tokens": 64.0}


def test_values_that_are_not_real_numbers_are_left_out_but_infinity_is_kept():
    values = {
        "eigenvalue": np.ones((2, 3), complex),
        "is_reliable": np.array([[True, False]]),
        "name": np.array(["a"]),
        "kreiss_constant": np.array([1.0, np.inf]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = numbers(Observation(0, "spectra", values))
    assert found == {
        "spectra/is_reliable/mean": 0.5,
        "spectra/is_reliable/min": 0.0,
        "spectra/is_reliable/max": 1.0,
        "spectra/kreiss_constant/mean": np.inf,
        "spectra/kreiss_constant/min": 1.0,
        "spectra/kreiss_constant/max": np.inf,
    }


def test_a_function_with_a_step_argument_receives_it():
    got = []

    def log(data, step=None, commit=None):
        got.append((data, step))

    mirror = logging_observer(log)
    mirror(attention(30))
    mirror(monitors(31))
    assert got == [(EXPECTED, 30), ({"monitors/loss": 0.5, "monitors/n_tokens": 64.0}, 31)]


def test_a_function_of_any_keywords_receives_the_step():
    got = []
    logging_observer(lambda data, **options: got.append(options))(monitors(4))
    assert got == [{"step": 4}]


def test_a_function_of_one_argument_receives_the_step_among_the_numbers():
    got = []
    logging_observer(got.append)(monitors(4))
    assert got == [{"step": 4, "monitors/loss": 0.5, "monitors/n_tokens": 64.0}]


def test_an_object_with_add_scalar_receives_each_number():
    class Writer:
        def __init__(self):
            self.got = []

        def add_scalar(self, tag, value, step):
            self.got.append((tag, value, step))

    writer = Writer()
    logging_observer(writer)(attention(20))
    assert writer.got == [(tag, value, 20) for tag, value in EXPECTED.items()]


def test_tensorboard_reads_back_what_was_sent(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        mirror = logging_observer(writer)
        for step in range(3):
            mirror(monitors(step, loss=1.0 / (1 + step)))
        mirror(attention(2))
    read = EventAccumulator(str(tmp_path)).Reload()
    found = read.Scalars("monitors/loss")
    assert [event.step for event in found] == [0, 1, 2]
    assert [event.value for event in found] == pytest.approx([1, 1 / 2, 1 / 3])
    assert set(read.Tags()["scalars"]) == {"monitors/loss", "monitors/n_tokens", *EXPECTED}


def test_a_failing_logger_is_reported_once_and_called_again():
    calls = []

    def log(data, step):
        calls.append(step)
        if step < 3:
            raise ConnectionError("no network")

    mirror = logging_observer(log)
    with pytest.warns(RecordingWarning, match="failed at step 0 .ConnectionError: no network.; training continues"):
        mirror(monitors(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            mirror(monitors(step))
    assert calls == [0, 1, 2, 3]


def test_an_invalid_logger_is_rejected():
    with pytest.raises(OptionError, check=about("log", "wandb")):
        logging_observer("wandb")
