"""Singular values of the Jacobian of a block, or of all blocks together, at the states of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.errors import SnapshotError
from workbench.flow.gains import eager_options
from workbench.models.anatomy import Anatomy
from workbench.models.block_calls import Site
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import config_options, run_model
from workbench.models.probing import undisturbed

T = TypeVar("T")
#: Maximum number of entries of a state for which every singular value is computed.
EXACT_UP_TO = 768
#: Number of rows of a Jacobian that are computed at once, and number of random vectors for its mean square.
_ROWS_AT_A_TIME, _N_PROBES = 128, 16
#: Relative residual of Lanczos at which the square of a singular value counts as converged.
_TOLERANCE = 1e-4
_N_RESTARTS = 12
#: Fraction of the largest singular value below which the Gram matrix is not used, because of its rounding.
_MIN_FRACTION = 1e-4
#: Maximum relative difference between two computations of the same product of Jacobians.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class SingularValues:
    """Singular values of one Jacobian."""

    #: Requested number of largest values, decreasing; NaN where there are fewer or they did not converge.
    largest: np.ndarray
    mean: float  # root mean square of all singular values
    #: Whether all were computed; otherwise ``largest`` comes from Lanczos and ``mean`` from random vectors.
    is_exact: bool = False
    reason: str = ""  # reason why values are missing; empty if none is


class Jacobian:
    """Jacobian from a state to one of its size, as a linear map; products J v take reverse mode twice."""

    def __init__(self, function: Callable[[Tensor], Tensor], point: Tensor) -> None:
        self.point = point.detach().requires_grad_()
        # Adding zero makes the value depend on the state even if the function does not.
        self.value = function(self.point) + 0 * self.point.sum()
        self.size = point.numel()
        if self.value.numel() != self.size:
            raise SnapshotError("The state that leaves has another number of entries than the state that enters.")
        self._cotangent = torch.zeros_like(self.value, requires_grad=True)
        self._pulled: Tensor | None = None

    def pull(self, v: np.ndarray) -> np.ndarray:
        """Return J' v."""
        return _flat(self._pulled_back(self._as(v, self.value)))

    def push(self, v: np.ndarray) -> np.ndarray:
        """Return J v, computed as the derivative of the linear map u -> J' u."""
        if self._pulled is None:
            self._pulled = self._pulled_back(self._cotangent, create_graph=True)
        if not self._pulled.requires_grad:
            return np.zeros(self.size)
        (product,) = torch.autograd.grad(
            self._pulled, self._cotangent, self._as(v, self.point), retain_graph=True, allow_unused=True
        )
        return np.zeros(self.size) if product is None else _flat(product)

    def dense(self) -> np.ndarray:
        """Return the matrix, shape (output entry, input entry), float64."""
        rows, is_batched = [], True
        for start in range(0, self.size, _ROWS_AT_A_TIME):
            which = torch.arange(start, min(start + _ROWS_AT_A_TIME, self.size), device=self.value.device)
            units = torch.zeros(len(which), self.size, dtype=self.value.dtype, device=self.value.device)
            units[torch.arange(len(which)), which] = 1
            units = units.view(len(which), *self.value.shape)
            if is_batched:
                try:
                    rows.append(self._pulled_back(units, is_grads_batched=True))
                    continue
                except RuntimeError:  # an operation that cannot be batched
                    is_batched = False
            rows.append(torch.stack([self._pulled_back(unit) for unit in units]))
        return torch.cat(rows).flatten(1).to("cpu", torch.float64).numpy()

    def _pulled_back(self, cotangent: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(self.value, self.point, cotangent, retain_graph=True, **options)[0]

    @staticmethod
    def _as(v: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(v)).to(like).view(like.shape)


def singular_values(
    jacobian: Jacobian, n_largest: int, *, exact_up_to: int = EXACT_UP_TO, seed: int = 0
) -> SingularValues:
    """Compute the largest singular values of a Jacobian, and the root mean square of all.

    For states of at most ``exact_up_to`` entries the matrix is computed. Otherwise the values come from the Lanczos
    method on J'J (ARPACK), and the mean square from |J v|^2 for vectors v of random signs (Hutchinson 1990).
    """
    if jacobian.size <= exact_up_to or n_largest >= jacobian.size:
        return of_matrix(jacobian.dense(), n_largest)
    largest = np.full(n_largest, np.nan)
    random = np.random.default_rng(seed % 2**64)
    probes = random.choice([-1.0, 1.0], size=(_N_PROBES, jacobian.size))
    mean = float(np.sqrt(np.mean([np.mean(jacobian.push(v) ** 2) for v in probes])))
    if not np.isfinite(mean):
        return _none_of("the Jacobian is not finite", n_largest)
    found = _lanczos(jacobian, n_largest, random.standard_normal(jacobian.size))
    largest[: len(found)] = found
    reason = "" if len(found) == n_largest else "Lanczos did not find all requested singular values"
    return SingularValues(largest, mean, reason=reason)


def of_matrix(matrix: np.ndarray, n_largest: int) -> SingularValues:
    """Compute the singular values of a Jacobian that is given as a matrix."""
    if not np.isfinite(matrix).all():
        return _none_of("the Jacobian is not finite", n_largest)
    largest = np.full(n_largest, np.nan)
    n = min(n_largest, len(matrix))
    found = np.sqrt(np.clip(np.linalg.eigvalsh(matrix @ matrix.T)[::-1], 0, None))[:n]
    if found[-1] < _MIN_FRACTION * found[0]:
        found = np.linalg.svd(matrix, compute_uv=False)[:n]
    largest[:n] = found
    return SingularValues(largest, float(np.linalg.norm(matrix) / np.sqrt(len(matrix))), is_exact=True)


def _lanczos(jacobian: Jacobian, n: int, start: np.ndarray) -> np.ndarray:
    """Return the largest singular values that Lanczos finds, in decreasing order."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n_entries = jacobian.size
    squared = LinearOperator((n_entries, n_entries), matvec=lambda v: jacobian.pull(jacobian.push(v)), dtype=np.float64)
    basis = min(n_entries, max(4 * n, 32))
    options = {"v0": start, "ncv": basis, "maxiter": _N_RESTARTS, "return_eigenvectors": False}
    try:
        squares = eigsh(squared, n, tol=_TOLERANCE, **options)
    except ArpackNoConvergence:  # many values are close together, so approximate ones suffice
        try:
            squares = eigsh(squared, n, tol=100 * _TOLERANCE, **options)
        except ArpackNoConvergence as unfinished:
            squares = unfinished.eigenvalues
    return np.sqrt(np.clip(np.sort(squares)[::-1], 0, None))


class SequenceJacobians:
    """Jacobians of a model's blocks at the states of one sequence.

    The Jacobian of a block maps all states of the sequence that enter to all that leave, so it includes the effects of
    attention between tokens. A block is called with the same other arguments as in the model. `measure` fills
    ``blocks`` (one entry per layer), ``end_to_end`` (all blocks together) and ``n_entries`` (of a state).
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, sequence: Any, *, exact_up_to: int = EXACT_UP_TO, seed: int = 0
    ) -> None:
        self.model, self.sites, self.sequence = model, anatomy.sites, sequence
        self.exact_up_to, self.seed = exact_up_to, seed
        self.blocks: list[SingularValues] = []
        self.end_to_end = _none_of("it was not measured yet", 0)
        self.n_entries = 0

    def measure(self, n_largest: int) -> None:
        """Compute ``blocks``, ``end_to_end`` and ``n_entries``."""
        with (
            undisturbed(self.model),
            config_options(eager_options(self.model)),
            sdpa_kernel(SDPBackend.MATH),  # the fused kernels have no second derivative
        ):
            calls = self._recorded_calls()
            states = [site.state_in(*call) for site, call in zip(self.sites, calls, strict=True)]
            self.n_entries = states[0].numel()
            with torch.enable_grad():
                functions = [_replay(site, *call) for site, call in zip(self.sites, calls, strict=True)]
                functions.append(self._all_blocks)
                maps = [_tried(partial(Jacobian, *pair)) for pair in zip(functions, [*states, states[0]], strict=True)]
        # The graphs exist now; differentiating them does not call the model or its hooks.
        found: list[SingularValues | str]
        if self.n_entries > self.exact_up_to:
            how = partial(singular_values, n_largest=n_largest, exact_up_to=self.exact_up_to, seed=self.seed)
            found = [linear if isinstance(linear, str) else _tried(partial(how, linear)) for linear in maps]
        else:
            matrices = [_matrix(linear) for linear in maps[:-1]]
            matrices.append(self._product(matrices, maps[-1]))
            found = [each if isinstance(each, str) else of_matrix(each, n_largest) for each in matrices]
        *self.blocks, self.end_to_end = [_known(each, n_largest) for each in found]

    def _product(self, matrices: Sequence[np.ndarray | str], together: Jacobian | str) -> np.ndarray | str:
        """Return the product of the Jacobians of all blocks; if states also bypass blocks, the full Jacobian."""
        known = [matrix for matrix in matrices if not isinstance(matrix, str)]
        if isinstance(together, str) or len(known) < len(matrices):
            return _matrix(together)
        product = reduce(lambda before, matrix: matrix @ before, known)
        v = np.random.default_rng(self.seed % 2**64).standard_normal(len(product))
        direct, by_chain_rule = together.pull(v), v @ product
        is_same = np.linalg.norm(direct - by_chain_rule) <= _ROUNDING * np.linalg.norm(direct)
        return product if is_same else _matrix(together)

    def _recorded_calls(self) -> list[tuple[tuple, dict[str, Any]]]:
        calls: dict[int, tuple[tuple, dict[str, Any]]] = {}

        def enter(call: BlockCall) -> None:  # a copy, because the block may write to its arguments
            calls[call.layer] = call.site.with_state(call.args, call.kwargs, call.state_in.detach().clone())

        with BlockHooks(self.sites, enter):
            run_model(self.model, self.sequence)
        return [calls[layer] for layer in range(len(self.sites))]

    def _all_blocks(self, state: Tensor) -> Tensor:
        """Map the state that enters the first block to the one that leaves the last, by running the full model."""
        left: list[Tensor] = []

        def leave(call: BlockCall) -> None:
            left.append(call.state_out.clone())

        first, last = self.sites[:1], self.sites[-1:]
        with BlockHooks(first, lambda _: state.clone()), BlockHooks(last, on_leave=leave):
            run_model(self.model, self.sequence)
        return left[0]


def _tried(compute: Callable[[], T]) -> T | str:
    """Return a result, or the reason why it cannot be computed."""
    try:
        return compute()
    except (RuntimeError, NotImplementedError, SnapshotError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")


def _matrix(linear: Jacobian | str) -> np.ndarray | str:
    return linear if isinstance(linear, str) else _tried(linear.dense)


def _known(found: SingularValues | str, n_largest: int) -> SingularValues:
    return _none_of(found, n_largest) if isinstance(found, str) else found


def _none_of(reason: str, n_largest: int) -> SingularValues:
    """Return missing singular values and the reason."""
    return SingularValues(np.full(n_largest, np.nan), np.nan, reason=reason)


def _replay(site: Site, args: tuple, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the function of the entering state that one call of a block computes."""

    def function(state: Tensor) -> Tensor:
        given, named = site.with_state(args, kwargs, state.clone())
        return site.state_out(site.module(*given, **named))

    return function


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().flatten().to("cpu", torch.float64).numpy()
