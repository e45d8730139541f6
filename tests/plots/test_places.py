"""A model keeps its color, marker and dash in figures that omit other models."""

import pytest

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError
from workbench.plots import layer_profile, style
from workbench.plots.comparison_figures import radar
from workbench.plots.curve_figures import traces
from workbench.plots.figure_files import bokeh_plot

pytestmark = pytest.mark.render

PLACES = {"Pre-LN": 0, "none": 1, "bare": 2}


def profiles(runs, **options):
    return layer_profile(runs, step="last", measures=["spectral_radius", "rank"], **options)


def losses(runs, **options):
    return traces(runs, variables=["loss", "near_unit_mass"], **options)


def bokeh_looks(figure):
    """Return label -> color, dash and marker of the glyphs of its legend entries."""
    looks = {}
    for panel in bokeh_plot(figure).traverse(lambda part: part, [lambda part: type(part).__name__ == "OverlayPlot"]):
        for item in (item for legend in panel.state.legend for item in legend.items):
            glyphs = [renderer.glyph for renderer in item.renderers]
            looks.setdefault(item.label.value, []).extend(
                (glyph.line_color, tuple(glyph.line_dash), getattr(glyph, "marker", "")) for glyph in glyphs
            )
    return looks


def matplotlib_looks(figure):
    """Return label -> style of its lines, markers and legend entries."""
    with style.drawing("matplotlib") as hv:
        drawn = hv.renderer("matplotlib").instance().get_plot(figure).state
    looks = {}
    for axis in drawn.axes:
        keys = axis.get_legend().legend_handles if axis.get_legend() else []
        for line in [*axis.lines, *keys]:
            look = (line.get_color(), line.get_linestyle(), line.get_marker())
            looks.setdefault(line.get_label(), []).append(look)
        for dots in axis.collections:
            shape = len(dots.get_paths()[0].vertices)
            looks.setdefault(dots.get_label(), []).append((dots.get_edgecolor().tolist(), shape))
    return {label: found for label, found in looks.items() if not label.startswith("_")}


LOOKS = {"bokeh": bokeh_looks, "matplotlib": matplotlib_looks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "backend"),
    [
        (profiles, "bokeh"),
        (losses, "matplotlib"),
        pytest.param(profiles, "matplotlib", marks=pytest.mark.slow),
        pytest.param(losses, "bokeh", marks=pytest.mark.slow),
    ],
)
def test_styles_are_unchanged_if_models_are_omitted(runs, draw, backend):
    full = LOOKS[backend](draw(runs, backend=backend))
    some = {name: runs[name] for name in ("none", "bare")}
    part = LOOKS[backend](draw(some, places=PLACES, backend=backend))
    assert len(part) == 2
    assert part == {label: full[label] for label in part}
    # Without places, styles are numbered from the first model drawn.
    assert LOOKS[backend](draw(some, backend=backend)) != part


def test_a_single_model_is_identified_by_its_subject(runs):
    looks = bokeh_looks(profiles(runs["Pre-LN"], places={"calm": 3}))
    assert [look[0] for look in looks["calm, step 20"]] == [style.MODEL_COLORS[3]] * 2


def test_invalid_places_are_rejected(runs):
    assert style.model_places(["a", "b"]) == [0, 1]
    assert style.model_places(["b"], {"a": 0, "b": 7}) == [7]
    with pytest.raises(OptionError, check=says("only for Pre-LN, none; add one.")):
        losses(runs, places={"Pre-LN": 0, "none": 1})
    for place in (-1, 1.5, True, None):
        with pytest.raises(OptionError, check=about("places", place)):
            radar(wb.compare(runs), places=PLACES | {"bare": place})
