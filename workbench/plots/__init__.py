"""Figures: spectra in, holoviews objects out, for bokeh or matplotlib; nothing is styled or loaded at import."""

from workbench.plots.eigenvalues import eigenvalue_map
from workbench.plots.files import save
from workbench.plots.layers import layer_profile

__all__ = ["eigenvalue_map", "layer_profile", "save"]
