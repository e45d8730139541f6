"""Figures: spectra in, holoviews objects out, for bokeh or matplotlib; nothing is styled or loaded at import."""

from workbench.plots.doses import dose_response
from workbench.plots.edges import stability_edge
from workbench.plots.eigenvalues import eigenvalue_map
from workbench.plots.files import save
from workbench.plots.layers import layer_profile
from workbench.plots.radar import radar
from workbench.plots.steps import step_grid
from workbench.plots.tables import comparison_table
from workbench.plots.timeline import timeline
from workbench.plots.traces import traces

__all__ = [
    "comparison_table",
    "dose_response",
    "eigenvalue_map",
    "layer_profile",
    "radar",
    "save",
    "stability_edge",
    "step_grid",
    "timeline",
    "traces",
]
