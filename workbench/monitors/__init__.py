"""Monitors: quantities that warn early of instability; most are pure functions of tensors.

Example:
    >>> import torch
    >>> import workbench as wb
    >>> s = wb.monitors.singular_values(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    >>> round(wb.monitors.effective_rank(s).item(), 3)
    2.0

See Also:
    `workbench.Recorder`: Records the monitors along a training run.
    `workbench.Alarms`: Raises alarms from them.
"""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
