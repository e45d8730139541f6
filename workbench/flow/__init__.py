"""Information flow: growth and decay of signal and gradient along depth, attention, routing, and singular values."""

from workbench.flow.checkpoint_flows import along_run
from workbench.flow.flow_measurement import measure
from workbench.flow.flow_summary import summarize
from workbench.schema.flows import FLOW

__all__ = ["FLOW", "along_run", "measure", "summarize"]


def __dir__() -> list[str]:
    return sorted(__all__)
