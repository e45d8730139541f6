"""Information flow: how signal and gradient grow or fade along depth, what attention and routing do, and why."""

from workbench.flow.measure import measure
from workbench.flow.runs import along_run
from workbench.flow.summary import summarize
from workbench.flow.variables import FLOW

__all__ = ["FLOW", "along_run", "measure", "summarize"]
