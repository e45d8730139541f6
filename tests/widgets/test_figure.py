"""Figures without a browser: messages of the page, and widgets that stay until the next one has been drawn."""

import gzip
import itertools
import json

import ipywidgets
import numpy as np
import pytest
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure as bokeh_figure

from workbench import plots
from workbench.widgets import show
from workbench.widgets.figure import Figure, Stage

pytestmark = pytest.mark.render


@pytest.fixture
def figure(spectra):
    figure = show(plots.eigenvalue_map(spectra))
    figure.sent = []
    figure.send = lambda content, buffers=None: figure.sent.append((content, buffers))
    return figure


def sources(figure):
    found = figure.root.select({"type": ColumnDataSource})
    return [source for source in found if "residual" in source.data]


def test_the_page_gets_the_library_and_the_document_from_the_kernel(figure):
    figure._receive(figure, {"question": "library", "id": "a"}, [])
    figure._receive(figure, {"question": "document", "id": "b"}, [])
    (library, buffers), (document, _) = figure.sent
    assert library == {"answer": "a"}
    assert b"Bokeh" in gzip.decompress(buffers[0])
    assert json.loads(document["document"])["roots"]


def test_nothing_of_the_figure_is_in_the_saved_state(figure):
    assert len(json.dumps(figure.get_state(), default=str)) < 10_000


def test_changes_in_a_batch_are_one_message(figure):
    first, second = sources(figure)
    with figure.batch():
        first.data = {**first.data, "real": np.zeros(len(first.data["real"]), np.float32)}
        second.selected.indices = [1]
    assert len(figure.sent) == 1
    assert len(json.loads(figure.sent[0][0]["patch"])["events"]) == 2
    assert len(figure.sent[0][1]) > 0


def test_a_selection_on_the_page_arrives_and_is_not_sent_back(figure):
    selected = sources(figure)[0].selected
    change = {"kind": "ModelChanged", "model": {"id": selected.id}, "attr": "indices", "new": [2, 3]}
    figure._receive(figure, {"changes": [change]}, [])
    assert selected.indices == [2, 3]
    assert figure.sent == []


@pytest.mark.slow
def test_show_takes_both_backends(spectra):
    assert isinstance(show(plots.layer_profile(spectra)), Figure)
    image = show(plots.layer_profile(spectra, measures=["rank"], backend="matplotlib"))
    assert image.data.startswith(b"\x89PNG")


def test_a_closed_figure_follows_nothing(figure):
    figure.close()
    sources(figure)[0].selected.indices = [1]
    assert figure.sent == []
    figure.close()


def canvas():
    return Figure(bokeh_figure())


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
