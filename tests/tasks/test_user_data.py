"""User data: the order depends only on the seed, can be resumed anywhere, and does not affect other random numbers."""

import random
import subprocess
import sys
import textwrap
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import workbench as wb
from tests.about import about, says
from workbench.errors import WorkbenchError
from workbench.tasks.images import Digits
from workbench.tasks.task import mixed_seed

N_ROWS, LENGTH = 22, 6
#: Row i begins with token i, which identifies it.
ROWS = torch.arange(N_ROWS)[:, None] + torch.arange(LENGTH) * 100
N_BATCHES = 30  # several epochs of every source below


class NoisyRows(Dataset):
    """Rows with random changes from all kinds of generators."""

    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.python_rng = random.Random(4)
        self.transform = NoisyTransform()

    def __len__(self):
        return N_ROWS

    def __getitem__(self, i):
        noise = random.randrange(10) + np.random.randint(10) + int(torch.randint(10, ()))  # noqa: NPY002
        noise += int(self.rng.integers(10)) + self.python_rng.randrange(10)
        return self.transform(ROWS[i] + 1000 * noise)


class NoisyTransform:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.legacy = np.random.RandomState(6)

    def __call__(self, row):
        return row + 1000 * int(torch.randint(10, (), generator=self.generator)) + 1000 * self.legacy.randint(10)


class ShuffledBatches:
    """Iterable that yields the batches in a different order each time, and is not a torch loader."""

    def __iter__(self):
        rows = list(range(N_ROWS))
        random.shuffle(rows)
        for i in range(0, N_ROWS, 5):
            yield ROWS[rows[i : i + 5]]


def hugging_face():
    return datasets.Dataset.from_dict({"input_ids": ROWS.tolist(), "text": [f"row {i}" for i in range(N_ROWS)]})


def generator():
    return torch.Generator().manual_seed(7)


def distributed():
    data = TensorDataset(ROWS)
    return DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=1))


DATA = TensorDataset(ROWS)
SOURCES = {
    "shuffling loader": lambda: DataLoader(DATA, 5, shuffle=True),
    "loader in order": lambda: DataLoader(DATA, 5, drop_last=True),
    "loader with a generator": lambda: DataLoader(DATA, 5, shuffle=True, generator=generator()),
    "sampler with a generator": lambda: DataLoader(
        DATA, 5, sampler=RandomSampler(DATA, replacement=True, num_samples=13, generator=generator())
    ),
    "weighted sampler": lambda: DataLoader(DATA, 5, sampler=WeightedRandomSampler([1.0] * N_ROWS, 13)),
    "distributed sampler": distributed,
    "noisy dataset": NoisyRows,
    "loader of a noisy dataset": lambda: DataLoader(NoisyRows(), 5, shuffle=True, generator=generator()),
    "torch dataset": lambda: DATA,
    "tensor": lambda: ROWS,
    "array": lambda: ROWS.numpy(),
    "list of rows": lambda: ROWS.tolist(),
    "list of batches": lambda: list(ROWS.split(5)),
    "re-iterable": ShuffledBatches,
    "hugging face": hugging_face,
    "hugging face with tensors": lambda: hugging_face().with_format("torch"),
    "hugging face, iterable": lambda: (
        hugging_face().remove_columns("text").to_iterable_dataset().shuffle(seed=2, buffer_size=9).batch(5)
    ),
}
#: Sources that read all rows once in an epoch, in an order that depends on the seed of the task.
SHUFFLED = ["shuffling loader", "torch dataset", "tensor", "array", "list of rows", "re-iterable", "hugging face"]

every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())


def make_task(make, **options):
    return wb.tasks.as_task(make(), **{"batch_size": 5, "seed": 1, **options})


def first(task, n=N_BATCHES, start=0):
    return [inputs.tolist() for inputs, _ in islice(task.stream(start), n)]


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def disturb():
    random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002


# Order


@every_source
@pytest.mark.parametrize(
    "start", [pytest.param(0, marks=pytest.mark.slow), 1, 5, pytest.param(13, marks=pytest.mark.slow)]
)
def test_a_stream_can_start_at_any_batch(make, start):
    """With the same source, and with a new one, as in another process."""
    task = make_task(make)
    expected = first(task)
    assert first(task, N_BATCHES - start, start) == expected[start:]
    assert first(make_task(make), N_BATCHES - start, start) == expected[start:]


@every_source
def test_the_random_numbers_of_source_and_process_are_independent(make):
    undisturbed = first(make_task(make))
    disturb()
    before = random_states()
    task = make_task(make)
    task.probe(20)
    found = first(task)
    assert random_states() == before
    assert found == undisturbed
    drawn = []
    for inputs, _ in islice(task.stream(), N_BATCHES):
        disturb()
        drawn.append(inputs.tolist())
    assert drawn == undisturbed


