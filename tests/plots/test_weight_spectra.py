"""The figure of weight spectra without rendering: lines, density, tail, edge, spikes, and undefined values."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places, words
from workbench.errors import OptionError, SchemaError
from workbench.plots import weight_spectra
from workbench.plots.style import MODEL_COLORS
from workbench.plots.weight_spectra_figure import density_of, depth_columns

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def spectra():
    """Two layers with three spikes in one matrix, an embedding, a matrix without a role and one that is zero."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return nn.Parameter(torch.randn(shape, generator=generator))

    model = nn.Module()
    model.embed_tokens = nn.Module()
    model.embed_tokens.weight = made(100, 60)
    model.layers = nn.ModuleList([nn.Module() for _ in range(2)])
    for layer in model.layers:
        layer.mlp, layer.special = nn.Module(), made(60, 60)
        layer.mlp.up_proj, layer.mlp.down_proj = made(90, 60), made(60, 90)
    with torch.no_grad():
        model.layers[1].mlp.up_proj[:3] *= 6
        model.layers[1].special.zero_()
    return wb.weights.weight_spectra(model, progress=False)


def test_a_line_for_each_role_and_a_dot_for_each_matrix(spectra):
    above, _ = weight_spectra(spectra)
    lines = elements(above, "Curve")
    assert [line.label for line in lines] == ["other", "MLP up", "MLP down"]
    up = spectra.isel(matrix=spectra["role"].values == "MLP up")
    np.testing.assert_allclose(places(lines[1]), np.stack([[0, 1], up["alpha"].values], -1))
    assert [len(places(dots)) for dots in elements(above, "Points")] == [1, 2, 2]
    assert legend(bokeh_panels(weight_spectra(spectra))[0])["MLP up"] == {MODEL_COLORS[1]}


def test_experts_are_dots_around_their_mean(spectra):
    one = spectra.isel(matrix=spectra["layer"].values == 0)
    experts = one.assign_coords(role=("matrix", ["expert up"] * 3))
    above, _ = weight_spectra(experts, measure="stable_rank")
    (line,) = elements(above, "Curve")
    assert places(line).tolist() == [[0, float(one["stable_rank"].mean())]]
    assert len(places(elements(above, "Points")[0])) == 3


def test_matrices_outside_of_layers_and_undefined_values_are_in_the_note(spectra):
    first, _ = bokeh_panels(weight_spectra(spectra))
    alpha = float(spectra["alpha"].sel(matrix="embed_tokens.weight"))
    assert note(first).startswith(f"embedding {alpha:.3g}"[:12])
    assert "median standard error" in note(first)
    assert "undefined for 1 of 7 matrices" in note(first)
    assert set(depth_columns(spectra, "n_spikes")) == {"other", "MLP up", "MLP down"}


def test_the_density_integrates_to_one_and_the_tail_to_its_fraction(spectra):
    density = density_of(spectra, "layers.1.mlp.up_proj")
    total = (density["density"] * np.diff(density["edges"])).sum()
    assert total == pytest.approx(1 - density["n_below"] / 60)
    x, tail = density["tail"]
    fraction = density["n_tail"] / 60 * (1 - (x[-1] / x[0]) ** (1 - density["alpha"]))
    fine = np.geomspace(x[0], x[-1], 20_001)
    assert np.trapezoid(np.exp(np.interp(np.log(fine), np.log(x), np.log(tail))), fine) == pytest.approx(
        fraction, rel=1e-5
    )
    assert len(density["spikes"]) == density["n_spikes"] == 3


def test_the_density_shows_bins_edge_spikes_and_tail(spectra):
    _, below = weight_spectra(spectra, matrix="layers.1.mlp.up_proj")
    density = density_of(spectra, "layers.1.mlp.up_proj")
    boxes = ends(elements(below, "Rectangles")[0])
    assert len(boxes) == (density["density"] > 0).sum()
    edge, tail = elements(below, "Curve")
    assert set(places(edge)[:, 0]) == {density["bulk_edge"]}
    assert tail.label == "fitted power law"
    assert sorted(places(elements(below, "Points")[0])[:, 0]) == sorted(density["spikes"])
    _, second = bokeh_panels(weight_spectra(spectra, matrix="layers.1.mlp.up_proj"))
    assert second.title.text == "Eigenvalues of layers.1.mlp.up_proj"
    assert "3 spikes" in legend(second)
    assert note(second).startswith(f"alpha {density['alpha']:.2f} ± {density['alpha_error']:.2f}")


def test_by_default_the_heaviest_tail_of_the_layers_is_shown(spectra):
    in_layers = spectra.isel(matrix=spectra["layer"].values >= 0)
    heaviest = str(in_layers["matrix"].values[np.nanargmin(in_layers["alpha"])])
    assert density_of(spectra)["matrix"] == heaviest
    without = spectra.assign(alpha=spectra["alpha"] * np.nan)
    assert density_of(without)["matrix"] == spectra["matrix"].values[0]
    assert len(elements(weight_spectra(without)[1], "Curve")) == 1  # only the edge


def test_a_small_model_without_any_fit_is_drawn(recwarn):
    weights = wb.weights.weight_spectra(wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2), progress=False)
    above, below = weight_spectra(weights)
    assert elements(above, "Curve") == elements(below, "Curve") == []
    assert "undefined for every matrix in a layer" in words(above)
    assert "undefined for 15 of 15 matrices" in note(bokeh_panels(weight_spectra(weights))[0])
    assert elements(weight_spectra(weights, measure="stable_rank")[0], "Curve")
    assert not [str(item.message) for item in recwarn if "dateutil" not in str(item.message)]


@pytest.mark.parametrize("backend", ["bokeh", "matplotlib"])
def test_both_backends_draw(spectra, backend, tmp_path, recwarn):
    name = {"bokeh": "figure.html", "matplotlib": "figure.png"}[backend]
    path = wb.plots.save(weight_spectra(spectra, measure="spectral_norm", backend=backend), tmp_path / name)
    assert path.stat().st_size > 10_000
    assert not [str(item.message) for item in recwarn if "dateutil" not in str(item.message)]


@pytest.mark.parametrize(
    ("call", "error", "check"),
    [
        (
            lambda s: weight_spectra(s.drop_vars("alpha")),
            SchemaError,
            says("The weight spectra lack alpha;"),
        ),
        (lambda s: weight_spectra(s, measure="beta"), SchemaError, about("measure", "beta")),
        (lambda s: weight_spectra(s, measure="relative_change"), SchemaError, about("measure", "relative_change")),
        (lambda s: weight_spectra(s, matrix="w"), SchemaError, says("choose one in spectra[")),
        (
            lambda s: weight_spectra(s, matrix="layers.1.special"),
            SchemaError,
            says("is zero and has no eigenvalue density; choose another one."),
        ),
        (
            lambda s: weight_spectra(s.expand_dims("step")),
            SchemaError,
            says("The weight spectra have dimensions step, matrix, expected"),
        ),
        (lambda s: weight_spectra(s, backend="plotly"), OptionError, about("backend", "plotly")),
    ],
)
def test_invalid_input_is_rejected(call, error, check, spectra):
    with pytest.raises(error, check=check):
        call(spectra)
