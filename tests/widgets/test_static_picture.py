"""The outputs of a widget: its live view, and a picture that is redrawn when the widget no longer changes."""

import base64
import io

import numpy as np
import pytest
from IPython.testing.globalipapp import start_ipython
from PIL import Image

from workbench import plots
from workbench.widgets import ArchitectureComparison, SpectrumExplorer, show
from workbench.widgets.static_picture import WIDGET, StaticPicture

pytestmark = pytest.mark.render


class Outputs:
    """What a cell displays, by display id."""

    def __init__(self):
        self.shown, self.updated = [], {}

    def display(self, bundle, *, raw, display_id=None):
        assert raw
        self.shown.append(bundle)
        return type("Handle", (), {"display_id": f"id {len(self.shown)}"})()

    def update(self, bundle, *, display_id, raw):
        self.updated.setdefault(display_id, []).append(bundle)


@pytest.fixture
def outputs(monkeypatch):
    outputs = Outputs()
    monkeypatch.setattr("IPython.display.display", outputs.display)
    monkeypatch.setattr("IPython.display.update_display", outputs.update)
    return outputs


def image_of(bundle):
    return Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).convert("RGB")


@pytest.mark.slow
def test_a_figure_and_a_widget_show_a_live_view_and_then_a_png(outputs, spectra):
    explorer = SpectrumExplorer(spectra)
    for shown in (show(plots.layer_profile(spectra, measures=["rank"])), explorer):
        outputs.shown.clear()
        shown._ipython_display_()
        style, live, picture = outputs.shown
        assert list(style) == ["text/html", "text/plain"]
        assert live[WIDGET]["model_id"] == shown.model_id
        image = image_of(picture)
        assert image.width > 300
        assert len(picture["image/png"]) < 150_000
        assert (np.asarray(image) < 128).any()  # lines and text
        shown.close()
    assert picture["text/plain"] == "Eigenvalues of calm and wild, layers 0 to 5, all modes."


@pytest.mark.slow
def test_the_picture_follows_the_widget_at_rest(outputs, spectra):
    explorer = SpectrumExplorer(spectra)
    explorer._ipython_display_()
    first = outputs.shown[-1]["image/png"]
    explorer._picture.refresh()
    assert outputs.updated == {}  # nothing has changed
    explorer.zoom.value = "near 1"
    explorer._picture.refresh()
    ((display_id, (bundle,)),) = outputs.updated.items()
    assert display_id == "id 3"
    assert bundle["image/png"] != first
    assert bundle["text/plain"].endswith("near 1.")
    explorer.zoom.value = "all modes"
    explorer.close()
    explorer._picture.refresh()
    assert len(outputs.updated[display_id]) == 1  # it stays unchanged


def test_pictures_are_drawn_at_the_end_of_a_cell(outputs, spectra, monkeypatch):
    shell = start_ipython() or __import__("IPython").get_ipython()
    before = list(shell.events.callbacks["post_run_cell"])
    explorer = SpectrumExplorer(spectra["calm"])
    explorer._ipython_display_()
    explorer.layers.value = (1, 2)
    shell.events.trigger("post_run_cell", None)
    assert [len(bundles) for bundles in outputs.updated.values()] == [1]
    explorer.close()
    assert shell.events.callbacks["post_run_cell"] == before


def test_a_picture_that_cannot_be_drawn_does_not_hide_the_live_view(outputs, caplog):
    def fail():
        raise ValueError("no ink")

    picture = StaticPicture(fail, lambda: "words")
    picture.display("a model")
    assert [next(iter(bundle)) for bundle in outputs.shown] == ["text/html", WIDGET, "text/plain"]
    assert "no ink" in caplog.text
    picture.close()


def test_a_widget_that_is_not_displayed_draws_nothing(spectra, monkeypatch):
    comparison = ArchitectureComparison({"calm": spectra["calm"]}, view="eigenvalues")
    monkeypatch.setattr(comparison, "picture", lambda: pytest.fail("drawn"))
    comparison._settle()
    comparison._picture.refresh()
    assert comparison._picture._timer is None
    comparison.close()
