"""Figures as files: they are rendered, written atomically, and the state of the libraries is unchanged."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.about import says
from tests.plots import test_rate_figures as rates
from tests.plots import test_risk_figures as risks
from tests.plots.test_risk_curve import over_rates
from tests.studies.test_outcomes import grid_of
from workbench.errors import StoreError
from workbench.plots import (
    eigenvalue_map,
    explosion_edge,
    layer_profile,
    pilot_losses,
    rate_bands,
    rate_curve,
    reliability,
    risk_curve,
    save,
    step_grid,
)
from workbench.plots.comparison_figures import radar
from workbench.plots.curve_figures import traces
from workbench.plots.figure_files import picture_of

pytestmark = pytest.mark.render


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "options"), [(eigenvalue_map, {}), (layer_profile, {"measures": ["rank"]})])
def test_matplotlib_draws_colored_pixels_and_leaves_no_state(draw, options, calm, ragged, tmp_path):
    import holoviews as hv
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    before = hv.Store.current_backend, dict(mpl.rcParams), plt.get_fignums()
    path = save(
        draw({"calm": calm, "ragged": ragged}, **options, backend="matplotlib"), tmp_path / "figure.png", dpi=80
    )
    assert (hv.Store.current_backend, dict(mpl.rcParams), plt.get_fignums()) == before
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB")).astype(int)
    assert (np.ptp(pixels, axis=-1) > 60).sum() > 200


@pytest.mark.parametrize("draw", [eigenvalue_map, layer_profile])
def test_html_is_self_contained(draw, calm, tmp_path):
    text = save(draw(calm), tmp_path / "figure.html").read_text()
    assert "Bokeh.embed.embed_item" in text
    assert "<script src" not in text
    assert "<link" not in text


@pytest.mark.parametrize("name", ["<!--<script>", "</script><script>", "<!--"])
def test_a_name_in_a_figure_does_not_end_its_page(name, calm, tmp_path):
    text = save(eigenvalue_map({name: calm}), tmp_path / "figure.html").read_text()
    data = text.rpartition("Bokeh.embed.embed_item(")[2].partition(', "figure").then')[0]
    assert "<" not in data
    assert name in json.dumps(json.loads(data))


def test_a_figure_has_the_method_that_matplotlib_users_try(calm, tmp_path):
    for path in (eigenvalue_map(calm).savefig(tmp_path / "figure.png", dpi=40), tmp_path / "figure.png"):
        assert Image.open(path).width > 100
    with pytest.raises(StoreError, check=says("exists already; pass overwrite=True to replace it, or")):
        eigenvalue_map(calm, backend="matplotlib").savefig(tmp_path / "figure.png")


RUN_FIGURES = {
    "step_grid": (step_grid, "runs", {"steps": [0]}),
    "traces": (traces, "runs", {"variables": ["grad_norm", "near_unit_mass"]}),
    "radar": (radar, "comparison", {}),
    "layer_profile of runs": (layer_profile, "Pre-LN", {"step": 10, "measures": ["rank"]}),
    "eigenvalue_map of runs": (eigenvalue_map, "Pre-LN", {"step": "last"}),
    "explosion_edge": (explosion_edge, "outcomes", {}),
}

OUTCOME, RISK = rates.outcome(), over_rates()
FIGURES = {
    "rate_curve": (rate_curve, {"one": OUTCOME, "two": OUTCOME}, {}),
    "pilot_losses": (pilot_losses, rates.pilot(), {}),
    "rate_bands": (rate_bands, rates.outcomes(), {"by": "study"}),
    "risk_curve": (risk_curve, RISK, {"learning_rate": 3e-3}),
    "risk_curve of designs": (risk_curve, {"one": RISK, "two": RISK}, {}),
    "reliability": (reliability, risks.ONE, {}),
}
#: Figures that another entry draws from other data.
REPEATED = ("radar", "step_grid", "layer_profile of runs", "eigenvalue_map of runs")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in (*RUN_FIGURES, *FIGURES)]
)
def drawn_by(request, runs, comparison):
    """A figure as a function of the backend."""
    if request.param in FIGURES:
        draw, data, options = FIGURES[request.param]
        return lambda backend: draw(data, **options, backend=backend)
    draw, given, options = RUN_FIGURES[request.param]
    pair = {name: runs[name] for name in ("Pre-LN", "none")}
    outcomes = grid_of({"none": (0.0, 1.0), "clip 1.0": (1.0, 1.0)})
    data = {
        "runs": pair,
        "comparison": comparison.isel(architecture=[0, 1]),
        "Pre-LN": runs["Pre-LN"],
        "outcomes": outcomes,
    }[given]
    return lambda backend: draw(data, **options, backend=backend)


def test_both_backends_draw_every_figure_without_a_warning(drawn_by, tmp_path, recwarn):
    from matplotlib import pyplot as plt

    before = plt.get_fignums()
    path = save(drawn_by("matplotlib"), tmp_path / "figure.png", dpi=60)
    assert plt.get_fignums() == before
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB")).astype(int)
    assert (np.ptp(pixels, axis=-1) > 60).sum() > 100
    text = save(drawn_by("bokeh"), tmp_path / "figure.html").read_text()
    assert "Bokeh.embed.embed_item" in text
    assert "<script src" not in text
    assert not [str(item.message) for item in recwarn if "dateutil" not in str(item.message)]


def test_svg_is_written(calm, tmp_path):
    assert "<svg" in save(eigenvalue_map(calm, backend="matplotlib"), tmp_path / "figure.svg").read_text()


def test_an_existing_file_is_kept_unless_overwriting_is_requested(calm, tmp_path):
    path = tmp_path / "figure.svg"
    path.write_text("precious")
    figure = layer_profile(calm, measures=["rank"], backend="matplotlib")
    with pytest.raises(StoreError, match="overwrite=True"):
        save(figure, path)
    with pytest.raises(StoreError, match="not written by the workbench"):
        save(figure, path, overwrite=True)
    assert path.read_text() == "precious"
    path.unlink()
    save(figure, path)
    assert "<svg" in save(figure, path, overwrite=True).read_text()
    assert [item.name for item in tmp_path.iterdir()] == ["figure.svg"]


def test_a_figure_of_either_backend_is_redrawn_for_the_file(calm, tmp_path):
    for backend in ("bokeh", "matplotlib"):
        figure = layer_profile(calm, measures=["rank"], backend=backend)
        assert save(figure, tmp_path / f"{backend}.png").read_bytes().startswith(b"\x89PNG")
        assert "embed_item" in save(figure, tmp_path / f"{backend}.html").read_text()


def test_a_picture_is_small_and_as_wide_as_a_page(calm, wild):
    image = Image.open(io.BytesIO(picture_of(eigenvalue_map({"calm": calm, "wild": wild}))))
    assert image.mode == "P"
    assert 600 < image.width < 1600
    assert len(picture_of(eigenvalue_map(calm))) < 100_000


def test_suffix_and_folder_are_checked_first(calm, tmp_path):
    figure = eigenvalue_map(calm)
    composed = figure.clone()  # which has lost how it was drawn
    with pytest.raises(StoreError, check=says("A .png file needs a figure for matplotlib, this one is")):
        save(composed, tmp_path / "figure.png")
    with pytest.raises(StoreError, check=says("expected one of .png, .svg, .pdf, .html.")):
        save(figure, tmp_path / "figure.gif")
    with pytest.raises(StoreError, check=says("does not exist; create it first.")):
        save(figure, tmp_path / "nowhere" / "figure.html")
    assert not list(tmp_path.iterdir())
