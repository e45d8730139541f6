"""Figures of predictions as files: both backends draw them, without warnings, links or open pyplot figures."""

import io

import numpy as np
import pytest
import xarray as xr
from PIL import Image

from tests.plots.test_reliability import ONE
from workbench.plots import save
from workbench.plots.risk_figures import reliability, risk_curve

pytestmark = pytest.mark.render

PROBABILITIES = ("too_small", "too_large", "failure", "explosion")
EDGES = ("slow_edge", "useful_edge", "explosion_edge")
RISK = xr.Dataset(
    {f"{name}{end}": ("learning_rate", [0.1, 0.5, 0.9]) for name in PROBABILITIES for end in ("", "_low", "_high")}
    | {f"{name}{end}": 0.002 for name in EDGES for end in ("", "_low", "_high")},
    {"learning_rate": [1e-3, 1e-2, 1e-1]},
    {"n_steps": 480, "d_model": 64, "reason": ""},
)
FIGURES = {
    "reliability": lambda backend: reliability(ONE, backend=backend),
    "risk_curve": lambda backend: risk_curve(RISK, learning_rate=3e-3, backend=backend),
}


@pytest.mark.parametrize("name", FIGURES)
def test_both_backends_draw_it_without_a_warning(name, tmp_path, recwarn):
    from matplotlib import pyplot as plt

    before = plt.get_fignums()
    path = save(FIGURES[name]("matplotlib"), tmp_path / "figure.png", dpi=60)
    assert plt.get_fignums() == before
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB")).astype(int)
    assert (np.ptp(pixels, axis=-1) > 60).sum() > 50
    assert min(pixels.shape[:2]) > 80
    text = save(FIGURES[name]("bokeh"), tmp_path / "figure.html").read_text()
    assert "Bokeh.embed.embed_item" in text
    assert "<script src" not in text
    assert not [str(item.message) for item in recwarn if "dateutil" not in str(item.message)]
