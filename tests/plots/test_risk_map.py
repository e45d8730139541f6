"""Maps and curves of risk without pixels: cells, edges, runs, and what the model should not be believed on."""

import numpy as np
import pytest
import xarray as xr

from tests.plots.panels import bokeh_panels, elements, ends, legend, note, places, words
from workbench.errors import OptionError, SchemaError
from workbench.plots.outcome_colors import UNKNOWN, probability_colors
from workbench.plots.risk_curve_figure import risk_curve
from workbench.plots.risk_grid import RiskGrid, Runs
from workbench.plots.risk_map_figure import risk_map

pytestmark = pytest.mark.render

RATES = np.array([1e-3, 1e-2, 1e-1])
GRID = ("architecture", "learning_rate")
NAN = np.nan


@pytest.fixture
def risk():
    probability = np.array([[0.0, 0.5, 1.0], [0.1, 0.6, NAN]])
    return xr.Dataset(
        {
            "probability": (GRID, probability),
            "low": (GRID, probability * 0.5),
            "high": (GRID, np.minimum(probability * 1.5, 1)),
            "is_familiar": (GRID, np.array([[True, True, True], [True, False, False]])),
            "largest_stable_rate": ("architecture", [4e-3, 0.5]),
            "largest_stable_rate_low": ("architecture", [2e-3, 0.05]),
            "largest_stable_rate_high": ("architecture", [8e-3, 2.0]),
        },
        {"architecture": ["Pre-LN", "No-Norm"], "learning_rate": RATES},
        {"level": 0.9},
    )


@pytest.fixture
def runs():
    return xr.Dataset(
        {"has_diverged": ("run", [False, True, True, False, True, False])},
        {
            "architecture": ("run", ["Pre-LN", "Pre-LN", "Pre-LN", "No-Norm", "KAN", "No-Norm"]),
            "learning_rate": ("run", [1e-2, 1e-2, 5e-2, 1e-3, 1e-2, 9.0]),
        },
    )


# ---- the data


def test_cells_end_halfway_between_rates_on_a_logarithmic_axis(risk):
    bounds = RiskGrid.of(risk).bounds
    np.testing.assert_allclose(bounds, [10**-3.5, 10**-2.5, 10**-1.5, 10**-0.5])
    single = RiskGrid.of(risk.isel(learning_rate=[1]))
    assert single.bounds[0] < 1e-2 < single.bounds[1]


def test_rates_are_put_in_order_and_dimensions_too(risk):
    shuffled = risk.isel(learning_rate=[2, 0, 1]).transpose("learning_rate", "architecture")
    grid = RiskGrid.of(shuffled)
    np.testing.assert_array_equal(grid.rates, RATES)
    np.testing.assert_array_equal(grid.probability, risk["probability"].values)
    np.testing.assert_array_equal(grid.is_familiar, risk["is_familiar"].values)


def test_what_the_data_do_not_say(risk):
    grid = RiskGrid.of(risk[["probability"]].isel(architecture=1, drop=True).drop_attrs())
    assert grid.architectures == ("",)
    assert grid.is_familiar.tolist() == [[True, True, False]]
    assert np.isnan(grid.low).all()
    assert np.isnan(grid.edges).all()
    assert (grid.below, grid.level) == (0.20, None)
    assert grid.edge_in_words(0) == "not predicted"


def test_runs_find_their_rows_and_the_others_are_counted(risk, runs):
    found = Runs.of(runs, RiskGrid.of(risk))
    assert found.row.tolist() == [0, 0, 0, 1]
    assert found.has_diverged.tolist() == [False, True, True, False]
    assert found.spots.tolist() == [-1, 1, 0, 0]  # two at one rate: the one that diverged above
    assert found.remarks == ["2 runs elsewhere not shown"]
    assert Runs.of(runs.isel(run=slice(4)), RiskGrid.of(risk)).remarks == []


def test_colours_run_from_survival_to_divergence():
    colors = probability_colors(np.array([[0.0, 0.25, 0.5], [0.75, 1.0, NAN]]))
    rgb = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors.ravel()])
    assert colors.shape == (2, 3)
    assert colors[1, 2] == UNKNOWN
    assert len(set(colors.ravel())) == 6
    assert rgb[0, 2] > rgb[0, 0]  # blue
    assert rgb[4, 0] > rgb[4, 2]  # orange
    np.testing.assert_allclose(rgb[1], (rgb[0] + rgb[2]) / 2, atol=0.6)
    np.testing.assert_allclose(rgb[3], (rgb[2] + rgb[4]) / 2, atol=0.6)


# ---- the map


