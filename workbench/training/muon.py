"""Muon as used in practice: Muon for the matrices of the blocks, AdamW for all other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import OptionError

#: Coefficients and number of Newton-Schulz iterations (Jordan et al. 2024, as in torch's Muon).
_COEFFICIENTS, _N_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
#: Factor of sqrt(larger side) that gives updates the root mean square of those of AdamW.
_RMS_OF_ADAMW = 0.2
#: Names of the matrix by which a module multiplies its inputs.
_MATRIX_NAMES = ("weight", "in_proj_weight")


class _Muon(torch.optim.Optimizer):
    """Muon that updates matrices of one shape together, in float32 on a CPU (torch's takes several times as long)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters once."""
        assert closure is None  # `MuonWithAdamW` calls it
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape, weight.device, weight.dtype].append(weight)
            for weights in by_shape.values():
                self._update(weights, group)

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        changes = []
        for weight in weights:
            state, gradient = self.state[weight], weight.grad
            assert gradient is not None  # selected in `step`
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            changes.append(gradient.lerp(buffer, momentum))  # Nesterov momentum
        factor = -group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(weights[0].shape))
        for weight, change in zip(weights, orthogonalized(torch.stack(changes)), strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(weight.dtype), alpha=factor)


class MuonWithAdamW(torch.optim.Optimizer):
    """Optimizer that updates some matrices by Muon and the other parameters by AdamW.

    The updates of Muon are scaled to the root mean square of those of AdamW (Liu et al. 2025, arXiv:2502.16982, Eq. 4),
    so that both share one learning rate and one weight decay.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        common = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(_Muon(matrices, {**common, "momentum": momentum}))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr, betas, eps, weight_decay))
        groups = [group for part in self._parts for group in part.param_groups]
        self._is_complete = False
        super().__init__(groups, {**common, "momentum": momentum, "betas": betas, "eps": eps})
        self._is_complete = True
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because it is unknown whether Muon or AdamW should update further parameters."""
        if self._is_complete:
            raise OptionError("Parameters cannot be added to MuonWithAdamW; create a new optimizer with all of them.")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return groups, state and the two optimizers, for copies."""
        return {**super().__getstate__(), "_parts": self._parts, "_is_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state, including those of the two optimizers."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Share groups and state with the two optimizers, so that all are saved and restored together."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state


def muon_for(model: nn.Module, **options: Any) -> MuonWithAdamW:
    """Create a `MuonWithAdamW` for a model, with Muon for the trainable matrices of its blocks.

    These are the weights with two dimensions (``weight`` or ``in_proj_weight``) of modules within a ``ModuleList`` or
    ``Sequential``, except embeddings. AdamW updates all others: embedding, output head, vectors, biases, tensors of
    experts, and parameters with other names.
    """
    is_matrix: set[int] = set()
    for stack in model.modules():
        if not isinstance(stack, nn.ModuleList | nn.Sequential):
            continue
        for module in stack.modules():
            own = {} if isinstance(module, nn.Embedding) else dict(module.named_parameters(recurse=False))
            is_matrix |= {id(own[name]) for name in _MATRIX_NAMES if name in own and own[name].ndim == 2}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if id(parameter) in is_matrix]
    return MuonWithAdamW(matrices, [each for each in parameters if id(each) not in is_matrix], **options)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices (matrix, row, column) approximately by Newton-Schulz iteration.

    The result is bfloat16 on a GPU, float32 on a CPU. Singular values are in 0.68 .. 1.21, except those that were below
    0.0015 of the Frobenius norm; zeros stay zero.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_N_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
