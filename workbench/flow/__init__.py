"""Information flow: growth and decay of signal and gradient along depth, attention, routing, and singular values.

Example:
    >>> import workbench as wb
    >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
    >>> flow = wb.flow.measure(model, wb.tasks.associative_recall(length=16), jacobian=False)
    >>> flow["signal_gain"].shape
    (2,)

See Also:
    `workbench.koopman`: Spectra of the residual stream.
    `workbench.plots.flow_map`: Draws a flow.
"""

from workbench.flow.flow_measurement import measure
from workbench.flow.flow_summary import summarize
from workbench.option_checks import publish
from workbench.schema.runs import FLOW

__all__ = ["FLOW", "measure", "summarize"]

__dir__ = publish(__name__)