def test_each_cell_has_the_colour_of_its_probability(risk):
    panel, _ = risk_map(risk)
    cells = elements(panel, "Rectangles")[0]
    assert cells["fill"].tolist() == probability_colors(risk["probability"].values).ravel().tolist()
    bounds = RiskGrid.of(risk).bounds
    np.testing.assert_allclose(ends(cells)[:, 0], np.tile(bounds[:-1], 2))
    np.testing.assert_allclose(ends(cells)[:, 2], np.tile(bounds[1:], 2))
    assert ends(cells)[:, [1, 3]].mean(1).tolist() == [0, 0, 0, -1, -1, -1]
    assert cells["words"].tolist() == [
        "0 % [0 %, 0 %]",
        "50 % [25 %, 75 %]",
        "100 % [50 %, 100 %]",
        "10 % [5 %, 15 %]",
        "60 % [30 %, 90 %], unlike the runs that the model has seen",
        "not predicted: unlike the runs that the model has seen",
    ]


def test_unfamiliar_cells_are_hatched_and_no_other(risk):
    panel, _ = risk_map(risk)
    (strokes,) = [ends(part) for part in elements(panel, "Segments") if len(part) > 1]
    bounds = RiskGrid.of(risk).bounds
    assert (strokes[:, [1, 3]].mean(1) == -1).all()
    assert len(strokes) == 6
    for stroke, rate in zip((strokes[:3], strokes[3:]), (1, 2), strict=True):
        np.testing.assert_allclose([stroke[:, 0].min(), stroke[:, 2].max()], bounds[rate : rate + 2])
        np.testing.assert_allclose(stroke[1:, 0], stroke[:-1, 2])
    familiar = risk.assign(is_familiar=(GRID, np.ones((2, 3), bool)))
    assert all(len(part) == 1 for part in elements(next(iter(risk_map(familiar))), "Segments"))


def test_edges_stand_at_the_largest_stable_rate_with_their_interval(risk):
    panel, _ = risk_map(risk)
    strokes = np.concatenate([ends(part) for part in elements(panel, "Segments") if len(part) == 1])
    upright, level = strokes[strokes[:, 0] == strokes[:, 2]], strokes[strokes[:, 1] == strokes[:, 3]]
    # Each is drawn over a paler one. No-Norm's edge lies beyond the view, its interval reaches into it.
    np.testing.assert_allclose(upright, [[4e-3, -0.42, 4e-3, 0.42]] * 2)
    end = RiskGrid.of(risk).bounds[-1]
    np.testing.assert_allclose(level, [[2e-3, 0, 8e-3, 0]] * 2 + [[0.05, -1, end, -1]] * 2)
    shown = words(panel)
    assert shown["0.004 [0.002, 0.008]"][1] == 0
    assert shown["0.5 [0.05, 2]"][1] == -1


@pytest.mark.slow
def test_measured_runs_are_hollow_or_filled(risk, runs):
    panel, _ = risk_map(risk, runs=runs)
    survived, diverged = elements(panel, "Points")
    np.testing.assert_allclose(places(survived), [[1e-2, -0.34], [1e-3, -1.0]])
    np.testing.assert_allclose(places(diverged), [[1e-2, 0.34], [5e-2, 0.0]])
    frame, key = bokeh_panels(risk_map(risk, runs=runs))
    assert note(frame).replace("\n", "   ").split("   ") == [
        "┃ largest rate with less than 20 % risk, 90 % interval",
        "○ survived",
        "● diverged",
        "hatched: unlike the runs that the model has seen",
        "grey: not predicted",
        "2 runs elsewhere not shown",
    ]
    assert [frame.yaxis[0].major_label_overrides[-i] for i in range(2)] == ["Pre-LN", "No-Norm"]
    assert key.xaxis[0].major_label_overrides[0.2] == "20 %"


def test_a_map_of_probabilities_alone(risk):
    panel, key = risk_map(risk[["probability"]].isel(architecture=0, learning_rate=slice(2)))
    assert not elements(panel, "Segments")
    assert not words(panel)
    assert len(elements(key, "Rectangles")) == 1
    frame, _ = bokeh_panels(risk_map(risk[["probability"]].isel(architecture=[0], learning_rate=slice(2))))
    assert note(frame) == ""
    assert frame.x_range.end == pytest.approx(RiskGrid.of(risk.isel(learning_rate=slice(2))).bounds[-1])


# ---- the curve


