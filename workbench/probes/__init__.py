"""Probes: measurements that answer one question about a training run, each with a known cost and error bound.

Example:
    >>> import torch
    >>> import workbench as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> with wb.probes.GradientProjections(model.parameters()) as projections:
    ...     model(torch.ones(4, 3)).square().sum().backward()
    ...     step = projections.take()
    >>> wb.probes.compare_gradients(step).verdict.value
    'as computed'

See Also:
    `workbench.probes.first_bad_tensor`: Finds the first value of a pass that is not finite.
    `workbench.probes.precision_errors`: Checks the arithmetic of a run.
    `workbench.Recorder`: Runs the probes during training.
"""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
