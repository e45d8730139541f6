"""The figure of a ladder: dots, trend, target, and the coordinate check."""

import io

import numpy as np
import pytest
import xarray as xr
from PIL import Image

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places, words
from workbench.errors import OptionError, SchemaError
from workbench.plots import save, style
from workbench.plots.scaling_trend_figure import scaling_trend
from workbench.scaling import extrapolated

pytestmark = pytest.mark.render

EDGE, MASS = "explosion_edge", "near_unit_mass"


def study_of(*, exponent=-0.5, target=(256, 4), seed=0, measured=True, checked=True, widths=(16, 32, 64)):
    """Return a study of known numbers, with a trend fitted by the real code."""
    generator = np.random.default_rng(seed)
    widths = np.array(widths)
    edge = (widths**exponent)[:, None] * np.exp(0.05 * generator.normal(size=(len(widths), 3)))
    mass = 0.5 + 0.01 * generator.normal(size=(len(widths), 3))
    study = xr.Dataset(
        {"measured": (("quantity", "rung", "seed"), np.stack([edge, mass]))},
        coords={
            "width": ("rung", widths),
            "depth": ("rung", np.full(len(widths), 4)),
            "quantity": [EDGE, MASS],
            "seed": [1, 2, 3],
        },
        attrs={"subject": "synthetic", "target_width": target[0], "target_depth": target[1]},
    )
    study = study.merge(extrapolated(study, target))
    if measured:
        study["measured_at_target"] = ("quantity", [0.05, 0.5])
        study["measured_at_target_of_seed"] = (("quantity", "seed"), [[0.04, 0.05, 0.06], [0.4, 0.5, 0.6]])
        study["measured_edge_low"], study["measured_edge_high"] = ((), 0.03), ((), 0.08)
    if checked:
        study = study.assign_coords(layer_group=["embedding", "block 0 mlp", "logits"])
        for name, values in (("", [0.0, 1.2, np.nan]), ("_low", [-0.1, 1.0, np.nan]), ("_high", [0.1, 1.4, np.nan])):
            study[f"coordinate_exponent{name}"] = ("layer_group", values)
        study["coordinate_exponent"].attrs = {"largest_healthy": 0.25, "smallest_healthy": -0.5}
        study["coordinate_state"], study["passes_coordinate_check"] = ((), "grows"), ((), False)
    return study


def panels(figure):
    return [figure.get(key) for key in figure.keys()]  # noqa: SIM118 (a Layout is no mapping)


def test_dots_trend_and_target_have_the_values_of_the_study():
    study = study_of()
    panel = panels(scaling_trend(study))[0]
    line = places(elements(panel, "Curve")[0])
    of_edge = study.sel(quantity=EDGE)
    np.testing.assert_allclose(line[:, 0], study["curve_width"])
    np.testing.assert_allclose(line[:, 1], of_edge["curve"])
    seeds, target, measured = (places(part) for part in elements(panel, "Points"))
    np.testing.assert_allclose(sorted(seeds[:, 1]), sorted(of_edge["measured"].values.ravel()))
    np.testing.assert_allclose(target, [[256, of_edge["at_target"]]])
    np.testing.assert_allclose(measured[0, 1], 0.05)
    assert words(panel)["×"][1] == 0.05
    predicted_bar, measured_bar = (ends(part)[0] for part in elements(panel, "Segments"))
    np.testing.assert_allclose(predicted_bar[[1, 3]], [of_edge["at_target_low"], of_edge["at_target_high"]])
    np.testing.assert_allclose(measured_bar[[1, 3]], [0.03, 0.08])
    area = elements(panel, "Area")[0]
    np.testing.assert_allclose(area.dimension_values(2), of_edge["curve_high"])


@pytest.mark.slow
def test_the_coordinate_check_marks_growing_updates():
    check = panels(scaling_trend(study_of()))[1]
    fine, off = elements(check, "Points")
    assert places(fine).tolist() == [[0.0, 1.0]]
    assert places(off).tolist() == [[1.2, 0.0]]
    assert ends(elements(check, "Rectangles")[0])[0, [0, 2]].tolist() == [-0.5, 0.25]
    shown = bokeh_panels(scaling_trend(study_of()))[1]
    assert shown.title.text == "Coordinate check: updates grow"


