"""Create tasks from user data, in an order that depends only on a seed."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from workbench.errors import WorkbenchError
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveInt, Seed
from workbench.tasks.batch_forms import as_batch, looks_like_batch, stack_rows
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.task import STATES_PER_IMAGE, Inputs, Task, mixed_seed

_END = object()


@checked
def as_task(source: Any, *, batch_size: PositiveInt = 32, seed: Seed = 0) -> Task:
    """Create a task from user data.

    A batch may be ``(inputs, targets)``; token ids of shape (batch, token), whose targets are the next tokens; or a
    mapping in Hugging Face's convention, with ``input_ids`` and optionally ``attention_mask`` and ``labels``, or with
    ``pixel_values`` or ``images`` and ``labels``.

    Args:
        source: One of

            - a task, which is returned unchanged;
            - a torch DataLoader, or another object that yields the batches each time it is iterated over, such as a
              list of batches;
            - a dataset, that is an object with a length and numbered rows (a Hugging Face dataset, a torch dataset, a
              list of rows, a tensor of token ids). The rows are shuffled in each epoch and stacked, so they must have
              equal lengths;
            - a generator of batches, which can be read only once.
        batch_size: Rows in a batch if the source is a dataset; the last batch of an epoch may be smaller.
        seed: Seed of all random choices of the source.

    Returns:
        A task whose batches depend only on the source and the seed. While the source is read, the global random states
        of Python, NumPy and torch are replaced by private ones, seeded by ``seed`` and the epoch. Samplers with a
        ``set_epoch`` receive the epoch. Generators that a loader, sampler, dataset, transform or collate function keeps
        as an attribute begin every stream in their current state. All states are restored after each batch, so that the
        rest of the process is not affected and several streams over one source can alternate.

        A stream that starts at a later batch reads and drops the previous ones, so that it yields the same batches as
        an uninterrupted one. With workers (``num_workers > 0``) order and random numbers are reproducible too, except
        with ``in_order=False``, or if workers of an iterable dataset or the dataset itself keep other state between
        epochs.

    Raises:
        WorkbenchError: If the source is empty, or does not yield batches of a known form.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> task = wb.tasks.as_task(torch.arange(80).reshape(10, 8), batch_size=4)
        >>> tokens, targets = next(task.stream())
        >>> tuple(tokens.shape)
        (4, 8)

    See Also:
        `workbench.tasks.Task`: Describes the interface of a task.
        `workbench.train`: Trains a model on a task.
    """
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
    raise WorkbenchError.of("source", source, "a DataLoader, a dataset, an iterable of batches or a task")


class DataTask:
    """Task from data that can be read repeatedly; created by `as_task`."""

    def __init__(self, source: Iterable[Any], *, seed: int, description: Mapping[str, str | int]) -> None:
        self._source = source
        self._seed = seed
        self._generators = _find_generators(source)
        self._initial_states = [_get_state(each) for each in self._generators]
        self._description = {"task": "data", **description, "seed": seed}
        with suppress(TypeError, NotImplementedError):
            self._description["n_batches"] = len(source)  # type: ignore[arg-type]
        self._description["first_batch"] = checksum(next(self.stream()))
        self._probes: dict[int, Inputs] = {}

    @checked
    def stream(self, start: NonNegativeInt = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Return an endless iterator over the batches of all epochs, from number ``start`` on."""
        return map(as_batch, islice(self._raw_batches(), start, None))

    @checked
    def probe(self, n_tokens: PositiveInt) -> Inputs:
        """Return the first batches of an epoch of its own, merged and padded where masked; they are not held out."""
        if n_tokens not in self._probes:
            draws = PrivateDraws(self._generators, self._initial_states)
            draws.begin_epoch(mixed_seed("data", "probe", self._seed))
            batches = map(as_batch, _one_pass(self._private_source(), draws, epoch=0))
            self._probes[n_tokens] = merged(enough_inputs(batches, n_tokens))
        return copied(self._probes[n_tokens])

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return a description of the source, with a checksum of its first batch."""
        return dict(self._description)

    def _raw_batches(self) -> Iterator[Any]:
        source = self._private_source()
        draws = PrivateDraws(self._generators, self._initial_states)
        for epoch in count():
            draws.begin_epoch(mixed_seed("data", "epoch", self._seed, epoch))
            is_empty = True
            for batch in _one_pass(source, draws, epoch=epoch):
                is_empty = False
                yield batch
            if is_empty:
                if epoch == 0:
                    raise _empty_source()
                raise WorkbenchError(f"The source has no batches in epoch {epoch + 1}; pass one that restarts.")

    def _private_source(self) -> Iterable[Any]:
        """Return the source, or a copy of it if it is a loader whose iterators would share persistent workers."""
        if not getattr(self._source, "persistent_workers", False):
            return self._source
        loader: Any = copy.copy(self._source)
        loader._iterator = None
        return loader


class OneShotTask:
    """Task from a generator, which can be read only once and from the beginning; created by `as_task`."""

    def __init__(self, source: Iterator[Any], *, seed: int) -> None:
        draws = PrivateDraws(_find_generators(source))
        draws.begin_epoch(mixed_seed("data", "epoch", seed, 0))
        self._batches = map(as_batch, _one_pass(source, draws, epoch=0))
        self._read_ahead = list(islice(self._batches, 1))
        self._is_streaming = self._has_ended = False
        if not self._read_ahead:
            raise _empty_source()
        self._description: dict[str, Any] = {
            "task": "data",
            "source": type(source).__name__,
            "seed": seed,
            "is_one_shot": True,
        }
        self._description["first_batch"] = checksum(self._read_ahead[0])

    @checked
    def stream(self, start: NonNegativeInt = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Return an iterator over the batches; it can be called once."""
        if start or self._is_streaming:
            raise WorkbenchError(
                "A one-shot source can be read only once and from the beginning; to resume or repeat a run, pass one "
                "that can be read repeatedly, such as a DataLoader or a list of batches."
            )
        self._is_streaming = True
        return chain(self._read_ahead, self._batches)

    @checked
    def probe(self, n_tokens: PositiveInt) -> Inputs:
        """Return the first batches, merged; if training has not begun, they are read ahead and kept for training."""
        known = enough_inputs(self._read_ahead, n_tokens)
        if sum(map(n_states, known)) < n_tokens and not self._has_ended:
            if self._is_streaming:
                raise WorkbenchError(
                    f"Too few batches of the one-shot source were kept for {n_tokens} tokens; request the probe before "
                    "training, or pass a source that can be read repeatedly."
                )
            known = enough_inputs(chain(tuple(self._read_ahead), self._reading_ahead()), n_tokens)
        return merged(known)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return a description of the source, with a checksum of its first batch."""
        return dict(self._description)

    def _reading_ahead(self) -> Iterator[tuple[Inputs, Tensor]]:
        for batch in self._batches:
            self._read_ahead.append(batch)
            yield batch
        self._has_ended = True


def _is_dataset(source: Any) -> bool:
    """Return whether a source has numbered rows and is not a sequence of batches."""
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return False
    if not len(source):
        raise _empty_source()
    return not (isinstance(source, Sequence) and looks_like_batch(source[0]))


def _empty_source() -> WorkbenchError:
    return WorkbenchError("The source is empty; pass at least one batch or row.")


def _one_pass(source: Iterable[Any], draws: PrivateDraws, *, epoch: int) -> Iterator[Any]:
    """Yield the raw batches of one epoch; the global random states are replaced while the source is read."""
    with draws.active():
        batch_sampler = getattr(source, "batch_sampler", None)
        parts = (source, getattr(source, "dataset", None), getattr(source, "sampler", None), batch_sampler)
        for part in (*parts, getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        batches = iter(source)
    while True:
        with draws.active():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def n_states(inputs: Inputs) -> int:
    """Count the token states of a batch; masked ones do not count, and an image counts as 16."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        return int((mask != 0).sum()) if mask is not None and mask.ndim == 2 else n_states(next(iter(inputs.values())))
    if not inputs.is_floating_point():
        return inputs.numel()
    if inputs.ndim == 4:
        return len(inputs) * STATES_PER_IMAGE
    return inputs.shape[0] * inputs.shape[1] if inputs.ndim == 3 else len(inputs)


