"""Answers to lesson 2: right ones pass, and each mistake gets the sentence that names it.

Wrong answers are computed here as somebody would who makes the mistake, from the data and models of the lesson.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import mannwhitneyu

import workbench as wb
from tests.course.answers import is_right, judged, solved

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def lesson():
    """What the cells of the notebook compute."""
    fresh = wb.samples.open("initialization/norms").sel(source="ours").mean("seed")
    has_diverged = wb.samples.open("divergence_table")["has_diverged"]
    table = pd.DataFrame(
        {
            "M": fresh["near_unit_mass"].to_series(),
            "diverged": has_diverged.sum(["learning_rate", "seed"]).to_series(),
        }
    )
    table = table.loc[has_diverged["architecture"].values]
    text, _ = wb.tasks.text_bytes(batch_size=64, split="validation", seed=1).batch(0)
    size = {"d_model": 32, "n_layers": 12, "n_heads": 4, "vocab_size": 256, "seed": 42}
    norms = {"Pre-LN": "pre_ln", "Post-LN": "post_ln", "no norm": "none"}
    models = {name: wb.zoo.transformer(norm, **size) for name, norm in norms.items()}
    spectra = {"Pre-LN": wb.profile(models["Pre-LN"], text, n_snapshots=4096, progress=False)}
    flow = {name: wb.flow.measure(model, text[:16], jacobian=False) for name, model in models.items()}
    return {"np": np, "wb": wb, "table": table, "spectra": spectra, "flow": flow}


@pytest.mark.parametrize("number", ["2.1", "2.2", "2.3", "2.4", "2.5", "2.6"])
def test_the_solution_passes(number, lesson):
    assert is_right(number, solved(number, lesson))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Pre-LN", "large next to the small stream"),
        ("Post-LN", "first block also enlarges"),
        ("DeepNorm", "constant above 1"),
        ("RMSNorm", "Answer with one of"),
    ],
)
def test_the_largest_mass(answer, said):
    assert said in judged("2.1", answer)


def test_what_the_sentences_about_masses_say_holds(lesson):
    mass = lesson["table"]["M"]
    assert mass["DeepNorm"] == 0
    assert mass["Pre-LN"] < 0.2
    assert 0.5 < mass["Post-LN"] < mass["No-Norm"]


class TestRule:
    """2.2, the rule that flags designs with a large M."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda t: (t[t["diverged"] > 0]["M"] > 0.5).mean(), "reverse"),
            (lambda t: (t[t["M"] > 0.5]["diverged"] == 0).mean(), "false alarms"),
            (lambda t: ((t["M"] > 0.5) & (t["diverged"] > 0)).mean(), "all designs of the table"),
            (lambda t: (t["M"] > 0.5).mean(), "fraction of designs that are flagged"),
            (lambda t: (t["M"] > 0.5).sum(), "number of flagged designs"),
            (lambda t: 100 * (t[t["M"] > 0.5]["diverged"] > 0).mean(), "percent"),
            (lambda t: t["M"] > 0.5, "shape (7,)"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        assert said in judged("2.2", mistake(lesson["table"]))


class TestDepth:
    """2.3, M by thirds of the depth."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda m: m[11] - m[0], "Single blocks scatter"),
            (lambda m: m[8:].mean() / m[:4].mean(), "divided the two means"),
            (lambda m: m[8:].mean() / m[:4].mean() - 1, "divided the difference"),
            (lambda m: m[8:].mean() - m[4:8].mean(), "in place of the first one"),
            (lambda m: m[4:8].mean() - m[:4].mean(), "in place of the last one"),
            (lambda m: m[8:].mean(), "Subtract M of the first third"),
            (lambda m: m[:4].mean(), "Subtract it from M of the last third"),
            (lambda m: 100 * (m[8:].mean() - m[:4].mean()), "percent"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        assert said in judged("2.3", mistake(lesson["spectra"]["Pre-LN"]["near_unit_mass"].values))

    @pytest.mark.parametrize("measure", ["spectral_radius", "expansive_mass"])
    def test_other_measures(self, lesson, measure):
        of = lesson["spectra"]["Pre-LN"][measure].values
        assert measure.replace("_", " ") in judged("2.3", of[8:].mean() - of[:4].mean())


@pytest.mark.parametrize(
    ("answer", "said"), [("the updates shrink", "about as large"), ("both", "Only one of the two")]
)
def test_the_reason(answer, said):
    """2.4, why eigenvalues approach 1."""
    assert said in judged("2.4", answer)


class TestGain:
    """2.5, the gain of all blocks."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda f: f["Pre-LN"]["signal_gain"].mean(), "mean gain of one block"),
            (lambda f: f["Pre-LN"]["signal_gain"].sum(), "added the gains"),
            (lambda f: 1 + (f["Pre-LN"]["signal_gain"] - 1).sum(), "gains above 1"),
            (lambda f: f["Pre-LN"]["gradient_gain"].prod(), "gradient gain"),
            (lambda f: f["Post-LN"]["signal_gain"].prod(), "Post-LN"),
            (lambda f: f["no norm"]["signal_gain"].prod(), "without normalization"),
            (lambda f: 1 / f["Pre-LN"]["signal_gain"].prod(), "upside down"),
            (lambda f: f["Pre-LN"]["signal_gain"].prod() - 1, "increase"),
            (lambda f: f["Pre-LN"]["signal_gain"][0], "first block alone"),
            (lambda f: f["Pre-LN"]["signal_gain"], "shape (12,)"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        assert said in judged("2.5", mistake(lesson["flow"]))

    def test_the_ratio_of_the_sizes_is_the_same(self, lesson):
        size = lesson["flow"]["Pre-LN"]["state_rms"]
        assert wb.course.check("2.5", size[-1] / size[0]).is_right


class TestAuroc:
    """2.6, a function."""

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda s, d: (s[d][:, None] > s[~d]).mean(), "a tie as 0"),
            (lambda s, d: (s[d][:, None] >= s[~d]).mean(), "a tie as 1"),
            (lambda s, d: mannwhitneyu(s[~d], s[d]).statistic / d.sum() / (~d).sum(), "interchanged"),
            (lambda s, d: ((s > 0.5) == d).mean(), "limit 0.5"),
            (lambda s, d: float(s[d].mean() > s[~d].mean()), "compares the means"),
            (lambda s, d: s[d].mean() - s[~d].mean(), "difference of the two means"),
            (lambda s, d: mannwhitneyu(s[d], s[~d]).statistic, "number of pairs"),
            (lambda s, d: mannwhitneyu(s[d], s[~d]).statistic / len(s) / (len(s) - 1) * 2, "all pairs of runs"),
            (lambda s, d: np.corrcoef(s, d)[0, 1], "is right"),
            (lambda s: 0.5, "raised TypeError"),
        ],
    )
    def test_mistakes(self, wrong, said):
        assert said in judged("2.6", wrong)

    def test_another_way_to_compute_it_passes(self):
        assert wb.course.check("2.6", lambda s, d: mannwhitneyu(s[d], s[~d]).statistic / d.sum() / (~d).sum()).is_right