@every_source
def test_streams_over_one_source_can_alternate(make):
    task = make_task(make)
    alone = first(task)
    pairs = [
        (a[0].tolist(), b[0].tolist())
        for a, b in islice(zip(task.stream(), task.stream(4), strict=True), N_BATCHES - 4)
    ]
    assert [a for a, _ in pairs] == alone[: N_BATCHES - 4]
    assert [b for _, b in pairs] == alone[4:]


@pytest.mark.parametrize("name", SHUFFLED)
def test_every_epoch_has_each_row_once_in_a_different_order(name):
    batches = first(make_task(SOURCES[name]), 10)
    epochs = [[row[0] for batch in batches[i : i + 5] for row in batch] for i in (0, 5)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(N_ROWS))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(N_ROWS))
    assert first(make_task(SOURCES[name], seed=2), 10) != batches


def test_an_epoch_is_that_of_the_seeded_loader():
    """Oracle: torch with an explicit seed."""
    task = make_task(SOURCES["shuffling loader"])
    expected = []
    for epoch in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(mixed_seed("data", "epoch", 1, epoch))
            expected += [rows.tolist() for (rows,) in SOURCES["shuffling loader"]()]
    assert first(task, 15) == expected


def test_the_generator_of_a_loader_determines_its_order_and_keeps_its_state():
    """The epochs are those of torch, from the state of the generator when the task was created."""
    own = generator()
    torch.rand(5, generator=own)
    state = own.get_state()
    loader = DataLoader(DATA, 5, shuffle=True, generator=own)
    expected = [rows.tolist() for _ in range(3) for (rows,) in loader]
    own.set_state(state)
    task = wb.tasks.as_task(loader)
    assert first(task, 15) == expected
    assert torch.equal(own.get_state(), state)
    own.manual_seed(99)  # later changes have no effect
    assert first(task, 15) == expected


def test_samplers_receive_the_epoch():
    epochs = first(make_task(distributed), 6)
    expected = []
    for epoch in range(2):
        loader = distributed()
        loader.sampler.set_epoch(epoch)
        expected += [rows.tolist() for (rows,) in loader]
    assert epochs == expected
    assert epochs[:3] != epochs[3:]


@pytest.mark.medium
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_random_numbers_of_workers_are_reproducible(persistent_workers):
    """Also in streams that alternate, and with persistent workers."""
    options = {"num_workers": 2, "shuffle": True, "persistent_workers": persistent_workers}
    task = wb.tasks.as_task(DataLoader(NoisyRows(), 8, **options), seed=1)
    before = random_states()
    expected = first(task, 7)
    assert first(task, 3, 4) == expected[4:]
    turns = list(islice(zip(task.stream(), task.stream(1), strict=True), 5))
    assert [a[0].tolist() for a, _ in turns] == expected[:5]
    assert [b[0].tolist() for _, b in turns] == expected[1:6]
    assert random_states() == before


