"""Content of a figure, read from its holoviews elements and from the objects of bokeh and matplotlib."""

import numpy as np

from workbench.plots import style
from workbench.plots.figure_files import bokeh_plot


def elements(panel, kind):
    """Return the elements of one kind, such as "Curve", in drawing order."""
    return panel.traverse(lambda part: part, [kind])


def places(element):
    """Return the first two columns of an element, shape (point, 2)."""
    return np.stack([element.dimension_values(0), element.dimension_values(1)], axis=-1)


def ends(element):
    """Return the four columns of segments or rectangles, shape (item, 4)."""
    return np.stack([element.dimension_values(i) for i in range(4)], axis=-1)


def words(panel):
    """Return the texts in the frame: text -> position."""
    return {str(part["text"][0]): tuple(places(part)[0].tolist()) for part in elements(panel, "Labels")}


def bokeh_panels(figure):
    """Return the bokeh figures of all panels."""
    found = bokeh_plot(figure).traverse(lambda part: part, [lambda part: type(part).__name__ == "OverlayPlot"])
    return [part.state for part in found]


def note(panel):
    """Return the small lines above a bokeh figure."""
    found = panel.select_one({"name": "note_above"})
    return found.text if found is not None else ""


def legend(panel):
    """Return the legend: label -> colors of its glyphs."""
    items = [item for legend in panel.legend for item in legend.items]
    return {item.label.value: {_color(renderer.glyph) for renderer in item.renderers} for item in items}


def matplotlib_axes(figure):
    """Return the matplotlib axes of all panels, drawn once so that they have their positions."""
    with style.drawing("matplotlib") as hv:
        drawn = hv.renderer("matplotlib").instance().get_plot(figure).state
    drawn.canvas.draw()
    return drawn.axes


def _color(glyph):
    return glyph.line_color
