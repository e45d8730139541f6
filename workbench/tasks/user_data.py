"""Any source of data that a user has -> a task, with an order that follows from a seed alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from workbench.errors import WorkbenchError
from workbench.tasks.batch_forms import as_batch, looks_like_batch, stack_rows
from workbench.tasks.merging import checksum, copied, enough_inputs, merged, n_states
from workbench.tasks.private_draws import OwnGenerators, PrivateDraws
from workbench.tasks.task import Inputs, Task, mixed_seed, require_seed, require_whole

_END = object()


def as_task(source: Any, *, batch_size: int = 32, seed: int = 0) -> Task:
    """A task from whatever a user has.

    Args:
        source: One of

            - a task: returned as it is;
            - a torch DataLoader, or anything else that gives the batches anew each time it is iterated over, such as a
              list of batches;
            - a dataset, that is anything with a length and numbered rows (a Hugging Face dataset, a torch dataset, a
              list of rows, a tensor of token ids): its rows are shuffled anew in each epoch and stacked, so they have
              to be of equal length;
            - a generator of batches, which can be read only once.

            What a batch may be is said in `as_batch`, under what names columns are looked for too.
        batch_size: Rows in a batch, where the source is a dataset; the last batch of an epoch may be smaller.
        seed: Seed of all random choices of the source.

    Returns:
        A task whose batches depend on nothing but the source and the seed. The source is iterated over with the
        global random states of Python, NumPy and torch swapped for private ones, seeded by ``seed`` and the epoch, and
        samplers with a ``set_epoch`` are told it. Generators that a loader, sampler, dataset, transform or collate
        function keeps as an attribute start, in every stream, in the state they are in now. All of them are put back
        after each batch, so the rest of the process is undisturbed, and streams over one source may take turns.

        A stream that starts at a later batch reads and drops those before it; so it gives what an uninterrupted one
        would, at the price of loading them. With workers (``num_workers > 0``) the order is as exact, and what the
        workers draw follows from the seed too, but not with ``in_order=False``, nor where workers of an iterable
        dataset or the dataset itself keep other state from epoch to epoch.

    Raises:
        WorkbenchError: If the source is empty, or gives no batches of a known form.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> task = wb.tasks.as_task(torch.arange(80).reshape(10, 8), batch_size=4)
        >>> tokens, targets = next(task.stream())
        >>> tuple(tokens.shape)
        (4, 8)
    """
    require_whole(1, batch_size=batch_size)
    require_seed(seed)
    if isinstance(source, str | bytes | type):
        what = "text" if isinstance(source, str | bytes) else f"the class {source.__name__}"
        raise WorkbenchError(f"The source is {what}; expected token ids, a dataset, a DataLoader or a task.")
    if isinstance(source, Task):
        return source
    if isinstance(source, Mapping):
        raise WorkbenchError(
            f"The source is a {type(source).__name__} with the entries {', '.join(map(str, source))}; pass one of them "
            "if they are the splits of a dataset, or [source] if it is a batch."
        )
    if isinstance(source, Iterator):
        return OneShotTask(source, seed=seed)
    if _is_dataset(source):
        loader = DataLoader(source, batch_size=batch_size, shuffle=True, collate_fn=stack_rows)
        return DataTask(loader, seed=seed, description={"source": type(source).__name__, "batch_size": batch_size})
    if isinstance(source, Iterable):
        return DataTask(source, seed=seed, description={"source": type(source).__name__})
    raise WorkbenchError(
        f"The source is a {type(source).__name__}, expected a DataLoader, a dataset, an iterable of batches or a task."
    )


class DataTask:
    """A task from data that can be read again and again; made by `as_task`.

    Args:
        source: Gives the raw batches of one epoch each time it is iterated over.
        seed: Seed of all random choices of the source.
        description: More that defines the task.
    """

    def __init__(self, source: Iterable[Any], *, seed: int, description: Mapping[str, str | int]) -> None:
        self._source = source
        self._seed = seed
        self._own_generators = OwnGenerators(source)
        self._description = {"task": "data", **description, "seed": seed}
        with suppress(TypeError, NotImplementedError):
            self._description["n_batches"] = len(source)  # type: ignore[arg-type]
        self._description["first_batch"] = checksum(next(self.stream()))
        self._probes: dict[int, Inputs] = {}

    def stream(self, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches from number ``start`` on, epoch after epoch without end.

        Raises:
            OptionError: If ``start`` is negative.
            WorkbenchError: If a batch has an unknown form, or the source is exhausted.
        """
        require_whole(0, start=start)
        return map(as_batch, islice(self._raw_batches(), start, None))

    def probe(self, n_tokens: int) -> Inputs:
        """The first batches of a pass whose random choices differ from those of training, as one.

        They are not held out: whoever trains long enough trains on them too. Of batches that differ in length, those
        with an ``attention_mask`` are padded at the end, and of others only those that fit the first are used.

        Args:
            n_tokens: Token states wanted; where one pass over the source has fewer, all of them are given.

        Raises:
            OptionError: If ``n_tokens`` is below 1.
        """
        require_whole(1, n_tokens=n_tokens)
        if n_tokens not in self._probes:
            draws = PrivateDraws(self._own_generators)
            draws.begin_epoch(mixed_seed("data", "probe", self._seed))
            batches = map(as_batch, _one_pass(self._source_of_its_own(), draws, epoch=0))
            self._probes[n_tokens] = merged(enough_inputs(batches, n_tokens))
        return copied(self._probes[n_tokens])

    def describe(self) -> dict[str, str | int | float | bool]:
        """A description of the source, with a checksum of its first batch."""
        return dict(self._description)

    def _raw_batches(self) -> Iterator[Any]:
        source = self._source_of_its_own()
        draws = PrivateDraws(self._own_generators)
        for epoch in count():
            draws.begin_epoch(mixed_seed("data", "epoch", self._seed, epoch))
            is_empty = True
            for batch in _one_pass(source, draws, epoch=epoch):
                is_empty = False
                yield batch
            if is_empty:
                raise WorkbenchError(
                    "The source is empty; pass at least one batch."
                    if epoch == 0
                    else f"The source gave nothing after {epoch} epochs; pass one that can be read again and again."
                )

    def _source_of_its_own(self) -> Iterable[Any]:
        """The source, or a copy of a loader that would share its persistent workers among all who iterate over it."""
        if not getattr(self._source, "persistent_workers", False):
            return self._source
        loader: Any = copy.copy(self._source)
        loader._iterator = None
        return loader


