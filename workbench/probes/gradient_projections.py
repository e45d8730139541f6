"""Random projections of gradients, as computed by autograd on each rank and as received by the optimizer."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from workbench.errors import OptionError
from workbench.models.calling import is_shared, message_device
from workbench.models.readable_weights import local_part, parameters_of_shards, read_arrays
from workbench.probes.gradient_agreement import ProjectedGradients

#: Number of projections of a gradient: one random byte holds the signs of an element in all of them.
N_PROJECTIONS = 8
#: Largest number of backward passes of a step that are stored separately.
_N_SEPARATE = 8
#: Number of parameters whose sums show whether they change between backward passes.
_N_MARKED = 8
#: Elements that are projected together to save memory; on the host they fit the processor's cache.
_CHUNK, _CHUNK_ON_HOST = 2**20, 2**16
#: Signs of each byte, (projection, byte).
_SIGNS = torch.from_numpy(2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[None], axis=0, bitorder="little") - 1)
#: Attribute of FSDP2 for the parameter before sharding.
_UNSHARDED = "_unsharded_param"
_LOWEST = torch.iinfo(torch.int64).min


class GradientProjections:
    """Random projections of the gradients of a step, before and after their reduction; a context manager.

    Use it in a training loop::

        with GradientProjections(model.parameters()) as projections:
            loss.backward()
            step = projections.take()
        optimizer.step()
        print(compare_gradients(step).sentence)

    `arm` is called for one step, before its first backward pass. From then on, the gradients that autograd passes to
    each parameter are projected before they are accumulated in ``.grad`` or reduced by DDP. Several backward passes are
    summed; in one process up to eight are also stored separately, so that a missing one can be named. `take` is called
    right before the optimizer's step, on every rank, and projects ``.grad``.

    The hooks are on the autograd nodes that accumulate gradients. They see the gradients after hooks of the parameters,
    but not those of ``torch.autograd.grad``; a shared parameter is seen once, with the sum. They return nothing, so
    that the training is bit for bit the same, and they cause neither recompilation nor graph breaks of compiled models.

    Cost of a step between `arm` and `take`: about one random byte and one float64 addition (8 on a GPU) per element for
    each backward pass (twice if ``.grad`` is not empty) and for `take`. There is no host synchronization before `take`,
    which needs one transfer and one all-gather of 28 numbers per parameter. Other steps cost nothing. Global random
    states are not changed.

    For parameters that FSDP2 shards over all ranks, each rank sees the full gradient before its reduction, from the
    second step on; the parts that the ranks receive are projected separately and summed.

    Args:
        parameters: Parameters of the optimizer, the same in the same order on every rank, on devices of one type (on
            which the signs depend).
        model: The model that FSDP2 has sharded; None if no parameter is sharded.
        seed: Seed of the signs, which depend only on it and on the index of the parameter; the same on all ranks and
            in all steps that are compared.

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
        for number, parameter in enumerate(self.parameters):
            if _is_sharded(parameter) and not (id(parameter) in self._shards and _is_in_rows(parameter)):
                raise OptionError(
                    f"Parameter {number} is sharded over ranks (tensor parallel, ZeRO, or FSDP without model=), so its "
                    "gradient is reduced before a hook sees it; check sums over ranks with known_answer_all_reduce "
                    "instead."
                )
            if parameter.device.type == "mps":
                raise OptionError(
                    "Devices of type mps have no float64, in which gradients are projected; use another device."
                )
        self._after_update: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        spread = range(0, len(self.parameters), -(-len(self.parameters) // _N_MARKED))
        self._marked = {number for number in spread if not _is_sharded(self.parameters[number])}
        seeds = (np.random.SeedSequence([seed % 2**64, i]) for i in range(len(self.parameters)))
        self._seeds = [int(each.generate_state(1)[0]) for each in seeds]
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] | None = None
        self._forget()

    def _forget(self) -> None:
        self._computed: dict[int, Tensor] = {}
        self._accumulated: dict[int, Tensor] = {}
        self._separate: dict[int, list[Tensor]] = {}
        self._n_passes: Counter[int] = Counter()
        self._last: dict[int, Tensor] = {}
        self._left_over: set[int] = set()
        self._marks: dict[int, tuple[int, int]] = {}
        self._sums: dict[int, list[Tensor]] = {}
        self._has_moved = False
        self._problem: Exception | None = None
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    @property
    def is_armed(self) -> bool:
        """Whether gradients are currently projected."""
        return self._handles is not None

    def __enter__(self) -> GradientProjections:
        self.arm()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disarm()

    def arm(self) -> None:
        """Register the hooks for a step, and discard the projections of earlier steps."""
        self.disarm()
        self._forget()
        self._handles = []
        # Where a compiled function runs the backward pass, the hook would be compiled too.
        see = torch.compiler.disable(self._see) if "torch._dynamo" in sys.modules else self._see
        for number in range(len(self.parameters)):
            parameter = self._leaf(number)
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
        return self.gathered(self.measured())

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """Project the gradients that the optimizer will receive, and remove the hooks; no rank waits for another.

        Returns:
            The message of this rank, and the gradients of the individual passes.
        """
        self.disarm()
        if self._problem is not None:
            raise self._problem
        received = {}
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                received[number] = self._project_own(number, parameter)
        tables = (self._computed, self._accumulated, received, self._last)
        n_passes = max(self._n_passes.values(), default=0)
        separate = self._separate if 2 <= n_passes <= _N_SEPARATE else {}
        sums = [value for several in self._sums.values() for value in several]
        lists = [v for t in tables for v in t.values()] + [v for p in separate.values() for v in p]
        values = iter(read_arrays(lists + sums))
        found = np.zeros((len(self.parameters), 4, N_PROJECTIONS + 1))
        for i, table in enumerate(tables):
            for number in table:
                found[number, i] = next(values)
        passes = np.zeros((n_passes if separate else 0, len(self.parameters), N_PROJECTIONS))
        for number, of_parameter in separate.items():
            for i in range(len(of_parameter)):
                passes[i, number] = next(values)[:-1]
        for several in self._sums.values():
            self._has_moved |= len({next(values).tobytes() for _ in several}) > 1
        is_alone = (found[:, 1] == found[:, 3]).all(1)
        flags = np.zeros((len(self.parameters), 4))
        for number in self._n_passes:
            is_left, n = number in self._left_over, self._n_passes[number]
            flags[number] = n, is_left, n > 1 and is_alone[number], self._has_moved
        return np.concatenate([found[:, :3].reshape(len(found), -1), flags], axis=1), passes

    def gathered(self, own: tuple[np.ndarray, np.ndarray]) -> ProjectedGradients:
        """Gather the messages of all ranks, from `measured`; every rank calls it."""
        message, passes = own
        ranks = _of_all_ranks(message)
        computed, accumulated, taken = ranks[..., :-4].reshape(*ranks.shape[:2], 3, -1).transpose(2, 0, 1, 3)
        is_seen = ranks[..., -4] > 0
        is_sharded = np.array([_is_sharded(parameter) for parameter in self.parameters])
        taken = np.where(is_sharded[:, None], taken.sum(0), taken)
        formats = tuple(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
        self._forget()
        return ProjectedGradients(
            computed=computed[..., :-1],
            accumulated=accumulated[..., :-1],
            received=taken[..., :-1],
            size=np.maximum(computed, accumulated)[..., -1],
            n_elements=np.array([parameter.numel() for parameter in self.parameters]),
            formats=formats,
            n_passes=int(ranks[..., -4].max()),
            passes=passes,
            is_left_over=np.any(ranks[..., -3] > 0, axis=0),
            is_last_alone=np.all((ranks[..., -2] > 0) | ~is_seen, axis=0),
            has_moved=bool((ranks[..., -1] > 0).any()) if self._marked else None,
        )

    def _see(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Project the gradient that autograd is about to accumulate; an exception would end the backward pass."""
        try:
            if self._problem is None:
                self._take(number, gradients)
        except Exception as error:  # noqa: BLE001  (it is raised when the step is measured)
            self._problem = error

    @torch.no_grad()
    def _take(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        leaf = self._leaf(number)
        gradient, before = gradients[0], None if leaf is None else leaf.grad
        if gradient is None:
            return
        new = self._project(number, gradient)
        if before is not None and number not in self._n_passes and number in self._after_update:
            kept, version = self._after_update[number]
            if kept() is before and version == before._version:
                self._left_over.add(number)
        if leaf is self.parameters[number]:
            mark = (leaf._version, leaf.data_ptr())
            self._has_moved |= self._marks.setdefault(number, mark) != mark
            if number in self._marked:  # some loops change parameters in a way that leaves no mark
                self._sums.setdefault(number, []).append(leaf.detach().sum(dtype=torch.float64))
        self._last[number] = new
        earlier = self._computed.get(number)
        self._computed[number] = new if earlier is None else earlier + new
        self._accumulated[number] = new if before is None else self._project(number, before) + new
        self._n_passes[number] += 1
        if self._n_passes[number] <= _N_SEPARATE and not is_shared():
            self._separate.setdefault(number, []).append(new)

    def _leaf(self, number: int) -> Tensor | None:
        """Return the tensor whose gradient autograd computes; None if FSDP2 has not created it yet."""
        parameter = self.parameters[number]
        return (
            parameter if not _is_sharded(parameter) else getattr(self._shards[id(parameter)], "_unsharded_param", None)
        )

    @torch.no_grad()
    def _project_own(self, number: int, parameter: Tensor) -> Tensor:
        """Return the projections of the gradient that this rank received, or of its part of a sharded one."""
        gradient: Any = parameter.grad
        if not _is_sharded(parameter):
            return self._project(number, gradient)
        rows, of_row = parameter.shape[0], math.prod(parameter.shape[1:])
        first = min(distributed.get_rank() * -(-rows // distributed.get_world_size()), rows)
        return project(local_part(gradient), self._seeds[number], start=first * of_row, n_total=rows * of_row)

    @torch.no_grad()
    def _project(self, number: int, gradient: Tensor) -> Tensor:
        """Return the projections of a gradient and its norm, on its device, shape (projection + 1,)."""
        if torch.finfo(gradient.dtype).eps > torch.finfo(self._dtypes[number]).eps:
            self._dtypes[number] = gradient.dtype
        return project(gradient, self._seeds[number])


def project(gradient: Tensor, seed: int, *, start: int = 0, n_total: int | None = None) -> Tensor:
    """Return projections of a tensor on random signs and, last, its Euclidean norm, (projection + 1,), float64.

    The tensor, of any shape and floating-point or complex dtype, may be a part of a larger, real one of ``n_total``
    elements, with ``start`` elements before it. The result is on its device.
    """
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    device = flat.device
    generator = torch.Generator(device).manual_seed(seed)
    found = torch.zeros(N_PROJECTIONS + 1, dtype=torch.float64, device=device)
    if is_on_host := device.type == "cpu":
        of_bytes = torch.zeros(256, dtype=torch.float64, device=device)
    else:
        places = torch.arange(N_PROJECTIONS, dtype=torch.uint8, device=device)[:, None]
    n_total, size = len(flat) if n_total is None else n_total, _CHUNK_ON_HOST if is_on_host else _CHUNK
    end = start + len(flat)
    for begin in range(0, min(end, n_total), size):
        n = min(size, n_total - begin)
        words = torch.empty((n + 7) // 8, dtype=torch.int64, device=device)
        words.random_(_LOWEST, None, generator=generator)
        low, high = max(begin, start), min(begin + n, end)
        if low >= high:  # these signs belong to another part
            continue
        drawn = words.view(torch.uint8)[low - begin : high - begin]
        part = flat[low - start : high - start].double()
        if is_on_host:  # elements with the same byte are summed first
            of_bytes += torch.bincount(drawn, part, minlength=256)
        else:
            found[:-1] += 2 * (((drawn >> places) & 1).double() @ part) - part.sum()
        found[-1] += part.dot(part)
    if is_on_host:
        found[:-1] = _SIGNS @ of_bytes
    found[-1].sqrt_()
    return found


def _is_sharded(parameter: Tensor) -> bool:
    marks = ("full_tensor", "ds_id", "_is_flat_param", "_fsdp_flattened")
    return any(hasattr(parameter, mark) for mark in marks)


def _is_in_rows(parameter: Any) -> bool:
    """Return whether every rank has some of the rows, as by default in FSDP2."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return mesh.ndim == 1 and mesh.size() == distributed.get_world_size() and placements[0].is_shard(0)


def _of_all_ranks(message: np.ndarray) -> np.ndarray:
    """Gather the messages of all ranks, shape (rank, ...)."""
    if not is_shared():
        return message[None]
    own = torch.from_numpy(message).to(message_device())
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu().numpy()
