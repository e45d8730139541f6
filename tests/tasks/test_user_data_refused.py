"""Sources that can be read only once, and sources and requests that are refused."""

from itertools import islice

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

import workbench as wb
from tests.tasks.test_user_data import DATA, ROWS, NoisyRows, disturb, first, hugging_face, random_states
from workbench.errors import OptionError, WorkbenchError

# Sources that can be read once


def test_a_generator_is_read_once_from_its_beginning():
    task = wb.tasks.as_task(batch for batch in ROWS.split(5))
    assert [len(inputs) for inputs, _ in task.stream()] == [5, 5, 5, 5, 2]
    with pytest.raises(WorkbenchError, match="A one-shot source cannot be read again or from a later batch; to resume"):
        task.stream()
    with pytest.raises(WorkbenchError, match="pass one that can be iterated over anew, such as a DataLoader"):
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
    assert random_states() != before  # by disturb() alone:
    before = random_states()
    first(wb.tasks.as_task(batches()), 4)
    assert random_states() == before


def test_the_probe_of_a_generator_takes_nothing_away():
    task = wb.tasks.as_task(iter(ROWS.split(5)))
    probe = task.probe(50)
    assert probe.tolist() == ROWS[:10].tolist()
    assert torch.cat([inputs for inputs, _ in task.stream()]).tolist() == ROWS.tolist()
    assert torch.equal(task.probe(50), probe)
    with pytest.raises(
        WorkbenchError, match="Too few batches of the one-shot source were kept for 100 tokens; ask for"
    ):
        task.probe(100)
    short = wb.tasks.as_task(iter(ROWS.split(5)))
    assert short.probe(10**6).tolist() == ROWS.tolist()
    short.stream()
    assert short.probe(10**6).tolist() == ROWS.tolist()


# Refusals


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("some text", "The source is text; expected token ids, a dataset, a DataLoader or a task."),
        (wb.tasks.Digits, "The source is the class Digits; expected token ids"),
        (
            wb.tasks.digits,
            "The source is a function, expected a DataLoader, a dataset, an iterable of batches or a task",
        ),
        (7, "The source is a int, expected a DataLoader"),
        (
            datasets.DatasetDict({"train": hugging_face(), "test": hugging_face()}),
            r"The source is a DatasetDict with the entries train, test; pass one of them if they are the splits",
        ),
        ({"input_ids": ROWS}, r"or \[source\] if it is a batch"),
        ([], "The source is empty; pass at least one batch or row."),
        (hugging_face().select([]), "The source is empty; pass at least one batch or row."),
        (DataLoader(DATA, 50, drop_last=True), "The source is empty; pass at least one batch."),
        (iter([]), "The source is empty; pass at least one batch."),
        (["some", "text"], "the rows hold a str that cannot be made a tensor"),
        (hugging_face().remove_columns("input_ids"), "Rows have the columns text; expected input_ids, pixel_values or"),
        (
            datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]}),
            r"input_ids differ in shape from row to row, such as \(2,\) and \(3,\); expected equal lengths, so pad",
        ),
        (hugging_face().to_iterable_dataset(), r"input_ids has shape \(6,\), expected \(batch, token\); make batches"),
        (DataLoader(hugging_face(), 5), "input_ids is a list of tensors, in which rows and columns may have been"),
    ],
)
def test_unusable_sources_are_refused(source, message):
    with pytest.raises(WorkbenchError, match=message):
        wb.tasks.as_task(source)


def test_a_source_that_gives_nothing_the_second_time_is_refused_then():
    class Exhausted:
        def __init__(self):
            self.batches = iter(ROWS.split(5))

        def __iter__(self):
            yield from self.batches

    stream = wb.tasks.as_task(Exhausted()).stream()
    with pytest.raises(WorkbenchError, match="The source gave nothing after 1 epochs; pass one that can be read again"):
        list(islice(stream, 9))


def test_an_error_within_the_source_leaves_the_random_numbers_alone():
    class Broken(NoisyRows):
        def __getitem__(self, i):
            super().__getitem__(i)
            raise OSError("disk")

    before = random_states()
    with pytest.raises(OSError, match="disk"):
        wb.tasks.as_task(Broken())
    assert random_states() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"seed": 0.5}, "seed is 0.5, expected a whole number"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        wb.tasks.as_task(ROWS, **options)


def test_impossible_requests_are_refused():
    for task in (wb.tasks.as_task(ROWS), wb.tasks.as_task(iter(ROWS.split(5)))):
        with pytest.raises(OptionError, match="start is -1, expected at least 0"):
            task.stream(-1)
        with pytest.raises(OptionError, match="n_tokens is 0, expected at least 1"):
            task.probe(0)
