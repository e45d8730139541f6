"""The primitives: how both backends draw the same description, with its texts and ticks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plots.panels import bokeh_panels, ends, legend, matplotlib_axes, note, places
from workbench.plots import style
from workbench.plots.primitives import Primitives, decades, flowed, stretches

pytestmark = pytest.mark.render


def drawn(backend, *, ticks=(None, None), **options):
    """Return a figure of two panels, the first with every primitive."""
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "x", "y")
        draw.line([1, 2, 3], [1, np.nan, 3], color="#112233", dash="dashed", label="line")
        draw.band([1, 2, 3, 4], [0, 0, np.nan, 1], [1, 2, 3, 2], color="#445566")
        draw.bars([1, 2], [0, 0], [1, np.nan], [1, 1], color="#778899")
        draw.boxes([1, 2], 0, [2, 3], [1, 2], colors=["#ff0000", "#00ff00"], columns={"name": ["a", "b"]})
        draw.dots([1, 2], [3, 4], color="#aabbcc", marker="square", is_hollow=True, label="dots")
        draw.words(2.5, 1.5, "here", is_bold=True)
        other = Primitives(hv, backend, "x", "z")
        other.line([1, 2], [5, 6], color="#112233")
        look = {"view": ((1, 4), (0, 5)), "size": (300, 200), "names": ("across", "up"), "title": "Title"}
        panels = [
            draw.panel(**look, ticks=ticks, note=["one", "two"], legend=True, at=(0, 120), **options),
            other.panel(**look | {"size": (300, 90), "view": ((1, 4), (5, 6))}),
        ]
        return style.laid_out(hv, panels, backend)


def test_elements_are_at_their_positions():
    panel = next(iter(drawn("bokeh")))
    line, area, second, segments, boxes, dots, word = panel
    np.testing.assert_array_equal(places(line), [[1, 1], [2, np.nan], [3, 3]])
    assert [piece.dimension_values(0).tolist() for piece in (area, second)] == [[1, 2], [4]]
    assert ends(segments).tolist() == [[1, 0, 1, 1]]
    assert ends(boxes).tolist() == [[1, 0, 2, 1], [2, 0, 3, 2]]
    assert boxes["fill"].tolist() == ["#ff0000", "#00ff00"]
    assert places(dots).tolist() == [[1, 3], [2, 4]]
    assert word["text"].tolist() == ["here"]


def test_bokeh_draws_the_requested_styles():
    first, second = bokeh_panels(drawn("bokeh", bare=(True, False), bounds=(1, 2), grid=False))
    assert (first.frame_width, first.frame_height, second.frame_height) == (300, 200, 90)
    assert (first.title.text, note(first)) == ("Title", "one   two")
    assert legend(first) == {"line": {"#112233"}, "dots": {"#aabbcc"}}
    assert first.xaxis[0].axis_label is None
    assert first.yaxis[0].axis_label == "up"
    assert tuple(first.xaxis[0].bounds) == (1, 2)
    assert not any(rules.visible for rules in first.grid)
    assert all(rules.visible for rules in second.grid)
    glyphs = {type(part.glyph).__name__: part.glyph for part in first.renderers}
    assert glyphs["Scatter"].fill_alpha == 0
    assert glyphs["Scatter"].marker == "square"
    assert glyphs["Line"].line_dash == [6]
    assert first.x_range is second.x_range  # linked


def test_matplotlib_places_frames_at_their_positions():
    first, second = matplotlib_axes(drawn("matplotlib"))
    inches = [axis.get_position().bounds * np.tile(axis.figure.get_size_inches(), 2) for axis in (first, second)]
    np.testing.assert_allclose(inches, [[0, 1.2, 3, 2], [0, 0, 3, 0.9]], atol=1e-6)
    assert first.get_title(loc="left") == "Title"
    assert "one   two" in [text.get_text() for text in first.texts]
    (handle, dots) = first.get_legend().legend_handles
    assert (handle.get_label(), handle.get_color(), handle.get_linestyle()) == ("line", "#112233", "--")
    assert (dots.get_label(), dots.get_markerfacecolor(), dots.get_marker()) == ("dots", "none", "s")
    assert [text.get_fontweight() for text in first.texts if text.get_text() == "here"] == ["bold"]


@pytest.mark.parametrize("backend", style.BACKENDS)
def test_ticks_have_the_requested_texts(backend):
    figure = drawn(backend, ticks=([1.0, 3.0], [(2.0, "two")]), formats=("percent", "plain"))
    if backend == "bokeh":
        first = bokeh_panels(figure)[0]
        shown = [axis.major_label_overrides for axis in (first.xaxis[0], first.yaxis[0])]
        assert shown == [{1.0: "100 %", 3.0: "300 %"}, {2.0: "two"}]
    else:
        first = matplotlib_axes(figure)[0]
        shown = [[text.get_text() for text in axis.get_ticklabels()] for axis in (first.xaxis, first.yaxis)]
        assert shown == [["100 %", "300 %"], ["two"]]


@given(st.lists(st.booleans(), max_size=12))
def test_stretches_cover_exactly_the_true_values(is_in):
    covered = np.zeros(len(is_in), bool)
    pieces = stretches(np.array(is_in, bool))
    for piece in pieces:
        assert not covered[piece].any()
        covered[piece] = True
    assert covered.tolist() == is_in
    assert all(one.stop < other.start for one, other in pairwise(pieces))


@given(st.lists(st.text("ab ", max_size=30), max_size=8), st.integers(5, 60))
def test_notes_keep_all_phrases_and_the_width(phrases, width):
    text = flowed(phrases, n_characters=width)
    kept = [phrase for phrase in phrases if phrase]
    assert text.replace("\n", "   ") == "   ".join(kept)
    assert all(len(line) <= max([width, *map(len, kept)]) for line in text.split("\n"))


@given(st.floats(1e-9, 1e6), st.floats(1.5, 1e9))
def test_decades_are_in_view_and_few(low, ratio):
    ticks = decades(low, low * ratio)
    assert len(ticks) <= 7
    assert all(low * (1 - 1e-6) <= at <= low * ratio * (1 + 1e-6) for at in ticks)
    assert ticks == sorted(set(ticks))
    if 10 <= ratio <= 1e6:
        assert len(ticks) >= 2


def test_decades_are_round_numbers():
    assert decades(1e-4, 1e-2) == [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2]
    assert decades(9e-5, 0.11) == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1]
    assert decades(1e-6, 1.0) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
