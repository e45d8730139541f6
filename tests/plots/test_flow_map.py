"""The flow map without rendering: boxes are gains, scales are shared, and missing values are reported."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels, elements, ends, legend, matplotlib_axes, note, places
from workbench.errors import OptionError, SchemaError
from workbench.plots.figure_files import save
from workbench.plots.flow_map_figure import AMPLIFIED, ATTENUATED, flow_map, paths_of

pytestmark = pytest.mark.render


def flow_of(signal, gradient, *, subject="synthetic"):
    """Return a flow whose sub-layers have the given gains, shape (layer, sublayer)."""
    signal, gradient = np.asarray(signal, float), np.asarray(gradient, float)
    block = signal.prod(1), gradient.prod(1)
    rms = 3 * np.append(1, np.cumprod(block[0]))
    norm = 5 * np.append(np.cumprod(block[1][::-1])[::-1], 1)
    names = np.full(signal.shape, "mlp", dtype="<U9")
    names[:, 0] = "attention"
    return xr.Dataset(
        {
            "state_rms": ("boundary", rms),
            "gradient_norm": ("boundary", norm),
            "signal_gain": ("layer", block[0]),
            "gradient_gain": ("layer", block[1]),
            "sublayer_signal_gain": (("layer", "sublayer"), signal),
            "sublayer_gradient_gain": (("layer", "sublayer"), gradient),
        },
        {
            "layer_name": ("layer", [f"h.{i}" for i in range(len(signal))]),
            "sublayer_name": (("layer", "sublayer"), names),
        },
        {"subject": subject},
    )


@pytest.fixture
def calm():
    return flow_of([[1.2, 0.5], [2.0, 1.0]], [[1.0, 3.0], [0.5, 0.25]])


def test_boxes_extend_from_the_size_before_to_the_size_after(calm):
    (path,) = paths_of(calm)
    np.testing.assert_allclose(path.forward.before, [1, 1.2, 0.6, 1.2])
    np.testing.assert_allclose(path.forward.after, [1.2, 0.6, 1.2, 1.2])
    np.testing.assert_allclose(path.forward.left, [0, 0.5, 1, 1.5])
    np.testing.assert_allclose(path.backward.before, [0.375, 0.125, 0.25, 1])  # the last block comes first
    np.testing.assert_allclose(path.backward.after, [0.375, 0.375, 0.125, 0.25])
    np.testing.assert_allclose(path.backward.gain, [1.0, 3.0, 0.5, 0.25])
    assert list(path.backward.name) == ["h.0: attention", "h.0: mlp", "h.1: attention", "h.1: mlp"]
    assert (path.forward.note, path.parts) == (["total ×1.20", "per block ×1.10"], "sub-layers: attention, mlp")
    figure = flow_map(calm)
    assert note(bokeh_panels(figure)[0]) == "total ×1.20   per block ×1.10   sub-layers: attention, mlp"
    above, _ = figure
    (boxes,) = elements(above, "Rectangles")
    np.testing.assert_allclose(
        ends(boxes), [[0, 1, 0.5, 1.2], [0.5, 0.6, 1, 1.2], [1, 0.6, 1.5, 1.2], [1.5, 1.2, 2, 1.2]]
    )
    assert list(boxes["fill"]) == [AMPLIFIED, ATTENUATED, AMPLIFIED, AMPLIFIED]
    line = places(elements(above, "Curve")[0])
    np.testing.assert_allclose(line[[0, -1]], [[0, 1], [2, 1.2]])


def test_models_side_by_side_share_their_scales(calm):
    wild = flow_of([[10, 10], [10, 10]], [[0.1, 0.1], [1, 1]], subject="wild")
    frames = bokeh_panels(flow_map({"calm": calm, "wild": wild}))
    assert [frame.title.text for frame in frames] == ["calm", "wild", "", ""]
    for row in (frames[:2], frames[2:]):
        assert row[0].y_range.start == pytest.approx(row[1].y_range.start)
        assert row[0].y_range.end == pytest.approx(row[1].y_range.end)
    assert frames[0].y_range.start < 0.6
    assert frames[0].y_range.end > 1e4
    assert "total ×1.0e+04" in note(frames[1])
    assert set(legend(frames[1])) == {"amplifies", "attenuates"}
    assert frames[0].frame_width == frames[1].frame_width


@pytest.mark.slow
@pytest.mark.parametrize(("n", "n_columns"), [pytest.param(4, 4, marks=pytest.mark.slow), (5, 3)])
def test_a_figure_of_bokeh_is_never_wider_than_1200_pixels(calm, n, n_columns):
    flows = {f"design {i} with a name that is long": calm for i in range(n)}
    figure = flow_map(flows)
    frames = bokeh_panels(figure)
    assert len(frames) == 2 * n
    width = frames[0].frame_width
    assert n_columns * (width + 54) + 152 <= 1200
    assert all(len(frame.title.text) * 9 <= width for frame in frames)
    assert len({note(frame).count("\n") for frame in frames[:n_columns]}) == 1
    assert [frame.title.text[:8] for frame in frames[:n_columns]] == [f"design {i}" for i in range(n_columns)]
    has_legend = [bool(frame.legend and frame.legend[0].items) for frame in frames]
    assert has_legend == [i == n_columns - 1 for i in range(2 * n)]


@pytest.mark.slow
def test_wrapped_frames_do_not_overlap_in_matplotlib(calm):
    frames = matplotlib_axes(flow_map({f"design {i}": calm for i in range(5)}, backend="matplotlib"))
    boxes = [frame.get_tightbbox() for frame in frames if frame.get_visible() and frame.lines]
    assert len(boxes) == 10
    for i, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_gains_near_one_have_three_ticks_on_their_axis():
    ticks = bokeh_panels(flow_map(flow_of([[1.1, 1.0], [1.1, 1.1]], np.ones((2, 2)))))[0].yaxis[0].ticker.ticks
    assert len(ticks) > 2


def test_blocks_whose_sublayers_were_not_measured_have_one_box(calm):
    calm["sublayer_signal_gain"][0, 1] = np.nan
    (path,) = paths_of(calm)
    assert list(path.forward.name) == ["h.0: block", "h.1: attention", "h.1: mlp"]
    np.testing.assert_allclose(path.forward.gain, [0.6, 2, 1])
    bare = calm.drop_vars("sublayer_name").assign(
        sublayer_signal_gain=calm["sublayer_signal_gain"] * np.nan,
        sublayer_gradient_gain=calm["sublayer_gradient_gain"] * np.nan,
    )
    assert list(paths_of(bare)[0].forward.name) == ["h.0: block", "h.1: block"]


def test_missing_states_are_reported(calm):
    calm["gradient_norm"][0] = 0.0
    calm["gradient_gain"][0] = np.nan
    calm["sublayer_gradient_gain"][0] = np.nan
    below = bokeh_panels(flow_map(calm))[1]
    assert note(below) == "1 of 3 states not measured or zero"
    calm["gradient_norm"][:] = np.nan
    assert note(bokeh_panels(flow_map(calm))[1]) == "not measured"


def test_constant_states_have_an_axis():
    frame = bokeh_panels(flow_map(flow_of(np.ones((3, 2)), np.ones((3, 2)))))[0]
    assert frame.y_range.start < 0.72
    assert frame.y_range.end > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [1, pytest.param(24, marks=pytest.mark.slow)])
def test_both_backends_draw_any_depth(n_layers, tmp_path, recwarn):
    gains = np.exp(np.random.default_rng(0).normal(size=(n_layers, 2)))
    flows = {"one": flow_of(gains, 1 / gains), "other": flow_of(gains**2, gains)}
    assert save(flow_map(flows, backend="matplotlib"), tmp_path / "figure.png", dpi=50).stat().st_size > 5000
    assert "Bokeh.embed" in save(flow_map(flows), tmp_path / "figure.html").read_text()
    assert not [str(item.message) for item in recwarn if "dateutil" not in str(item.message)]


def test_invalid_input_is_rejected(calm):
    with pytest.raises(SchemaError, check=says("lacks signal_gain; create it with wb.flow.measure().")):
        flow_map({"x": calm.drop_vars("signal_gain")})
    with pytest.raises(SchemaError, check=says("has several steps; select one, for example")):
        flow_map(calm.expand_dims("step"))
    with pytest.raises(SchemaError, check=says("flows, expected at most")):
        flow_map({str(i): calm for i in range(7)})
    with pytest.raises(SchemaError, check=says("The flow is an empty dict, expected a dataset from")):
        flow_map({})
    with pytest.raises(OptionError, check=about("backend", "plotly", ("bokeh", "matplotlib"))):
        flow_map(calm, backend="plotly")
