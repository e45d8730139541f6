"""Interactive widgets for JupyterLab. The public names are loaded on first use."""

from workbench.errors import require_lab
from workbench.lazy_names import attach_stub

require_lab("The widgets", "ipywidgets", "anywidget", "holoviews", "bokeh", "matplotlib")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
