"""Figures of a diagnosis, without rendering: bars have the given values, and nothing is omitted without a note."""

import numpy as np
import pytest

from tests.about import about, says
from tests.plots.panels import elements, ends
from tests.reports import made_trees
from workbench.errors import OptionError, SchemaError
from workbench.plots import save
from workbench.plots.finding_figures import cause_bars, evidence_bars, evidence_timeline

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def tree():
    return made_trees.diagnosis()


def words(panel):
    return [str(text) for labels in elements(panel, "Labels") for text in np.atleast_1d(labels["text"])]


def test_causes_are_bars_of_their_score_without_a_probability(tree):
    causes = tree["causes"].to_dataset()
    (panel,) = cause_bars(causes.isel(cause=[2, 0, 3, 1]))
    (boxes,) = elements(panel, "Rectangles")
    score = np.array(sorted(causes["probability"].values, reverse=True))
    np.testing.assert_allclose(ends(boxes)[:, 2], score / score[0])
    assert words(panel) == []


def test_evidence_for_a_cause_is_on_the_right_and_against_it_on_the_left(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_bars(evidence)
    right, left = elements(panel, "Rectangles")
    weight = evidence["weight"].values
    np.testing.assert_allclose(sorted(ends(right)[:, 2]), sorted(weight[weight > 0]))
    np.testing.assert_allclose(sorted(ends(left)[:, 2]), sorted(weight[weight < 0]))
    assert {"+2.10", "-1.50", "learning rate", "architecture", "precision"} <= set(words(panel))


def test_the_remaining_symptoms_share_one_bar(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_bars(evidence, n=1)
    bars = np.concatenate([ends(boxes)[:, 2] for boxes in elements(panel, "Rectangles")])
    np.testing.assert_allclose(bars.sum(), evidence["weight"].values.sum())
    assert len(bars) == 4  # learning rate: the strongest symptom, and the two others combined
    with pytest.raises(OptionError, check=about("n", 0)):
        evidence_bars(evidence, n=0)


def test_symptoms_are_at_their_steps(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_timeline(evidence)
    steps = sorted(float(points["step"][0]) for points in elements(panel, "Points"))
    assert steps == [300.0, 380.0, 395.0]
    with pytest.raises(SchemaError, check=says("No symptom of the evidence has a step; draw")):
        evidence_timeline(evidence.isel(evidence=[2, 4]))


@pytest.mark.parametrize("draw", [cause_bars, evidence_bars, evidence_timeline])
def test_both_backends_draw_it(draw, tree, tmp_path):
    data = tree["causes" if draw is cause_bars else "evidence"].to_dataset()
    assert save(draw(data, backend="matplotlib"), tmp_path / "a.png", dpi=50).stat().st_size > 3000
    assert "Bokeh.embed" in save(draw(data), tmp_path / "a.html").read_text()
    with pytest.raises(SchemaError, check=about("probability" if draw is cause_bars else "weight")):
        draw(data.drop_vars(["probability", "weight"], errors="ignore"))
