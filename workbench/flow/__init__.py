"""Information flow: how signal and gradient grow or fade along depth, what attention and routing do, and why."""

from workbench.flow.checkpoint_flows import along_run
from workbench.flow.flow_measurement import measure
from workbench.flow.flow_summary import summarize
from workbench.schema.flows import FLOW

__all__ = ["FLOW", "along_run", "measure", "summarize"]


def __dir__() -> list[str]:
    return sorted(__all__)
