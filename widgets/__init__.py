"""The face of the workbench: widgets for JupyterLab. The public names load when first used."""

import lazy_loader

from workbench.errors import require_lab

require_lab("The widgets", "ipywidgets", "anywidget", "holoviews", "bokeh", "matplotlib")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