def enough_inputs(batches: Iterable[tuple[Inputs, Tensor]], n_tokens: int) -> list[Inputs]:
    """Collect the inputs of the first batches that can be merged, until they have ``n_tokens`` states."""
    chosen: list[Inputs] = []
    n_chosen = 0
    for inputs, _ in batches:
        if not chosen or _form(inputs) == _form(chosen[0]):
            chosen.append(copied(inputs))
            n_chosen += n_states(inputs)
        if n_chosen >= n_tokens:
            break
    return chosen


def merged(batches: list[Inputs]) -> Inputs:
    """Merge batches of one form; with a mask, tensors of its shape are padded at the end to the longest."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat([batch for batch in batches if isinstance(batch, Tensor)])
    named = [batch for batch in batches if not isinstance(batch, Tensor)]
    longest = max((batch["attention_mask"].shape[-1] for batch in named if "attention_mask" in batch), default=0)

    def merged_under(name: str) -> Tensor:
        if not _is_masked(name, first):
            return torch.cat([batch[name] for batch in named])
        return torch.cat([functional.pad(batch[name], (0, longest - batch[name].shape[1])) for batch in named])

    return {name: merged_under(name) for name in first}


def copied(inputs: Inputs) -> Inputs:
    """Copy the tensors of inputs."""
    return {n: value.clone() for n, value in inputs.items()} if isinstance(inputs, Mapping) else inputs.clone()


def checksum(batch: tuple[Inputs, Tensor]) -> str:
    """Compute a checksum of a batch: sixteen hexadecimal digits."""
    inputs, targets = batch
    tensors = {**(inputs if isinstance(inputs, Mapping) else {"": inputs}), "targets": targets}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _form(inputs: Inputs) -> Any:
    """Return the properties that must be equal for batches to be merged."""
    if isinstance(inputs, Mapping):
        return {name: "masked" if _is_masked(name, inputs) else value.shape[1:] for name, value in inputs.items()}
    return inputs.shape[1:]


def _is_masked(name: str, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor has the shape of the mask, which marks the end of each sequence."""
    mask = inputs.get("attention_mask")
    return mask is not None and mask.ndim == 2 and inputs[name].shape == mask.shape


