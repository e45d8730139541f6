"""A displayed widget stays until the next one has been drawn; without a page, changes are immediate."""

import itertools

import ipywidgets
import pytest
from bokeh.plotting import figure

from workbench.widgets.figure import Figure
from workbench.widgets.stage import Stage

pytestmark = pytest.mark.render


def canvas():
    return Figure(figure())


def draw(one):
    """The message of the page after it has drawn a figure."""
    one._receive(one, {"drawn": True}, [])


def visible(stage):
    return [slot.children[0] for slot in stage.children if slot.children and slot.layout.visibility != "hidden"]


def test_without_a_page_the_next_one_is_there_at_once():
    stage, first, second = Stage(), canvas(), canvas()
    stage.put(first, first)
    stage.put(second, second, replaces=first)
    assert visible(stage) == [second]
    assert first.comm is None


def test_the_old_one_stays_until_the_new_one_is_drawn():
    stage, first, second = Stage(), canvas(), canvas()
    stage.put(first, first)
    draw(first)
    stage.put(second, second, replaces=first)
    assert (visible(stage), stage.shown) == ([first], second)
    assert "workbench-busy" in stage._dom_classes
    draw(second)
    assert visible(stage) == [second]
    assert first.comm is None
    assert "workbench-busy" not in stage._dom_classes


def test_of_several_in_a_row_the_last_one_is_shown_and_no_slot_moves():
    stage, canvases = Stage(), [canvas() for _ in range(4)]
    stage.put(canvases[0], canvases[0])
    draw(canvases[0])
    for old, new in itertools.pairwise(canvases):
        stage.put(new, new, replaces=old)
    slots = stage.children
    for one in canvases[1:]:
        draw(one)
    assert visible(stage) == [canvases[3]]
    assert [one.comm is None for one in canvases] == [True, True, True, False]
    assert stage.children == slots
    last = canvas()
    stage.put(last, last, replaces=canvases[3])
    assert stage.children == slots  # a free slot is reused


def test_what_was_here_before_comes_back_at_once_and_text_needs_no_drawing():
    stage, first, text = Stage(), canvas(), ipywidgets.HTML("a table")
    stage.put(first, first)
    draw(first)
    stage.put(text)
    assert visible(stage) == [text]
    stage.put(first, first)
    assert visible(stage) == [first]
    assert first.comm is not None
