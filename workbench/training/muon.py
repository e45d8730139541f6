"""Muon as it is used in practice: Muon for the matrices of the blocks, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers as one: torch's Muon on some matrices, AdamW on the other parameters.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982, Eq. 4), so one
    learning rate and one weight decay serve both.

    Args:
        matrices: Parameters with two dimensions, for Muon.
        others: Parameters for AdamW.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Momentum of Muon.
        betas: Coefficients of AdamW.
        eps: Added to AdamW's denominator.

    Example:
        >>> import torch
        >>> from workbench.training.muon import MuonWithAdamW
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = MuonWithAdamW([matrix], [bias], lr=0.1)
        >>> (matrix.sum() + bias.sum()).backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in bias.tolist()]
        [-0.1, -0.1]
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
            muon = torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **common)
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=betas, eps=eps, **common))
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {**common, "momentum": momentum, "betas": betas, "eps": eps})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state, also those of the two optimizers."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give the parts the groups and the state of the whole, so that both are saved and restored as one."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state


def muon_for(model: nn.Module, **options: Any) -> MuonWithAdamW:
    """`MuonWithAdamW` for a model: Muon gets the trainable matrices inside repeated blocks.

    These are the parameters with two dimensions of modules within a ``ModuleList`` or ``Sequential``, without
    embeddings; the embedding, the output head, vectors and tensors of experts remain for AdamW.

    Args:
        model: Model whose trainable parameters are updated.
        **options: Those of `MuonWithAdamW`.

    Example:
        >>> import workbench as wb
        >>> from workbench.training.muon import muon_for
        >>> optimizer = muon_for(wb.zoo.transformer(d_model=16, n_layers=2), lr=1e-3)
        >>> [len(group["params"]) for group in optimizer.param_groups]  # 6 matrices in each of 2 blocks
        [12, 25]
    """
    is_matrix: set[int] = set()
    for stack in model.modules():
        if not isinstance(stack, nn.ModuleList | nn.Sequential):
            continue
        for module in stack.modules():
            own = () if isinstance(module, nn.Embedding) else module.parameters(recurse=False)
            is_matrix |= {id(weight) for weight in own if weight.ndim == 2}
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if id(weight) in is_matrix]
    return MuonWithAdamW(matrices, [weight for weight in weights if id(weight) not in is_matrix], **options)
