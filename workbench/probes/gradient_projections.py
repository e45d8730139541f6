"""Random projections of gradients, as computed by autograd on each rank and as received by the optimizer."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from workbench.errors import OptionError
from workbench.models.calling import is_shared, message_device
from workbench.models.readable_weights import Measurement, complete, local_part, parameters_of_shards
from workbench.probes.gradient_agreement import ProjectedGradients

#: Number of projections of a gradient.
N_PROJECTIONS = 8
#: Largest number of entries of a gradient that are projected.
N_ENTRIES = 2**12
#: Number of neighboring entries that are read together: a line of the processor's cache.
_RUN = 16
#: Largest number of backward passes of a step that are stored separately.
_N_SEPARATE = 8
#: Number of parameters that show whether they change between backward passes.
_N_MARKED = 8
#: Places of the gradients among those of the backward passes, which have the numbers from 0: ``.grad`` before the last
#: pass, and as the optimizer receives it.
_BEFORE, _RECEIVED = -2, -1


@dataclass
class _Step:
    """What is known of the gradients of one step."""

    places: dict[int, Places] = field(default_factory=dict)  # of the parameters that are measured, by number
    marked: frozenset[int] = frozenset()
    projected: list[tuple[int, list[int], Tensor]] = field(default_factory=list)  # pass, rows of the message, values
    latest: dict[int, Tensor] = field(default_factory=dict)  # entries of the pass that runs, by number
    before: dict[int, Tensor] = field(default_factory=dict)  # entries of ``.grad`` before the last pass
    n_ended: int = 0  # passes that are projected
    n_passes: Counter[int] = field(default_factory=Counter)
    left_over: set[int] = field(default_factory=set)
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)  # entries of marked parameters in the first pass
    moved: dict[int, Tensor] = field(default_factory=dict)  # whether they have changed since
    has_moved: bool = False
    dtypes: defaultdict[int, set[torch.dtype]] = field(default_factory=lambda: defaultdict(set))  # of gradients
    problem: Exception | None = None


class GradientProjections:
    """Random projections of the gradients of a step, before and after their reduction; a context manager.

    Use it in a training loop::

        with GradientProjections(model.parameters()) as projections:
            loss.backward()
            step = projections.take()
        optimizer.step()
        print(compare_gradients(step).sentence)

    `arm` is called for one step, before its first backward pass. From then on, entries of the gradients that autograd
    passes to each parameter are copied before they are accumulated in ``.grad`` or reduced by DDP. Several backward
    passes are summed; in one process up to eight are also stored separately, so that a missing one can be named. `take`
    is called right before the optimizer's step, on every rank, and copies the same entries of ``.grad``. Entries are at
    most 4,096 of a parameter, evenly spaced.

    The hooks are on the autograd nodes that accumulate gradients. They see the gradients after hooks of the parameters,
    but not those of ``torch.autograd.grad``; a shared parameter is seen once, with the sum. They return nothing, so
    that the training is bit for bit the same, and they cause neither recompilation nor graph breaks of compiled models.

    Cost of a step between `arm` and `take`: one copy of the entries per parameter and backward pass (two if ``.grad``
    is not empty), and for each pass and `take` one matrix product per dtype and number of entries. There is no host
    synchronization before `take`, which needs one transfer and one all-gather of 31 numbers per parameter. Other steps
    cost nothing. Global random states are not changed.

    For parameters that FSDP2 shards over all ranks, each rank sees the full gradient before its reduction, from the
    second step on; the parts that the ranks receive are projected separately and summed.

    Args:
        parameters: Parameters of the optimizer, the same in the same order on every rank.
        model: The model that FSDP2 has sharded; None if no parameter is sharded.
        seed: Seed of the signs, which depend only on it; the same on all ranks and in all steps that are compared.

    Raises:
        OptionError: If there is no parameter, or if a parameter is sharded in another way or on a device without
            float64.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(3, 2)
        >>> with wb.probes.GradientProjections(model.parameters()) as projections:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        ...     step = projections.take()
        >>> wb.probes.compare_gradients(step).sentence
        'The optimizer receives the gradients as computed, in 2 of 2 parameters.'

    See Also:
        `workbench.probes.compare_gradients`: Compares the projections.
        `workbench.Recorder`: Makes this comparison during training.
    """

    def __init__(self, parameters: Iterable[Tensor], *, seed: int = 0, model: nn.Module | None = None) -> None:
        self.parameters = tuple(parameters)
        self._shards = {} if model is None else parameters_of_shards(model)
        if not self.parameters:
            raise OptionError("There are no parameters; pass those of the optimizer.")
        self._is_sharded = np.array([_is_sharded(parameter) for parameter in self.parameters])
        for number, parameter in enumerate(self.parameters):
            if self._is_sharded[number] and not (id(parameter) in self._shards and _is_in_rows(parameter)):
                raise OptionError(
                    f"Parameter {number} is sharded over ranks (tensor parallel, ZeRO, or FSDP without model=), so its "
                    "gradient is reduced before a hook sees it; check sums over ranks with known_answer_all_reduce "
                    "instead."
                )
            if parameter.device.type == "mps":
                raise OptionError("Devices of type mps have no float64 to project gradients in; use another device.")
        self._after_update: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._signs = {torch.device("cpu"): random_signs(seed)}
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] | None = None
        self._step, self._lock = _Step(), threading.Lock()

    @property
    def is_armed(self) -> bool:
        """Whether gradients are currently projected."""
        return self._handles is not None

    def __enter__(self) -> GradientProjections:
        self.arm()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disarm()

    def arm(self, numbers: Iterable[int] | None = None, *, turn: int = 0) -> None:
        """Register the hooks for a step, and discard the projections of earlier steps.

        Args:
            numbers: Indices of the parameters to measure, the same on every rank; None for all.
            turn: Which entries of large parameters to project, the same on every rank; over successive turns all of
                them. Steps are compared in the same turn.
        """
        self.disarm()
        numbers = range(len(self.parameters)) if numbers is None else numbers
        places = {number: Places.of(self.parameters[number], turn) for number in numbers}
        whole = [number for number in places if not self._is_sharded[number]]
        self._step = _Step(places, frozenset(whole[:: -(-len(whole) // _N_MARKED) or 1]))
        self._handles = []
        # Where a compiled function runs the backward pass, the hook would be compiled too.
        see = torch.compiler.disable(self._see) if "torch._dynamo" in sys.modules else self._see
        for number in places:
            parameter = self.leaf(number)
            if parameter is not None and parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)  # the parameter does not keep the node and its hooks alive
                self._handles.append(node.register_prehook(partial(see, number)))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
        self._nodes.clear()

    def note_update(self) -> None:
        """Note the gradients right after an update, to recognize them if the next step does not clear them."""
        kept = {i: parameter.grad for i, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self._after_update = {i: (weakref.ref(gradient), gradient._version) for i, gradient in kept.items()}

    def take(self) -> ProjectedGradients:
        """Project the gradients that the optimizer will receive, remove the hooks, and gather the results of all ranks.

        Returns:
            The projections of the step, the same on every rank.

        Raises:
            OptionError: If `arm` was not called.
        """
        if not self.is_armed:
            raise OptionError("The projections are not armed; call arm() before the first backward pass of the step.")
        return self.gathered(complete(self.measured()))

    def measured(self) -> Measurement[tuple[_Step, np.ndarray, np.ndarray]]:
        """Project the gradients that the optimizer will receive, and remove the hooks; no rank waits for another.

        Returns:
            The step, the message of this rank about its parameters, and the gradients of the individual passes.
        """
        self.disarm()
        step, self._step = self._step, _Step()
        if step.problem is not None:
            raise step.problem
        self._end_pass(step)
        self._project(step, _BEFORE, step.before, step.places)
        self._project(step, _RECEIVED, *self._received(step))
        values = yield [*(values for *_, values in step.projected), *step.moved.values()]
        table = np.zeros((step.n_ended + 2, len(step.places), N_PROJECTIONS + 1))
        last = np.zeros(table.shape[1:])
        for (i, rows, _), found in zip(step.projected, values, strict=False):
            table[i, rows] = found
            if i >= 0:
                last[rows] = found
        has_moved = step.has_moved or any(found.any() for found in values[len(step.projected) :])
        n_passes = np.array([step.n_passes[number] for number in step.places])
        is_left = [number in step.left_over for number in step.places]
        is_alone = (n_passes > 1) & (table[_BEFORE] == 0).all(1)
        flags = np.stack([n_passes, is_left, is_alone, (n_passes > 0) & has_moved], 1)
        passes = table[: step.n_ended if 2 <= step.n_ended <= _N_SEPARATE and not is_shared() else 0]
        computed = table[: step.n_ended].sum(0)
        message = np.concatenate([computed, table[_BEFORE] + last, table[_RECEIVED], flags], 1)
        return step, message, passes[..., :-1]

    def gathered(self, own: tuple[_Step, np.ndarray, np.ndarray]) -> ProjectedGradients:
        """Gather the messages of all ranks, from `measured`; every rank calls it."""
        step, message, of_passes = own
        numbers, n, messages = [*step.places], len(self.parameters), gathered_from_ranks(message)
        ranks, passes = np.zeros((len(messages), n, message.shape[1])), np.zeros((len(of_passes), n, N_PROJECTIONS))
        ranks[:, numbers], passes[:, numbers] = messages, of_passes
        computed, accumulated, taken = ranks[..., :-4].reshape(*ranks.shape[:2], 3, -1).transpose(2, 0, 1, 3)
        is_seen = ranks[..., -4] > 0
        taken = np.where(self._is_sharded[:, None], taken.sum(0), taken)
        n_elements = np.zeros(n, dtype=int)
        n_elements[numbers] = [places.n_entries for places in step.places.values()]
        seen = [map(torch.finfo, {parameter.dtype, *step.dtypes[i]}) for i, parameter in enumerate(self.parameters)]
        return ProjectedGradients(
            computed=computed[..., :-1],
            accumulated=accumulated[..., :-1],
            received=taken[..., :-1],
            size=np.maximum(computed, accumulated)[..., -1],
            n_elements=n_elements,
            formats=tuple(max(infos, key=lambda info: info.eps).dtype for infos in seen),
            n_passes=int(ranks[..., -4].max()),
            passes=passes,
            is_left_over=np.any(ranks[..., -3] > 0, axis=0),
            is_last_alone=np.all((ranks[..., -2] > 0) | ~is_seen, axis=0),
            has_moved=bool((ranks[..., -1] > 0).any()) if step.marked else None,
        )

    def _see(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Copy entries of the gradient that autograd is about to accumulate; an exception would end the pass."""
        try:
            with self._lock:  # each device has a thread
                if self._step.problem is None:
                    self._take(self._step, number, gradients)
        except Exception as error:  # noqa: BLE001  (it is raised when the step is measured)
            self._step.problem = error

    def _take(self, step: _Step, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        leaf = self.leaf(number)
        gradient, before, places = gradients[0], None if leaf is None else leaf.grad, step.places[number]
        if gradient is None:
            return
        if number in step.latest:  # the next pass has begun
            self._end_pass(step)
        step.latest[number] = entries_of(gradient, places).clone()
        step.before.pop(number, None)
        if before is not None:
            step.before[number] = entries_of(before, places).clone()
            kept, version = self._after_update.get(number, (lambda: None, 0))
            if number not in step.n_passes and kept() is before and version == before._version:
                step.left_over.add(number)
        if leaf is self.parameters[number]:
            mark = (leaf._version, leaf.data_ptr())
            step.has_moved |= step.marks.setdefault(number, mark) != mark
            if number in step.marked:  # some loops change parameters in a way that leaves no mark
                weights = entries_of(leaf, places)
                if number in step.weights:
                    has_moved = (weights != step.weights[number]).any()
                    step.moved[number] = has_moved | step.moved.get(number, has_moved)
                else:
                    step.weights[number] = weights.clone()
        step.n_passes[number] += 1

    def leaf(self, number: int) -> Tensor | None:
        """Return the tensor whose gradient autograd computes; None if FSDP2 has not created it yet."""
        parameter = self.parameters[number]
        if self._is_sharded[number]:
            return getattr(self._shards[id(parameter)], "_unsharded_param", None)
        return parameter

    def signs_on(self, device: torch.device) -> Tensor:
        """Return the signs on a device, shape (projection, entry), float64."""
        if device not in self._signs:
            self._signs[device] = self._signs[torch.device("cpu")].to(device, non_blocking=True)
        return self._signs[device]

    def _received(self, step: _Step) -> tuple[dict[int, Tensor], dict[int, Places]]:
        """Return entries of the gradients that this rank received, or of its parts of them, and their places."""
        found, places = {}, dict(step.places)
        for number in step.places:
            gradient: Any = self.parameters[number].grad
            if gradient is None:
                continue
            if self._is_sharded[number]:
                n_rows = len(gradient)
                row = min(distributed.get_rank() * -(-n_rows // distributed.get_world_size()), n_rows)
                places[number] = places[number].after(row)
            found[number] = entries_of(local_part(gradient), places[number])
        return found, places

    def _end_pass(self, step: _Step) -> None:
        if step.latest:
            self._project(step, step.n_ended, step.latest, step.places)
            step.n_ended += 1
            step.latest.clear()

    def _project(self, step: _Step, i: int, found: Mapping[int, Tensor], places: Mapping[int, Places]) -> None:
        """Project gradients, those of equal size and dtype in one product."""
        row_of = {number: row for row, number in enumerate(step.places)}
        groups: dict[Any, list[int]] = {}
        for number, entries in found.items():
            key = (entries.device, entries.dtype, entries.shape, places[number].n_before)
            groups.setdefault(key, []).append(number)
        for (device, dtype, shape, n_before), numbers in groups.items():
            rows = torch.stack([found[number] for number in numbers]).flatten(1)
            values = project(rows, self.signs_on(device)[:, n_before : n_before + shape.numel()])
            step.projected.append((i, [row_of[number] for number in numbers], values))
            for number in numbers:
                step.dtypes[number].add(dtype)


def random_signs(seed: int) -> Tensor:
    """Return the signs of the entries in each projection, shape (projection, entry), float64."""
    drawn = np.random.default_rng(seed % 2**64).integers(256, size=N_ENTRIES, dtype=np.uint8)
    return torch.from_numpy(2.0 * np.unpackbits(drawn[None], axis=0, bitorder="little") - 1)


class Places(NamedTuple):
    """Entries of a tensor that are projected: runs of neighboring ones, which are read faster than single ones."""

    of_row: int  # entries of a row; rows may be on different ranks, and no run belongs to two of them
    length: int  # entries of a run
    first: int  # number of the first run, in the tensor or its part
    spacing: int  # of the runs; odd, so that matrices with an even number of runs in a row show all columns
    n_entries: int  # that are projected, in the full tensor
    n_before: int = 0  # how many of these precede the part

    @classmethod
    def of(cls, tensor: Tensor, turn: int, n_entries: int = N_ENTRIES) -> Places:
        """Return the places of at most some entries in a full tensor of any shape, real or complex."""
        shape = (*(tensor.shape or (1,)), 1 + tensor.is_complex())
        n, of_row = math.prod(shape), math.prod(shape[1:])
        length, spacing = math.gcd(_RUN, of_row), -(-n // n_entries) | 1
        first = turn % spacing
        return cls(of_row, length, first, spacing, length * len(range(first, n // length, spacing)))

    def after(self, n_rows: int) -> Places:
        """Return the places in the part of a tensor after some rows."""
        n_runs = n_rows * self.of_row // self.length
        n_before = len(range(self.first, n_runs, self.spacing))
        first = self.first + n_before * self.spacing - n_runs
        return self._replace(first=first, n_before=n_before * self.length)


def entries_of(tensor: Tensor, places: Places) -> Tensor:
    """Return the entries of a tensor or its part at some places, shape (run, entry); a view if it is contiguous."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1, places.length)[places.first :: places.spacing]


def project(rows: Tensor, signs: Tensor) -> Tensor:
    """Return projections of the rows of a matrix on signs and, last, their norms, (row, projection + 1), float64."""
    wide = rows.double()
    return torch.cat([wide @ signs.T, torch.linalg.vector_norm(wide, dim=1, keepdim=True)], 1)


def _is_sharded(parameter: Tensor) -> bool:
    marks = ("full_tensor", "ds_id", "_is_flat_param", "_fsdp_flattened")
    return any(hasattr(parameter, mark) for mark in marks)


def _is_in_rows(parameter: Any) -> bool:
    """Return whether every rank has some of the rows, as by default in FSDP2."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return mesh.ndim == 1 and mesh.size() == distributed.get_world_size() and placements[0].is_shard(0)


def gathered_from_ranks(message: np.ndarray) -> np.ndarray:
    """Gather the messages of all ranks, shape (rank, ...)."""
    if not is_shared():
        return message[None]
    own = torch.from_numpy(message).to(message_device())
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu().numpy()
