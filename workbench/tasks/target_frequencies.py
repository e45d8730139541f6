"""Loss of a predictor that knows only the frequencies of the targets."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from workbench.tasks.task import Task

#: Number of batches in which targets are counted.
_N_COUNTED = 100


def frequency_loss(task: Task, targets: Tensor) -> float:
    """Compute the mean cross entropy, in nats, of the predictor that knows only the frequencies of the classes.

    Args:
        task: Task whose first 100 batches are counted. One is added to each count, so that no probability is 0.
        targets: Classes to predict, of any shape; negative ones are ignored.
    """
    known = torch.cat([seen.flatten() for _, seen in islice(task.stream(0), _N_COUNTED)])
    known, targets = known[known >= 0], targets[targets >= 0]
    n_classes = int(max(known.max(), targets.max())) + 1
    counts = known.bincount(minlength=n_classes) + 1.0
    return float(-(counts / counts.sum()).log()[targets].mean())
