"""Figures of a diagnosis, without pixels: bars are the numbers given, and nothing is left out silently."""

import numpy as np
import pytest

from tests.plots.panels import elements, ends
from tests.reports import made_trees
from workbench.errors import OptionError, SchemaError
from workbench.plots import save
from workbench.plots.diagnosis_figures import cause_bars, evidence_bars, evidence_timeline

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def tree():
    return made_trees.diagnosis()


def words(panel):
    return [str(text) for labels in elements(panel, "Labels") for text in np.atleast_1d(labels["text"])]


def test_causes_are_bars_of_their_probability(tree):
    causes = tree["causes"].to_dataset()
    (panel,) = cause_bars(causes.isel(cause=[2, 0, 3, 1]))
    (boxes,) = elements(panel, "Rectangles")
    np.testing.assert_allclose(ends(boxes)[:, 2], sorted(causes["probability"].values, reverse=True))
    assert words(panel) == ["81 %", "15 %", "3 %", "1 %"]


def test_evidence_is_drawn_to_the_side_that_it_speaks_for(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_bars(evidence)
    right, left = elements(panel, "Rectangles")
    weight = evidence["weight"].values
    np.testing.assert_allclose(sorted(ends(right)[:, 2]), sorted(weight[weight > 0]))
    np.testing.assert_allclose(sorted(ends(left)[:, 2]), sorted(weight[weight < 0]))
    assert {"+2.10", "-1.50", "learning rate", "architecture", "precision"} <= set(words(panel))


def test_what_has_no_bar_of_its_own_is_summed_up(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_bars(evidence, n=1)
    bars = np.concatenate([ends(boxes)[:, 2] for boxes in elements(panel, "Rectangles")])
    np.testing.assert_allclose(bars.sum(), evidence["weight"].values.sum())
    assert len(bars) == 4  # of the learning rate its strongest sign and the two others together
    with pytest.raises(OptionError, match="n is 0, expected a whole number of at least 1"):
        evidence_bars(evidence, n=0)


def test_signs_stand_at_their_steps_and_those_without_are_named(tree):
    evidence = tree["evidence"].to_dataset()
    (panel,) = evidence_timeline(evidence)
    steps = sorted(float(points["step"][0]) for points in elements(panel, "Points"))
    assert steps == [300.0, 380.0, 395.0]
    with pytest.raises(SchemaError, match="No symptom of the evidence has a step"):
        evidence_timeline(evidence.isel(evidence=[2, 4]))


@pytest.mark.parametrize("draw", [cause_bars, evidence_bars, evidence_timeline])
def test_they_are_drawn_by_both_backends(draw, tree, tmp_path):
    data = tree["causes" if draw is cause_bars else "evidence"].to_dataset()
    assert save(draw(data, backend="matplotlib"), tmp_path / "a.png", dpi=50).stat().st_size > 3000
    assert "Bokeh.embed" in save(draw(data), tmp_path / "a.html").read_text()
    with pytest.raises(SchemaError, match="it lacks"):
        draw(data.drop_vars(["probability", "weight"], errors="ignore"))
