"""Random projections of gradients: as autograd computes them on each rank, and as the optimizer receives them."""

from __future__ import annotations

import math
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
from workbench.models.device_numbers import read_arrays
from workbench.models.process_group import is_shared, message_device
from workbench.models.readable_weights import own_part, parameters_of_shards
from workbench.probes.gradient_agreement import ProjectedGradients

#: Projections of a gradient: one random byte has the signs of an element in all of them.
N_PROJECTIONS = 8
#: Backward passes of a step that are kept apart at most.
_N_APART = 8
#: Elements that are projected together, so that little memory is needed; a processor keeps them in its cache.
_CHUNK, _CHUNK_ON_HOST = 2**20, 2**16
_LOWEST = torch.iinfo(torch.int64).min


class GradientProjections:
    """Takes random projections of the gradients of a step, before and after their reduction; a context manager.

        with GradientProjections(model.parameters()) as projections:
            loss.backward()
            step = projections.take()
        optimizer.step()
        print(compare_gradients(step).sentence)

    It is armed for one step, before its first backward pass, and projects what autograd hands to each parameter, before
    it is accumulated in ``.grad`` or reduced by DDP. Several backward passes add up; in one process up to eight are
    also kept apart, so that one which is missing is named. `take` is called right before the optimizer's step, on every
    rank, and projects ``.grad``.

    The hooks stand on the nodes of autograd that accumulate gradients: they see what hooks of the parameters leave, and
    nothing of ``torch.autograd.grad``. A shared parameter is seen once, with the sum. They return nothing, so that
    training stays the same to the bit; compiled models are neither recompiled nor broken up.

    Cost of an armed step: about one random byte and one addition in float64 (8 on a GPU) an element for each backward
    pass (twice if ``.grad`` already holds something) and for `take`; no host synchronisation before `take`, and one
    transfer and one all-gather of 28 numbers a parameter in it. Other steps cost nothing. Global random states are
    untouched.

    Of parameters that FSDP2 splits over all ranks, the gradient of the whole is seen on each rank before it is reduced,
    from the second step on, and the parts that the ranks receive are projected one by one and added up.

    Args:
        parameters: Parameters of the optimizer, on every rank the same in the same order, on devices of one kind (the
            signs depend on it).
        model: The model that FSDP2 has split; None: no parameter is split.
        seed: Seed of the signs, which depend on it and the number of the parameter alone; the same on all ranks and
            in all steps that are compared.

    Raises:
        OptionError: If there is no parameter, a parameter is split over ranks or on a device without float64.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(3, 2)
        >>> with wb.probes.GradientProjections(model.parameters()) as projections:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        ...     step = projections.take()
        >>> wb.probes.compare_gradients(step).sentence
        'The optimizer gets the gradients that were computed, in 2 of 2 parameters.'
    """

    def __init__(self, parameters: Iterable[Tensor], *, seed: int = 0, model: nn.Module | None = None) -> None:
        self.parameters = tuple(parameters)
        self._shards = {} if model is None else parameters_of_shards(model)
        if not self.parameters:
            raise OptionError("There are no parameters; pass those of the optimizer.")
        for number, parameter in enumerate(self.parameters):
            if _is_split(parameter) and not (id(parameter) in self._shards and _is_in_rows(parameter)):
                raise OptionError(
                    f"Parameter {number} is split over ranks (tensor parallel, ZeRO, or FSDP without model=), so that "
                    "its gradient is reduced before a hook sees it; use known_answer_all_reduce to check the ranks' "
                    "sums instead."
                )
            if parameter.device.type == "mps":
                raise OptionError("Devices of type mps have no float64 to project in; train on another one for this.")
        self._seeds = [int(np.random.SeedSequence([seed, i]).generate_state(1)[0]) for i in range(len(self.parameters))]
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] | None = None
        self._forget()

    def _forget(self) -> None:
        self._computed: dict[int, Tensor] = {}
        self._accumulated: dict[int, Tensor] = {}
        self._apart: dict[int, list[Tensor]] = {}
        self._n_passes: Counter[int] = Counter()
        self._dtypes = [parameter.dtype for parameter in self.parameters]

    @property
    def is_armed(self) -> bool:
        """Whether gradients are being projected."""
        return self._handles is not None

    def __enter__(self) -> GradientProjections:
        self.arm()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disarm()

    def arm(self) -> None:
        """Attach the hooks for a step; what an earlier step gave is forgotten."""
        self.disarm()
        self._forget()
        self._handles = []
        for number in range(len(self.parameters)):
            parameter = self._leaf(number)
            if parameter is not None and parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)  # a parameter alone does not keep it, and its hooks, alive
                self._handles.append(node.register_prehook(partial(self._see, number)))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
        self._nodes.clear()

    def take(self) -> ProjectedGradients:
        """Project what the optimizer is about to receive, remove the hooks, and gather the projections of all ranks.

        Returns:
            The projections of the step, the same on every rank.

        Raises:
            OptionError: If it is not armed.
        """
        if not self.is_armed:
            raise OptionError("The projections are not armed; call arm() before the first backward pass of the step.")
        self.disarm()
        received = {}
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                received[number] = self._project_own(number, parameter)
        tables = (self._computed, self._accumulated, received)
        n_passes = max(self._n_passes.values(), default=0)
        apart = self._apart if 2 <= n_passes <= _N_APART else {}
        values = iter(read_arrays([v for t in tables for v in t.values()] + [v for p in apart.values() for v in p]))
        found = np.zeros((len(self.parameters), 3, N_PROJECTIONS + 1))
        for i, table in enumerate(tables):
            for number in table:
                found[number, i] = next(values)
        passes = np.zeros((n_passes if apart else 0, len(self.parameters), N_PROJECTIONS))
        for number, of_parameter in apart.items():
            for i in range(len(of_parameter)):
                passes[i, number] = next(values)[:-1]
        counts = np.array([self._n_passes[number] for number in range(len(self.parameters))], dtype=float)
        ranks = _of_all_ranks(np.concatenate([found.reshape(len(found), -1), counts[:, None]], axis=1))
        computed, accumulated, taken = ranks[..., :-1].reshape(*ranks.shape[:2], 3, -1).transpose(2, 0, 1, 3)
        is_split = np.array([_is_split(parameter) for parameter in self.parameters])
        taken = np.where(is_split[:, None], taken.sum(0), taken)
        formats = tuple(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
        self._forget()
        return ProjectedGradients(
            computed=computed[..., :-1],
            accumulated=accumulated[..., :-1],
            received=taken[..., :-1],
            size=np.maximum(computed, accumulated)[..., -1],
            n_elements=np.array([parameter.numel() for parameter in self.parameters]),
            formats=formats,
            n_passes=int(ranks[..., -1].max()),
            passes=passes,
        )

    @torch.no_grad()
    def _see(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Called by autograd with the gradient that it is about to accumulate."""
        leaf = self._leaf(number)
        gradient, before = gradients[0], None if leaf is None else leaf.grad
        if gradient is None:
            return
        new = self._project(number, gradient)
        earlier = self._computed.get(number)
        self._computed[number] = new if earlier is None else earlier + new
        self._accumulated[number] = new if before is None else self._project(number, before) + new
        self._n_passes[number] += 1
        if self._n_passes[number] <= _N_APART and not is_shared():
            self._apart.setdefault(number, []).append(new)

    def _leaf(self, number: int) -> Tensor | None:
        """The tensor whose gradient autograd computes; None: FSDP2 has not made it yet."""
        parameter = self.parameters[number]
        return parameter if not _is_split(parameter) else getattr(self._shards[id(parameter)], "_unsharded_param", None)

    @torch.no_grad()
    def _project_own(self, number: int, parameter: Tensor) -> Tensor:
        """Projections of what this rank received: a gradient, or its part of one."""
        gradient: Any = parameter.grad
        if not _is_split(parameter):
            return self._project(number, gradient)
        rows, of_row = parameter.shape[0], math.prod(parameter.shape[1:])
        first = min(distributed.get_rank() * -(-rows // distributed.get_world_size()), rows)
        return project(own_part(gradient), self._seeds[number], start=first * of_row, n_total=rows * of_row)

    @torch.no_grad()
    def _project(self, number: int, gradient: Tensor) -> Tensor:
        """Projections of a gradient and its norm, on its device, shape (projection + 1,)."""
        if torch.finfo(gradient.dtype).eps > torch.finfo(self._dtypes[number]).eps:
            self._dtypes[number] = gradient.dtype
        return project(gradient, self._seeds[number])


def project(gradient: Tensor, seed: int, *, start: int = 0, n_total: int | None = None) -> Tensor:
    """Projections of a tensor on random signs, and its Euclidean norm.

    Args:
        gradient: Of any shape and floating-point or complex dtype; it may be a part of a larger, real one.
        seed: Seed of the signs.
        start: Number of elements before the part.
        n_total: Number of elements of the whole; None: it is the whole.

    Returns:
        Shape (projection + 1,), the norm last, float64, on the tensor's device.
    """
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    device = flat.device
    generator = torch.Generator(device).manual_seed(seed)
    places = torch.arange(N_PROJECTIONS, dtype=torch.uint8, device=device)[:, None]
    found = torch.zeros(N_PROJECTIONS + 1, dtype=torch.float64, device=device)
    if is_on_host := device.type == "cpu":
        bytes_of = torch.arange(256, dtype=torch.uint8)
        signs = 2 * ((bytes_of >> places) & 1).double() - 1  # of each byte, (projection, byte)
    n_total, size = len(flat) if n_total is None else n_total, _CHUNK_ON_HOST if is_on_host else _CHUNK
    end = start + len(flat)
    for begin in range(0, min(end, n_total), size):
        n = min(size, n_total - begin)
        words = torch.empty((n + 7) // 8, dtype=torch.int64, device=device)
        words.random_(_LOWEST, None, generator=generator)
        low, high = max(begin, start), min(begin + n, end)
        if low >= high:  # signs of another part
            continue
        drawn = words.view(torch.uint8)[low - begin : high - begin]
        part = flat[low - start : high - start].double()
        if is_on_host:  # elements that share a byte are added up first
            found[:-1] += signs @ torch.bincount(drawn, part, minlength=256)
        else:
            found[:-1] += 2 * (((drawn >> places) & 1).double() @ part) - part.sum()
        found[-1] += part.square().sum()
    found[-1].sqrt_()
    return found


def _is_split(parameter: Tensor) -> bool:
    marks = ("full_tensor", "ds_id", "_is_flat_param", "_fsdp_flattened")
    return any(hasattr(parameter, mark) for mark in marks)


def _is_in_rows(parameter: Any) -> bool:
    """Whether each rank of all has some of the rows, as FSDP2 splits parameters unless it is told otherwise."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return mesh.ndim == 1 and mesh.size() == distributed.get_world_size() and placements[0].is_shard(0)


def _of_all_ranks(message: np.ndarray) -> np.ndarray:
    """The messages of all ranks, shape (rank, ...)."""
    if not is_shared():
        return message[None]
    own = torch.from_numpy(message).to(message_device())
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu().numpy()
