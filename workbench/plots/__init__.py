"""Figures: spectra in, holoviews objects out, for bokeh or matplotlib; nothing is styled or loaded at import."""

from workbench.plots.criteria_bands import criteria_bands
from workbench.plots.decision_chart import decision_chart
from workbench.plots.diagnosis import cause_bars, evidence_bars, evidence_timeline
from workbench.plots.doses import dose_response
from workbench.plots.drivers import drivers
from workbench.plots.edges import stability_edge
from workbench.plots.eigenvalues import eigenvalue_map
from workbench.plots.files import save
from workbench.plots.flow_map import flow_map
from workbench.plots.layers import layer_profile
from workbench.plots.predictors import predictor_frame, predictor_table
from workbench.plots.radar import radar
from workbench.plots.reliability import reliability
from workbench.plots.risk_curve import risk_curve
from workbench.plots.risk_map import risk_map
from workbench.plots.roc import roc
from workbench.plots.scaling_trend import scaling_trend
from workbench.plots.steps import step_grid
from workbench.plots.tables import comparison_table
from workbench.plots.timeline import timeline
from workbench.plots.traces import traces

__all__ = [
    "cause_bars",
    "comparison_table",
    "criteria_bands",
    "decision_chart",
    "dose_response",
    "drivers",
    "eigenvalue_map",
    "evidence_bars",
    "evidence_timeline",
    "flow_map",
    "layer_profile",
    "predictor_frame",
    "predictor_table",
    "radar",
    "reliability",
    "risk_curve",
    "risk_map",
    "roc",
    "save",
    "scaling_trend",
    "stability_edge",
    "step_grid",
    "timeline",
    "traces",
]
