"""Communication of figures with the page, without a browser: library, document, and changes in both directions."""

import gzip
import json

import numpy as np
import pytest
from bokeh.models import ColumnDataSource

from workbench import plots
from workbench.widgets import show
from workbench.widgets.figure import Figure

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
