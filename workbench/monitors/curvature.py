"""Sharpness: the largest eigenvalue of the loss's Hessian, by Lanczos on Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.errors import OptionError
from workbench.models.calling import config_options, unwrap, visible_attention
from workbench.models.losses import require_graph
from workbench.models.probing import undisturbed
from workbench.models.subject import Subject
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, PositiveInt, at_least


class AnyOptimizer(Protocol):
    """An optimizer, or several as one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters with their options."""

    @property
    def state(self) -> Any:
        """State of each parameter."""


#: Function from the model to its loss as a 0-dim tensor with a graph.
LossOf = Callable[[nn.Module], Tensor]


@checked
def sharpness(
    model: Subject | nn.Module,
    loss_of: LossOf,
    *,
    tolerance: NonNegativeFloat = 1e-3,
    n_vectors: Annotated[int, at_least(3)] = 20,
    n_products: PositiveInt = 200,
) -> float:
    """Compute the largest eigenvalue of the Hessian of a loss with respect to all trainable parameters.

    Gradient descent with learning rate eta is stable up to a sharpness of 2 / eta (Cohen et al. 2021,
    arXiv:2103.00065). The eigenvalue is computed by the implicitly restarted Lanczos method (ARPACK, through SciPy) on
    Hessian-vector products by double backward. Attention runs in PyTorch's unfused kernel, since the fused ones have no
    second derivative. The start vector is fixed.

    The loss is evaluated in eval mode, so without dropout. Parameters, their ``.grad``, modes, hooks and random states
    are left unchanged.

    Args:
        model: Module whose operations can be differentiated twice.
        loss_of: Function from the model to its loss on fixed examples, a 0-dim tensor; called once. The forward
            graph stays in memory during the computation, so use few examples.
        tolerance: Tolerated relative error of the eigenvalue; 0 for the precision of the number format.
        n_vectors: Number of Lanczos vectors, each as large as all parameters together; at least 3. Convergence is
            faster with more.
        n_products: Approximate maximum number of Hessian-vector products; each costs about as much as two training
            steps.

    Returns:
        Eigenvalue in units of the loss (per squared unit of the parameters), negative at a maximum; NaN if loss or
        gradient is not finite, or if the method has not converged within ``n_products``.

    Raises:
        OptionError: If an option is out of range, if no parameter can be trained, or if the loss is not a 0-dim tensor
            with a graph.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> inputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> round(wb.monitors.sharpness(model, lambda model: (model(inputs) ** 2).sum()), 1)
        8.0

    See Also:
        `workbench.monitors.preconditioned_sharpness`: Sharpness as Adam sees it.
        `workbench.Recorder`: Records it with ``every={"curvature": ...}``.
    """
    model = unwrap(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return _largest_eigenvalue(model, loss_of, weights, None, tolerance, n_vectors, n_products)


@checked
def preconditioned_sharpness(
    model: Subject | nn.Module,
    loss_of: LossOf,
    optimizer: AnyOptimizer,
    *,
    tolerance: NonNegativeFloat = 1e-3,
    n_vectors: Annotated[int, at_least(3)] = 20,
    n_products: PositiveInt = 200,
) -> float:
    """Compute the largest eigenvalue of P^(-1/2) H P^(-1/2) with the Hessian H and Adam's preconditioner P.

    Defined by Cohen et al. 2022 (arXiv:2207.14484): P = diag(sqrt(v / (1 - beta2^t)) + eps), with the optimizer's
    current v, t, beta2 and eps (with amsgrad, the largest v so far). P does not include the bias correction of the
    momentum, which is 1 within 1e-4 after 90 steps at beta1 = 0.9. Full-batch Adam is stable up to
    (2 + 2 beta1) / ((1 - beta1) eta), which is 38 / eta at beta1 = 0.9. Weight decay is not part of H.

    Args:
        model: As in `sharpness`.
        loss_of: As in `sharpness`.
        optimizer: Adam, or an optimizer that stores ``exp_avg_sq`` and ``step`` in the same way, after at least one
            step. H is taken with respect to its trainable parameters.
        tolerance: As in `sharpness`.
        n_vectors: As in `sharpness`.
        n_products: As in `sharpness`.

    Returns:
        Eigenvalue in units of the loss per unit of the gradient, that is 1 / learning rate; NaN as in `sharpness`, and
        if a second moment is not finite.

    Raises:
        OptionError: As in `sharpness`, and if the optimizer has no second moments.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> def loss_of(model):
        ...     return model(torch.ones(1, 1)).square().sum()
        >>> loss_of(model).backward()
        >>> optimizer.step()
        >>> wb.monitors.preconditioned_sharpness(model, loss_of, optimizer) > 0
        True

    See Also:
        `workbench.monitors.sharpness`: Sharpness without a preconditioner.
    """
    model = unwrap(model)
    weights, roots = [], []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad:
                weights.append(weight)
                roots.append(_root_of_preconditioner(optimizer, group, weight))
    return _largest_eigenvalue(model, loss_of, weights, roots, tolerance, n_vectors, n_products)


def _root_of_preconditioner(optimizer: AnyOptimizer, group: dict, weight: Tensor) -> Tensor:
    state = optimizer.state.get(weight, {})
    if "exp_avg_sq" not in state or "step" not in state or "betas" not in group:
        raise OptionError(
            f"{type(optimizer).__name__} has no second moment of a parameter of shape {tuple(weight.shape)}; pass Adam "
            "or AdamW after a step with gradients of all parameters."
        )
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    correction = 1 - group["betas"][1] ** float(state["step"])
    return ((second_moment / correction).sqrt() + group["eps"]).sqrt()


def _largest_eigenvalue(
    model: nn.Module,
    loss_of: LossOf,
    weights: Sequence[Tensor],
    roots: Sequence[Tensor] | None,
    tolerance: float,
    n_vectors: int,
    n_products: int,
) -> float:
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n_weights = sum(weight.numel() for weight in weights)
    if not n_weights:
        raise OptionError("The model has no trainable parameters, which sharpness needs; set requires_grad.")
    dtype = np.float64 if any(weight.dtype == torch.float64 for weight in weights) else np.float32
    options = config_options(visible_attention(model))
    with undisturbed(model), options, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        product = _hessian_product(model, loss_of, weights, roots)
    if product is None:
        return float("nan")
    n_held = min(n_vectors, n_weights)
    rng = np.random.default_rng(0)
    start = rng.standard_normal(n_weights).astype(dtype)
    try:
        if n_weights <= 3:  # too small for Lanczos
            rows = np.stack([product(row) for row in np.eye(n_weights)])
            return float(np.linalg.eigvalsh((rows + rows.T) / 2)[-1])
        if not product(start).any():  # ARPACK rejects a matrix of zeros
            return 0.0
        value = eigsh(
            LinearOperator((n_weights, n_weights), matvec=product, dtype=dtype),
            k=1,
            which="LA",
            v0=start,
            ncv=n_held,
            tol=tolerance,
            maxiter=max(1, n_products // (n_held - 1)),  # a restart costs at most n_held - 1 products
            return_eigenvectors=False,
            rng=rng,
        )
    except (ArpackNoConvergence, _NotFiniteError):
        return float("nan")
    return float(value[0])


class _NotFiniteError(Exception):
    """A Hessian-vector product is not finite and must not be passed to ARPACK."""


def _hessian_product(
    model: nn.Module, loss_of: LossOf, weights: Sequence[Tensor], roots: Sequence[Tensor] | None
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the map v -> P^(-1/2) H P^(-1/2) v on flat vectors; None if the loss, a gradient or P is not finite."""
    loss = require_graph(loss_of(model))
    gradients = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
    known = [loss, *gradients, *(roots or [])]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in known):
        return None
    curved = [gradient for gradient in gradients if gradient.requires_grad]

    def product(flat: np.ndarray) -> np.ndarray:
        vectors = _split(flat, weights)
        if roots is not None:
            vectors = [vector / root for vector, root in zip(vectors, roots, strict=True)]
        with_graph = [vector for vector, g in zip(vectors, gradients, strict=True) if g.requires_grad]
        parts: Sequence[Tensor] = [torch.zeros_like(weight) for weight in weights]  # if the loss is linear in all
        if curved:
            parts = torch.autograd.grad(curved, weights, with_graph, retain_graph=True, materialize_grads=True)
        if roots is not None:
            parts = [part / root for part, root in zip(parts, roots, strict=True)]
        result = np.concatenate([part.detach().flatten().to("cpu", torch.float64).numpy() for part in parts])
        if not np.isfinite(result).all():
            raise _NotFiniteError
        return result.astype(flat.dtype, copy=False)

    return product


def _split(flat: np.ndarray, weights: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.from_numpy(np.ascontiguousarray(flat).reshape(-1)).split([weight.numel() for weight in weights])
    return [part.view(weight.shape).to(weight) for part, weight in zip(parts, weights, strict=True)]
