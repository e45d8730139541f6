"""The public class of Koopman Spectral Shaping."""

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
    """Koopman Spectral Shaping (RKSP, arXiv:2602.22988), a regularizer of the spectrum of each block.

    The first five arguments are the controls. They are attributes, which are read once per step: a script, a schedule,
    an alarm or a button may set them at any time and from any thread. Every change is recorded with the run.

    Args:
        strength: Weight alpha of the penalty; the paper uses 0.01 to 0.20.
        interval: Optimizer steps between two applications; the paper uses 10 to 20. The dose is strength / interval.
        enabled: Whether KSS acts.
        gamma: Target near-unit mass, in [0, 1]; the paper uses 0.3 to 0.5.
        layers: Layers to act on: ``"half"``, drawn in each step, as in the paper; ``"all"``; or the numbers of the
            layers.
        options: Options that are fixed over a run; None for the default ones.

    Example:
        >>> import workbench as wb
        >>> kss = wb.KSS.recommended()
        >>> model = wb.zoo.transformer(norm="none", d_model=16, n_layers=2, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=3, kss=kss):
        ...     kss.enabled = record.step < 1
        >>> kss.enabled
        False

    See Also:
        `workbench.KSSOptions`: The options that are fixed over a run.
        `workbench.train`: Trains with KSS.
        `workbench.baselines.controls`: Other stability controls.
    """

    @classmethod
    def published(cls, **controls: Any) -> KSS:
        """Return KSS with the settings of the paper (arXiv:2602.22988): strength 0.15, every 10 steps, rank 32.

        It acts on half of the layers, drawn in each step.

        Args:
            **controls: Arguments of `KSS` that differ from these settings.
        """
        return cls(**controls)

    @classmethod
    def recommended(cls, **controls: Any) -> KSS:
        """Return KSS as a trust region, with which most runs of our sweeps converged, at the least compute cost.

        The results are in ``data/README.md``. After every update, the gain of all layers is measured from 64 token
        states of the batch. A block may increase the norm of the states up to twofold; beyond that, its gain may rise
        by at most a quarter per step. Spectra are taken in the eight leading directions.

        Args:
            **controls: Arguments of `KSS` that differ from these settings.
        """
        options = KSSOptions(n_snapshots=64, coupling="trust_region", penalty=PenaltyShape(rank=8))
        return cls(**{"strength": 1.0, "interval": 1, "layers": "all", "options": options, **controls})

    def attach(self, model: Subject | nn.Module, optimizer: torch.optim.Optimizer) -> Shaper:
        """Apply KSS in any training loop, as a context around the loop.

        Gradient accumulation, mixed precision, gradient checkpointing and DDP need no further code, nor do FSDP2 and
        tensor parallelism with the recommended settings, which gather the model for a pass.

        Args:
            model: Module that the loop calls, or its subject; it may be wrapped by DDP or ``torch.compile``.
            optimizer: Optimizer of its parameters; it may be wrapped too.

        Returns:
            The attached `Shaper`. Leaving its context, or calling ``detach()``, removes it.

        Raises:
            OptionError: If the optimizer evaluates the loss several times per step (LBFGS) or updates no parameter of
                the model, or if the parameters are sharded over processes and the coupling is not ``"trust_region"``.
        """
        return Shaper(self).attach(model, optimizer)
