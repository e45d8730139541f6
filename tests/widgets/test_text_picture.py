"""Text as a picture: wrapped, complete, and as wide as a page."""

import io

import numpy as np
import pytest
from PIL import Image

from workbench.widgets.text_picture import text_picture

pytestmark = pytest.mark.render

WORDS = "a block stretches some direction unlike any healthy one "


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_it_grows_with_its_text_and_has_a_palette():
    short, long = text_picture("At risk"), text_picture("At risk", [WORDS * 20])
    assert pixels(short).shape[1] == pixels(long).shape[1] == 1000
    assert pixels(long).shape[0] > pixels(short).shape[0] + 100
    assert Image.open(io.BytesIO(long)).mode == "P"
    assert len(long) < 60_000


@pytest.mark.parametrize(
    "table",
    [
        None,
        [["criterion", "value"], [WORDS * 10, "0.31"]],
        [["criterion"] * 6, [WORDS * 3] * 6],
        [["path", "value"], ["x" * 900, "1"]],
    ],
)
def test_no_text_reaches_the_margins(table):
    found = pixels(text_picture(WORDS * 3 + "x" * 400, [WORDS * 9], table))
    ink = found.sum(-1) < 450  # darker than the rules of tables
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    assert columns[0] >= 14
    assert columns[-1] <= 985
    assert rows[0] >= 10
    assert rows[-1] <= len(found) - 6


def test_lines_do_not_overlap():
    found = pixels(text_picture("x" * 300))
    is_blank = (found.sum(-1) > 700).all(1)
    n_lines = np.count_nonzero(np.diff(is_blank.astype(int)) == -1)
    assert n_lines >= 3


def test_no_cell_reaches_into_the_next():
    found = pixels(text_picture("t", table=[["", ""], ["m" * 400, "m" * 400]]))
    is_blank = (found.sum(-1) > 450).all(0)[16:984]  # except for the rules
    inside = is_blank[400:568]
    assert inside.sum() >= 20  # the gap between the columns


def test_mathematics_and_line_ends_are_text():
    assert pixels(text_picture("loss $x", ["{a}_b $\\alpha$"], [["$"], ["^"]])).shape[1] == 1000


def test_an_image_stands_below_and_is_no_wider():
    wide = io.BytesIO()
    Image.new("RGB", (2000, 600), "#d55e00").save(wide, "png")
    alone, both = pixels(text_picture("t")), pixels(text_picture("t", image=wide.getvalue()))
    assert both.shape == (alone.shape[0] + 300, 1000, 3)
    assert np.abs(both[-10, 500] - [213, 94, 0]).max() < 8
