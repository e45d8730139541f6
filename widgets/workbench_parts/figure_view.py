"""A figure of `workbench.plots` as a view that has pictures and pages like the other widgets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from workbench.plots.figure_files import for_backend, save
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.stage import FigureStage


class FigureView(WorkbenchWidget):
    """A figure, as `workbench.widgets.show` displays it.

    Args:
        figure: The figure.
        theme: Theme of the widgets.
    """

    def __init__(self, figure: Any, *, theme: str = "page") -> None:
        super().__init__(theme=theme)
        self._figure = figure
        stage = FigureStage(theme)
        stage.draw(figure)
        self._fill([stage])

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the figure."""
        return for_backend(self._figure, backend)

    def page(self) -> str:
        """Return the figure as a page that needs no kernel."""
        with tempfile.TemporaryDirectory() as folder:
            return save(self.figure(), Path(folder) / "page.html").read_text(encoding="utf-8")
