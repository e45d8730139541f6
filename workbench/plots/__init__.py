"""Figures as holoviews objects, drawn with bokeh or matplotlib.

Every function takes a dataset or runs and returns a figure. Importing the module loads no drawing package.

Example:
    >>> import workbench as wb
    >>> bins = wb.risk.reliability([0.9, 0.8, 0.2, 0.1], [True, True, False, False])
    >>> figure = wb.plots.reliability(bins, backend="matplotlib")
    >>> wb.plots.save(figure, "reliability.png").name
    'reliability.png'

See Also:
    `workbench.report`: Combines figures, tables and text in one document.
    `workbench.widgets.show`: Shows a figure in a notebook.
"""

from workbench.option_checks import publish
from workbench.plots.comparison_figures import comparison_table, radar
from workbench.plots.curve_figures import layer_profile, traces
from workbench.plots.eigenvalue_figures import eigenvalue_map, step_grid
from workbench.plots.figure_files import save
from workbench.plots.finding_figures import cause_bars, criteria_bands, evidence_bars, evidence_timeline
from workbench.plots.flow_map_figure import flow_map
from workbench.plots.rate_figures import pilot_losses, rate_bands, rate_curve
from workbench.plots.risk_figures import explosion_edge, reliability, risk_curve
from workbench.plots.timeline_figure import timeline
from workbench.plots.weight_spectra_figure import weight_spectra

__all__ = [
    "cause_bars", "comparison_table", "criteria_bands", "eigenvalue_map", "evidence_bars", "evidence_timeline",
    "explosion_edge", "flow_map", "layer_profile", "pilot_losses", "radar", "rate_bands", "rate_curve", "reliability",
    "risk_curve", "save", "step_grid", "timeline", "traces", "weight_spectra",
]  # fmt: skip

__dir__ = publish(__name__)