class OneShotTask:
    """A task from a generator, which can be read only once and from the beginning; made by `as_task`.

    Args:
        source: Gives batches.
        seed: Seed of the source's draws from the global random generators.
    """

    def __init__(self, source: Iterator[Any], *, seed: int) -> None:
        draws = PrivateDraws(OwnGenerators(source))
        draws.begin_epoch(mixed_seed("data", "epoch", seed, 0))
        self._batches = map(as_batch, _one_pass(source, draws, epoch=0))
        self._read_ahead = list(islice(self._batches, 1))
        self._is_streaming = self._has_ended = False
        if not self._read_ahead:
            raise WorkbenchError("The source is empty; pass at least one batch.")
        self._description: dict[str, Any] = {
            "task": "data",
            "source": type(source).__name__,
            "seed": seed,
            "is_one_shot": True,
        }
        self._description["first_batch"] = checksum(self._read_ahead[0])

    def stream(self, start: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """The batches, once, until the source ends.

        Raises:
            WorkbenchError: If ``start`` is not 0, or on a second call.
        """
        require_whole(0, start=start)
        if start or self._is_streaming:
            raise WorkbenchError(
                "A one-shot source cannot be read again or from a later batch; to resume or repeat a run, pass one "
                "that can be iterated over anew, such as a DataLoader or a list of batches."
            )
        self._is_streaming = True
        return chain(self._read_ahead, self._batches)

    def probe(self, n_tokens: int) -> Inputs:
        """The first batches, read ahead if training has not begun; they are trained on too.

        Raises:
            OptionError: If ``n_tokens`` is below 1.
            WorkbenchError: If training has begun and too few batches were read before.
        """
        require_whole(1, n_tokens=n_tokens)
        known = enough_inputs(self._read_ahead, n_tokens)
        if sum(map(n_states, known)) < n_tokens and not self._has_ended:
            if self._is_streaming:
                raise WorkbenchError(
                    f"Too few batches of the one-shot source were kept for {n_tokens} tokens; ask for the probe before "
                    "training, or pass a source that can be iterated over anew."
                )
            known = enough_inputs(chain(tuple(self._read_ahead), self._reading_ahead()), n_tokens)
        return merged(known)

    def describe(self) -> dict[str, str | int | float | bool]:
        """A description of the source, with a checksum of its first batch."""
        return dict(self._description)

    def _reading_ahead(self) -> Iterator[tuple[Inputs, Tensor]]:
        for batch in self._batches:
            self._read_ahead.append(batch)
            yield batch
        self._has_ended = True


def _is_dataset(source: Any) -> bool:
    """Whether it has numbered rows, and is not a sequence of batches."""
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return False
    if not len(source):
        raise WorkbenchError("The source is empty; pass at least one batch or row.")
    return not (isinstance(source, Sequence) and looks_like_batch(source[0]))


def _one_pass(source: Iterable[Any], draws: PrivateDraws, *, epoch: int) -> Iterator[Any]:
    """The raw batches of one epoch, with the global generators swapped while the source is at work."""
    with draws.active():
        _tell_epoch(source, epoch)
        batches = iter(source)
    while True:
        with draws.active():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _tell_epoch(source: Any, epoch: int) -> None:
    """Samplers and datasets that shuffle by the number of the epoch wait to be told it."""
    batch_sampler = getattr(source, "batch_sampler", None)
    parts = (source, getattr(source, "dataset", None), getattr(source, "sampler", None), batch_sampler)
    for part in (*parts, getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
