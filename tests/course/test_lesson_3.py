"""Answers to lesson 3: right ones pass, and each mistake gets the sentence that names it.

Wrong answers are computed here as somebody would who makes the mistake, from the recorded runs of the lesson.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.course.answers import is_right, judged, solved

pytestmark = pytest.mark.medium
BARE = "No norm, Xavier"


@pytest.fixture(scope="module")
def edges():
    """The table of the notebook, with all scalars of each design."""
    study = wb.samples.open("rate_study", "fit")
    runs = study.query(run="optimizer == 'AdamW' and n_steps == 480 and d_model == 64 and n_layers == 3")
    shorter = study.query(run="stage == 'shorter'")
    rows = {}
    for name in ("Pre-LN", "Post-LN", "MoE top-2", BARE, "Llama-style"):
        of = wb.rates.loss_over_rates(runs.isel(run=(runs["architecture"] == name).values), shorter=shorter)
        rows[name] = {key: float(value) for key, value in of.data_vars.items() if not value.ndim}
    return pd.DataFrame(rows).T


@pytest.mark.parametrize("number", ["3.1", "3.2", "3.3", "3.4", "3.5", "3.6"])
def test_the_solution_passes(number, edges):
    # The prediction of the notebook: table of edges of AdamW with a normalization.
    ends = {end: SimpleNamespace(value=float(edges.loc["Pre-LN", end])) for end in ("slow_edge", "useful_edge")}
    given = {"np": np, "wb": wb, "edges": edges, "predicted": SimpleNamespace(**ends)}
    assert is_right(number, solved(number, given))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"Pre-LN", BARE}, "Pre-LN does not belong"),
        ({"Post-LN", BARE}, "Post-LN does not belong"),
        ({"MoE top-2", BARE}, "MoE top-2 does not belong"),
        (set(), f"{BARE} belongs to the set and is missing"),
        (BARE, "braces"),
        ({"no norm"}, "is not one of the names"),
    ],
)
def test_which_explode(answer, said):
    assert said in judged("3.1", answer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [("explodes", "the loss in the figure is finite"), ("learns well", "does not mean that it learned")],
)
def test_the_outcome(answer, said):
    assert said in judged("3.2", answer)


def test_what_the_sentences_about_outcomes_say_holds():
    study = wb.samples.open("rate_study", "fit")
    runs = study.query(
        run="architecture == 'Post-LN' and optimizer == 'AdamW' and n_steps == 480 and stage != 'measures'"
    )
    runs = runs.query(run="learning_rate > 0.011 and learning_rate < 0.012")
    assert runs.sizes["run"] == 3
    assert not runs["has_diverged"].any()
    loss = runs["held_out_loss"].isel(evaluation=-1).mean()
    assert 0 < float(loss - runs["trivial_loss"].mean()) < 0.1


class TestUsefulEdge:
    """3.3, a function."""

    @staticmethod
    def band(rate, loss, limit):
        best = int(np.argmin(loss))
        useful = loss <= limit
        high = best + int(np.argmin([*useful[best:], False])) - 1
        low = best - int(np.argmin([*useful[: best + 1][::-1], False])) + 1
        return low, high

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda r, x, limit: r[x <= limit][-1], "largest useful rate anywhere"),
            (lambda r, x, limit: r[x.argmin()], "returns the best rate"),
            (
                lambda r, x, limit: [*r, np.nan][TestUsefulEdge.band(r, x, limit)[1] + 1],
                "first rate that is not useful",
            ),
            (lambda r, x, limit: r[TestUsefulEdge.band(r, x, limit)[0]], "slow edge"),
            (lambda r, x, limit: r[np.isfinite(x)][-1], "loss is finite"),
            (lambda r, x, limit: r[TestUsefulEdge.band(r, x, limit - 1e-9)[1]], "equals the limit"),
            (lambda r, x, limit: x[TestUsefulEdge.band(r, x, limit)[1]], "returns a loss"),
            (lambda r, x, limit: TestUsefulEdge.band(r, x, limit)[1], "place in the grid"),
            (lambda r, x, limit: r[-1], "is right"),
            (lambda r, x, limit: r[len(r)], "raised IndexError"),
        ],
    )
    def test_mistakes(self, wrong, said):
        assert said in judged("3.3", wrong)

    def test_another_way_to_compute_it_passes(self):
        assert wb.course.check("3.3", lambda r, x, limit: r[TestUsefulEdge.band(r, x, limit)[1]]).is_right


class TestEdges:
    """3.4, the ratio of two edges."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda e: e.useful_edge[BARE] / e.explosion_edge[BARE], "upside down"),
            (lambda e: e.explosion_edge[BARE] - e.useful_edge[BARE], "compared by their ratio"),
            (lambda e: e.explosion_edge[BARE] / e.best_rate[BARE], "divided by the best rate"),
            (lambda e: e.explosion_edge[BARE] / e.slow_edge[BARE], "divided by the slow edge"),
            (lambda e: e.useful_edge[BARE] / e.slow_edge[BARE], "width of the band"),
            (lambda e: e.largest_rate[BARE] / e.useful_edge[BARE], "largest rate tried"),
            (lambda e: e.explosion_edge[BARE] / e.useful_edge["Pre-LN"], "useful edge of Pre-LN"),
            (lambda e: e.trivial_loss[BARE] / e.best_loss[BARE], "divided losses"),
            (lambda e: e.explosion_edge[BARE], "explosion edge itself"),
            (lambda e: e.useful_edge[BARE], "useful edge itself"),
            (lambda e: e.explosion_edge["Pre-LN"] / e.useful_edge["Pre-LN"], "not defined"),
        ],
    )
    def test_mistakes(self, edges, mistake, said):
        assert said in judged("3.4", mistake(edges))


class TestChosenRate:
    """3.5, a rate within the useful band."""

    @pytest.mark.parametrize(
        ("rate", "said"),
        [
            (1e-4, "too small for 480 updates. At 8.78e-05, "),
            (0.0077, "too large. At 0.00759, "),
            (0.1, "too large. At 0.13, "),
            (0, "above 0"),
            ("0.003", "quotation marks"),
            ((0.001, 0.004), "shape (2,)"),
        ],
    )
    def test_mistakes(self, rate, said):
        assert said in judged("3.5", rate)

    def test_the_cost_of_a_rate_is_that_of_the_recorded_runs(self, edges):
        study = wb.samples.open("rate_study", "fit")
        runs = study.query(run="architecture == 'Llama-style' and optimizer == 'AdamW' and n_steps == 480")
        at = runs.query(run="learning_rate > 0.1")["held_out_loss"].isel(evaluation=-1).mean()
        cost = float(at) - edges.best_loss["Llama-style"]
        assert f"{cost:.2f} nat" in judged("3.5", 0.1)

    @pytest.mark.parametrize("rate", [0.001, 0.002, 0.0039])
    def test_any_useful_rate_is_right(self, rate):
        assert wb.course.check("3.5", rate).is_right


@pytest.mark.parametrize(
    ("answer", "said"), [("pilot", "training is longer"), ("one rate for all", "few designs only")]
)
def test_the_best_estimate(answer, said):
    assert said in judged("3.6", answer)
