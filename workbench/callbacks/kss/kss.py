"""Koopman Spectral Shaping: the public class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.callbacks.kss.control import KSSControls, KSSOptions
from workbench.callbacks.kss.penalty import PenaltyShape
from workbench.callbacks.kss.shaper import Shaper

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workbench.models.subject import Subject


class KSS(KSSControls):
    """Koopman Spectral Shaping (RKSP, arXiv:2602.22988): a penalty on the spectrum of each block, and its controls.

    The controls are plain attributes. They are read once per step, so a script, a schedule, an alarm or a button may
    set them at any time, from any thread, and every change is recorded with the run.

    Args:
        strength: alpha, the weight of the penalty; the paper tries .01 to .20.
        interval: Optimizer steps between two applications; the paper's 10 to 20. Strength over interval is the dose.
        enabled: Whether it acts.
        gamma: Near-unit mass to aim at, in [0, 1]; the paper's 0.3 to 0.5.
        layers: Layers to act on: ``"half"``, drawn each time, as in the paper; ``"all"``; or the numbers of the layers.
        options: Options that stay fixed over a run.
        controller: Controller that adjusts the strength by measurements; see `BandController`.

    Raises:
        OptionError: If a value is out of range; nothing is changed then.

    Example:
        >>> import workbench as wb
        >>> kss = wb.KSS.recommended()
        >>> model = wb.zoo.transformer(norm="none", d_model=16, n_layers=2, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=3, kss=kss):
        ...     kss.enabled = record.step < 1
        >>> kss.enabled
        False
    """

    @classmethod
    def published(cls, **controls: Any) -> KSS:
        """The paper's settings (arXiv:2602.22988): strength .15 every 10 steps, half the layers, rank 32."""
        return cls(**controls)

    @classmethod
    def recommended(cls, **controls: Any) -> KSS:
        """A trust region: with it most runs of our sweeps converged, for the least compute (data/README.md).

        64 token states of each batch, in eight leading directions; all layers, after every update; a block may increase
        the norm of the states up to twofold; beyond that, the gain may rise by a quarter per step.
        """
        options = KSSOptions(n_snapshots=64, coupling="trust_region", penalty=PenaltyShape(rank=8))
        return cls(**{"strength": 1.0, "interval": 1, "layers": "all", "options": options, **controls})

    def attach(self, model: Subject | nn.Module, optimizer: torch.optim.Optimizer) -> Shaper:
        """Let KSS act on a model in any training loop: one line before it.

            with kss.attach(model, optimizer):
                for batch in loader:
                    model(**batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

        Gradient accumulation, mixed precision, gradient checkpointing and DDP need no further code.

        Args:
            model: The module that the loop calls, or its subject; it may be wrapped by DDP or ``torch.compile``.
            optimizer: Optimizer of its parameters; it may be wrapped too.

        Returns:
            The attached `Shaper`; leaving its context, or ``detach()``, ends it.

        Raises:
            OptionError: If the optimizer evaluates the loss several times a step (LBFGS) or moves no parameter of
                the model, or the parameters are split over processes (FSDP).
        """
        return Shaper(self, model, optimizer)