@pytest.mark.slow
def test_several_studies_share_one_panel_and_keep_their_styles():
    studies = {"falls": study_of(), "flat": study_of(exponent=0.0, seed=1)}
    figure = scaling_trend(studies, places={"falls": 3, "flat": 1})
    assert len(panels(figure)) == 1
    shown = bokeh_panels(figure)[0]
    colors = {name: color.pop() for name, color in legend(shown).items()}
    assert colors == {"falls": style.model_style(3)["color"], "flat": style.model_style(1)["color"]}
    together = xr.concat([study_of(checked=False), study_of(exponent=0.0, seed=1, checked=False)], "architecture")
    together = together.assign_coords(architecture=["falls", "flat"]).assign(
        target_width=("architecture", [256, 256]), target_depth=("architecture", [4, 4])
    )
    assert len(elements(panels(scaling_trend(together))[0], "Curve")) == 2


@pytest.mark.slow
def test_many_studies_have_a_legend_and_notes_that_fit_the_frame():
    studies = {f"design number {i}": study_of(seed=i, target=(1024 + 512 * i, 4 + i)) for i in range(8)}
    (shown,) = bokeh_panels(scaling_trend(studies))
    assert set(legend(shown)) == set(studies)
    lines = note(shown).split("\n")
    assert len(lines) > 8
    assert max(map(len, lines)) * 6.1 < shown.frame_width
    assert "only up to a factor of 4" in " ".join(lines)


@pytest.mark.slow
def test_panels_side_by_side_have_notes_of_the_same_height():
    both = bokeh_panels(scaling_trend(study_of(target=(1024, 8))))
    assert note(both[0]).count("\n") == note(both[1]).count("\n") > 1


@pytest.mark.slow
def test_a_ladder_without_a_trend_has_its_mark_in_the_legend():
    lineless = study_of(checked=False)
    for end in ("", "_low", "_high"):
        lineless[f"curve{end}"][:] = np.nan
    (shown,) = bokeh_panels(scaling_trend({"whole": study_of(checked=False), "lineless": lineless}))
    marks = {item.label.value: [type(r.glyph).__name__ for r in item.renderers] for item in shown.legend[0].items}
    assert marks == {"whole": ["Line"], "lineless": ["Scatter"]}


@pytest.mark.slow
def test_an_unsupported_prediction_is_hollow_and_explained():
    study = study_of(target=(1024, 4))
    figure = scaling_trend(study)
    assert "not supported (hollow mark). The target width" in note(bokeh_panels(figure)[0])
    target = elements(panels(figure)[0], "Points")[1]
    assert target.opts.get("style", "bokeh").kwargs["fill_alpha"] == 0.0


@pytest.mark.slow
def test_values_outside_the_range_tried_are_counted():
    study = study_of()
    study["measured"].values[0, 0, 0] = np.inf
    study = study.drop_vars(list(extrapolated(study, (256, 4)).data_vars)).drop_dims("curve_point")
    study = study.merge(extrapolated(study, (256, 4)))
    assert "1 values outside the range tried are not shown." in note(bokeh_panels(scaling_trend(study))[0])


@pytest.mark.slow
def test_a_fraction_has_a_linear_axis():
    shown = bokeh_panels(scaling_trend(study_of(), quantity=MASS))[0]
    assert type(shown.y_scale).__name__ == "LinearScale"
    assert type(bokeh_panels(scaling_trend(study_of()))[0].y_scale).__name__ == "LogScale"


@pytest.mark.parametrize(
    ("given", "options", "error", "check"),
    [
        (study_of(), {"quantity": "height"}, SchemaError, about("quantity", "height", (EDGE, MASS))),
        (study_of(), {"along": "height"}, OptionError, about("along", "height", ("width", "depth"))),
        (xr.Dataset(), {}, SchemaError, says("The scaling study lacks measured, curve, curve_low,")),
        ({}, {}, SchemaError, says("The scaling study is an empty dict, expected a dataset from")),
        (study_of(), {"backend": "paper"}, OptionError, about("backend", "paper")),
    ],
)
def test_invalid_input_is_rejected(given, options, error, check):
    with pytest.raises(error, check=check):
        scaling_trend(given, **options)


@pytest.mark.parametrize("backend", ["bokeh", "matplotlib"])
def test_both_backends_draw_it(backend, tmp_path, recwarn):
    figure = scaling_trend(study_of(), backend=backend)
    if backend == "bokeh":
        assert "Bokeh.embed.embed_item" in save(figure, tmp_path / "figure.html").read_text()
    else:
        drawn = save(figure, tmp_path / "figure.png", dpi=60)
        pixels = np.asarray(Image.open(io.BytesIO(drawn.read_bytes())).convert("RGB")).astype(int)
        assert (np.ptp(pixels, axis=-1) > 60).sum() > 200
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]