def test_curves_and_strips_are_the_predictions(risk):
    (panel,) = risk_curve(risk.isel(architecture=[0]))
    (curve,) = elements(panel, "Curve")
    np.testing.assert_array_equal(places(curve), np.stack([RATES, [0, 0.5, 1]], axis=-1))
    (strip,) = elements(panel, "Area")
    np.testing.assert_array_equal(strip.dimension_values(1), [0, 0.25, 0.5])
    np.testing.assert_array_equal(strip.dimension_values(2), [0, 0.75, 1])
    level, interval = (ends(part) for part in elements(panel, "Segments"))
    assert level[0, [1, 3]].tolist() == [0.2, 0.2]
    np.testing.assert_allclose(interval, [[2e-3, 0.2, 8e-3, 0.2]])
    edge = elements(panel, "Points")[-1]
    np.testing.assert_allclose(places(edge), [[4e-3, 0.2]])


def test_where_the_model_knows_nothing_the_line_is_dotted_and_the_ground_grey(risk):
    (panel,) = figure = risk_curve(risk.sel(architecture="No-Norm"))
    dotted, solid = elements(panel, "Curve")
    np.testing.assert_array_equal(solid.dimension_values(1), [0.1, NAN, NAN])
    np.testing.assert_array_equal(dotted.dimension_values(1), [0.1, 0.6, NAN])  # begins where the other ends
    (ground,) = elements(panel, "Rectangles")
    bounds = RiskGrid.of(risk).bounds
    np.testing.assert_allclose(ends(ground), [[bounds[2], 0, bounds[3], 1]])
    (frame,) = bokeh_panels(figure)
    assert "dotted: unlike the runs that the model has seen   no line: not predicted" in note(frame)
    # One that all rows have a prediction for is white.
    assert not elements(next(iter(risk_curve(risk))), "Rectangles")


@pytest.mark.slow
def test_runs_stand_below_and_above_and_the_legend_says_the_edge(risk, runs):
    figure = risk_curve(risk, runs=runs, places={"Pre-LN": 0, "No-Norm": 2})
    (panel,) = figure
    rug = [places(part) for part in elements(panel, "Points") if (places(part)[:, 1] < 0).any()]
    assert sorted(float(at) for part in rug for at in part[:, 0]) == [1e-3, 1e-2]
    above = [places(part) for part in elements(panel, "Points") if (places(part)[:, 1] > 1).any()]
    assert sorted(float(at) for part in above for at in part[:, 0]) == [1e-2, 5e-2]
    (frame,) = bokeh_panels(figure)
    assert {label: len(colors) for label, colors in legend(frame).items()} == {
        "Pre-LN: stable up to 0.004 [0.002, 0.008]": 1,
        "No-Norm: stable up to 0.5 [0.05, 2]": 1,
    }


def test_runs_need_no_architecture_where_the_risk_has_none(risk, runs):
    bare = risk.isel(architecture=0, drop=True)
    (panel,) = risk_curve(bare, runs=runs.drop_vars("architecture"))
    assert sum(len(part) for part in elements(panel, "Points")) == 3 + 1 + 5  # unseen ones, the edge, five runs
    (frame,) = bokeh_panels(risk_curve(bare.drop_vars("largest_stable_rate")))
    assert list(legend(frame)) == ["no stable rate predicted"]


@pytest.mark.parametrize("draw", [risk_map, risk_curve])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda data: data.to_array(), SchemaError, "The risk is of type DataArray, expected a dataset with dims"),
        (lambda data: data.drop_vars("probability"), SchemaError, "lacks probability; expected a dataset with dims"),
        (lambda data: data.rename(learning_rate="rate"), SchemaError, "lacks the dimension learning_rate"),
        (lambda data: data.drop_vars("learning_rate"), SchemaError, "lacks the dimension learning_rate with its"),
        (lambda data: data.isel(architecture=[]), SchemaError, "The risk is empty"),
        (lambda data: data.expand_dims(run=2), SchemaError, "runs over run too; select first"),
        (lambda data: data.assign_coords(learning_rate=[0, 1, 2]), SchemaError, "must be positive, finite and each"),
        (lambda data: data.assign_coords(learning_rate=[1, 1, 2]), SchemaError, "must be positive, finite and each"),
        (lambda data: data.assign(probability=data.probability + 0.5), SchemaError, "a probability outside 0 to 1"),
        (
            lambda data: data.assign(largest_stable_rate=data.probability),
            SchemaError,
            "largest_stable_rate runs over more than architecture",
        ),
    ],
)
def test_wrong_risk_says_what_to_do(risk, draw, change, error, sentence):
    with pytest.raises(error, match=sentence):
        draw(change(risk))


@pytest.mark.parametrize("draw", [risk_map, risk_curve])
def test_wrong_runs_and_options_say_what_to_do(risk, runs, draw):
    with pytest.raises(SchemaError, match="no table of runs: it lacks architecture; make it with wb.sweeps.run"):
        draw(risk, runs=runs.drop_vars("architecture"))
    with pytest.raises(OptionError, match="plotly"):
        draw(risk, backend="plotly")