#: Attributes of loaders, samplers and datasets whose values may have generators too.
_PARTS = ("dataset", "datasets", "sampler", "batch_sampler", "data_source", "transform", "transforms", "collate_fn")
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class PrivateDraws:
    """Random numbers of one stream over a source, from the global generators and those of the source.

    The generators of the source begin in their states at the creation of the task; the global ones are seeded in each
    epoch. Outside the blocks of `active`, all of them have the states of the rest of the process.
    """

    def __init__(self, generators: list[Any], initial_states: list[Any] | None = None) -> None:
        self._generators = generators
        self._states = [_get_state(each) for each in generators] if initial_states is None else initial_states
        self._globals = RandomStream(0)

    def begin_epoch(self, seed: int) -> None:
        """Seed the global generators as seen by the source."""
        self._globals = RandomStream(seed)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw all random numbers within the ``with`` block from this stream."""
        outside = self._exchange(self._states)
        try:
            with self._globals.active():
                yield
        finally:
            self._states = self._exchange(outside)

    def _exchange(self, states: list[Any]) -> list[Any]:
        """Set the states of the source's generators, and return the ones before."""
        before = [_get_state(each) for each in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)
        return before


def _find_generators(source: Any) -> list[Any]:
    found: dict[int, Any] = {}
    seen: set[int] = set()
    parts = [source]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif name in _PARTS:
                parts.extend(value if isinstance(value, list | tuple) else [value])
    return list(found.values())


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
