"""Sources that can be read only once, and sources and requests that are rejected."""

from itertools import islice

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

import workbench as wb
from tests.about import about, says
from tests.tasks.test_user_data import DATA, ROWS, NoisyRows, disturb, first, hugging_face, random_states
from workbench.errors import OptionError, WorkbenchError
from workbench.tasks.images import Digits

# Sources that can be read once


def test_a_generator_is_read_once_from_its_beginning():
    task = wb.tasks.as_task(batch for batch in ROWS.split(5))
    assert [len(inputs) for inputs, _ in task.stream()] == [5, 5, 5, 5, 2]
    with pytest.raises(WorkbenchError, check=says("A one-shot source can be read only once and from the")):
        task.stream()
    with pytest.raises(WorkbenchError, check=says("A one-shot source can be read only once and from the")):
        wb.tasks.as_task(iter(ROWS.split(5))).stream(3)
    assert wb.tasks.as_task(iter(ROWS.split(5))).describe()["is_one_shot"] is True


def test_a_generator_draws_from_its_own_stream():
    def batches():
        while True:
            yield torch.randint(1000, (2, 3))

    before = random_states()
    found = first(wb.tasks.as_task(batches(), seed=1), 4)
    disturb()
    assert first(wb.tasks.as_task(batches(), seed=1), 4) == found
    assert first(wb.tasks.as_task(batches(), seed=2), 4) != found
    assert random_states() != before  # because of disturb()
    before = random_states()
    first(wb.tasks.as_task(batches()), 4)
    assert random_states() == before


def test_the_probe_of_a_generator_removes_no_batches():
    task = wb.tasks.as_task(iter(ROWS.split(5)))
    probe = task.probe(50)
    assert probe.tolist() == ROWS[:10].tolist()
    assert torch.cat([inputs for inputs, _ in task.stream()]).tolist() == ROWS.tolist()
    assert torch.equal(task.probe(50), probe)
    with pytest.raises(WorkbenchError, check=says("tokens; request the probe before training, or pass a source")):
        task.probe(100)
    short = wb.tasks.as_task(iter(ROWS.split(5)))
    assert short.probe(10**6).tolist() == ROWS.tolist()
    short.stream()
    assert short.probe(10**6).tolist() == ROWS.tolist()


# Invalid sources and requests


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("some text", says("The source is text; expected token ids, a dataset, a")),
        (Digits, says("The source is the class Digits; expected token ids, a")),
        (wb.tasks.digits, about("source", "function")),
        (7, about("source", 7)),
        (
            datasets.DatasetDict({"train": hugging_face(), "test": hugging_face()}),
            says("The source is a DatasetDict with the entries train, test;"),
        ),
        ({"input_ids": ROWS}, says("The source is a dict with the entries input_ids; pass one")),
        ([], says("The source is empty; pass at least one batch or row.")),
        (hugging_face().select([]), says("The source is empty; pass at least one batch or row.")),
        (DataLoader(DATA, 50, drop_last=True), says("The source is empty; pass at least one batch or row.")),
        (iter([]), says("The source is empty; pass at least one batch or row.")),
        (["some", "text"], says("the rows hold a str that cannot be converted to a tensor")),
        (
            hugging_face().remove_columns("input_ids"),
            says("Rows must have a column input_ids, pixel_values or images,"),
        ),
        (
            datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]}),
            says("expected equal lengths, so pad or truncate the rows (with a"),
        ),
        (hugging_face().to_iterable_dataset(), says("expected (batch, token); combine single rows to batches")),
        (DataLoader(hugging_face(), 5), says("input_ids is a list of tensors, which may be transposed;")),
    ],
)
def test_unusable_sources_are_rejected(source, error):
    with pytest.raises(WorkbenchError, check=error):
        wb.tasks.as_task(source)


def test_a_source_that_is_empty_in_the_second_epoch_is_rejected_then():
    class Exhausted:
        def __init__(self):
            self.batches = iter(ROWS.split(5))

        def __iter__(self):
            yield from self.batches

    stream = wb.tasks.as_task(Exhausted()).stream()
    with pytest.raises(WorkbenchError, check=says("pass one that can be read repeatedly.")):
        list(islice(stream, 9))


def test_an_error_within_the_source_restores_the_random_states():
    class Broken(NoisyRows):
        def __getitem__(self, i):
            super().__getitem__(i)
            raise OSError("disk")

    before = random_states()
    with pytest.raises(OSError, match="disk"):
        wb.tasks.as_task(Broken())
    assert random_states() == before


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("seed", 0.5)])
def test_invalid_options_are_rejected(name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        wb.tasks.as_task(ROWS, **{name: value})


def test_invalid_requests_are_rejected():
    for task in (wb.tasks.as_task(ROWS), wb.tasks.as_task(iter(ROWS.split(5)))):
        with pytest.raises(OptionError, check=about("start", -1)):
            task.stream(-1)
        with pytest.raises(OptionError, check=about("n_tokens", 0)):
            task.probe(0)