@pytest.mark.slow
@pytest.mark.subprocess
def test_another_process_continues_where_this_one_stopped():
    code = textwrap.dedent("""
        import workbench as wb
        from tests.tasks.test_user_data import SOURCES, first
        for name in ("shuffling loader", "loader of a noisy dataset", "hugging face"):
            task = wb.tasks.as_task(SOURCES[name](), batch_size=5, seed=1)
            print(first(task, 3, 11), task.describe(), task.probe(40).tolist())
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = []
    for name in ("shuffling loader", "loader of a noisy dataset", "hugging face"):
        task = make_task(SOURCES[name])
        expected.append(f"{first(task, 14)[11:]} {task.describe()} {task.probe(40).tolist()}")
    assert done.stdout.splitlines() == expected


# Kinds of sources


def test_both_formats_of_a_hugging_face_dataset_agree():
    data = datasets.Dataset.from_dict(
        {"input_ids": ROWS.tolist(), "attention_mask": torch.ones_like(ROWS).tolist(), "labels": ROWS.tolist()}
    )
    lists, tensors = (wb.tasks.as_task(source, batch_size=5) for source in (data, data.with_format("torch")))
    for (inputs, targets), (others, other_targets) in islice(zip(lists.stream(), tensors.stream(), strict=True), 9):
        assert inputs.keys() == others.keys() == {"input_ids", "attention_mask"}
        assert all(torch.equal(inputs[name], others[name]) for name in inputs)
        assert torch.equal(targets, other_targets)
        assert torch.equal(targets[:, :-1], inputs["input_ids"][:, 1:])
        assert (targets[:, -1] == -100).all()


@pytest.mark.parametrize(
    "rows",
    [
        [(torch.full((1, 4, 4), i / 30), i) for i in range(N_ROWS)],
        [(np.full((1, 4, 4), i / 30, dtype=np.float32), i) for i in range(N_ROWS)],
        [{"pixel_values": torch.full((1, 4, 4), i / 30), "label": i} for i in range(N_ROWS)],
        [{"images": torch.full((1, 4, 4), i / 30).tolist(), "labels": i, "name": "x"} for i in range(N_ROWS)],
        TensorDataset(torch.arange(N_ROWS)[:, None, None, None].expand(-1, 1, 4, 4) / 30, torch.arange(N_ROWS)),
    ],
)
def test_images_and_their_classes_stay_together(rows):
    task = wb.tasks.as_task(rows, batch_size=5)
    seen = []
    for images, targets in islice(task.stream(), 5):
        assert images.shape[1:] == (1, 4, 4)
        assert images.dtype == torch.float32
        assert targets.dtype == torch.int64
        assert torch.allclose(images[:, 0, 0, 0] * 30, targets.float())
        seen += targets.tolist()
    assert sorted(seen) == list(range(N_ROWS))
    assert len(task.probe(64)) >= 4


def test_lists_of_pairs_and_of_batches_are_distinguished():
    rows = [(row, row + 1) for row in ROWS]
    batches = [(part, part + 1) for part in ROWS.split(4)]
    assert len(next(wb.tasks.as_task(rows, batch_size=7).stream())[0]) == 7
    assert next(wb.tasks.as_task(batches, batch_size=7).stream())[0].tolist() == ROWS[:4].tolist()
    images = [(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64))] * 2
    assert len(next(wb.tasks.as_task(images, batch_size=7).stream())[0]) == 3
    columns = [{"input_ids": ROWS[:4].tolist()}, {"input_ids": ROWS[4:8].tolist()}]
    assert next(wb.tasks.as_task(columns).stream())[0].tolist() == ROWS[:4].tolist()
    columns = [{"input_ids": row} for row in ROWS.tolist()]
    assert len(next(wb.tasks.as_task(columns, batch_size=7).stream())[0]) == 7
    nested = [({"input_ids": row}, 1) for row in ROWS.tolist()]
    inputs, targets = next(wb.tasks.as_task(nested, batch_size=7).stream())
    assert inputs["input_ids"].shape == (7, LENGTH)
    assert targets.tolist() == [1] * 7


def test_read_only_arrays_cause_no_warning(recwarn, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.numpy().astype(np.uint16))
    tokens, _ = next(wb.tasks.as_task(np.load(tmp_path / "rows.npy", mmap_mode="r")).stream())
    assert tokens.dtype == torch.int64
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]


# Probe and description


@every_source
def test_a_probe_is_the_same_at_any_time(make):
    task = make_task(make)
    probe = task.probe(40)
    list(islice(task.stream(), 7))
    assert torch.equal(task.probe(40), probe)
    probe += 1  # changes of the probe do not affect the task
    assert torch.equal(task.probe(40), probe - 1)
    assert torch.equal(make_task(make).probe(40), probe - 1)
    assert 40 <= probe.numel() < 40 + 5 * LENGTH


def test_a_probe_larger_than_the_data_has_all_rows_once():
    probe = make_task(SOURCES["torch dataset"]).probe(10**6)
    assert sorted(probe[:, 0].tolist()) == list(range(N_ROWS))


def test_masked_batches_of_different_lengths_are_padded_for_the_probe():
    """Lengths 3 to 6; masked positions do not count."""
    batches = [
        {"input_ids": torch.full((2, n), n), "attention_mask": torch.ones(2, n, dtype=torch.int64)}
        for n in (3, 6, 4, 5)
    ]
    probe = wb.tasks.as_task(batches).probe(19)
    assert probe["input_ids"].tolist() == [[3] * 3 + [0] * 3] * 2 + [[6] * 6] * 2 + [[4] * 4 + [0] * 2] * 2
    assert torch.equal(probe["attention_mask"], (probe["input_ids"] != 0).long())


def test_unmasked_batches_of_other_lengths_are_omitted_from_the_probe():
    probe = wb.tasks.as_task([torch.full((2, n), n) for n in (3, 6, 3, 5)]).probe(10)
    assert probe.tolist() == [[3, 3, 3]] * 4


def test_descriptions_distinguish_data_and_orders():
    described = make_task(SOURCES["torch dataset"]).describe()
    assert described.items() >= {"task": "data", "source": "TensorDataset", "batch_size": 5, "seed": 1}.items()
    assert described["n_batches"] == 5
    assert described == make_task(SOURCES["torch dataset"]).describe()
    others = [make_task(SOURCES["torch dataset"], seed=2), make_task(lambda: TensorDataset(ROWS + 1))]
    assert all(other.describe()["first_batch"] != described["first_batch"] for other in others)
    assert all(isinstance(value, str | int) for value in described.values())


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
        (DataLoader(hugging_face(), 5), says("input_ids is a list of tensors; pass the dataset")),
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
    with pytest.raises(WorkbenchError, check=says("pass one that restarts.")):
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
