"""Answers to lesson 1: right ones pass, and each mistake gets the sentence that names it.

Wrong answers are computed here as somebody would who makes the mistake, from the models and spectra of the lesson.
"""

import numpy as np
import pytest
import torch

import workbench as wb
from tests.course.answers import is_right, judged, solved

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def lesson():
    """What the cells of the notebook compute."""
    text, _ = wb.tasks.text_bytes(batch_size=64, split="validation", seed=1).batch(0)
    size = {"d_model": 32, "n_layers": 8, "n_heads": 4, "vocab_size": 256, "seed": 42}
    models = {"Pre-LN": wb.zoo.transformer("pre_ln", **size), "no norm": wb.zoo.transformer("none", **size)}
    spectra = {name: wb.profile(model, text, n_snapshots=4096, progress=False) for name, model in models.items()}
    passed = []
    for block in models["Pre-LN"].blocks:
        block.register_forward_hook(lambda _, given, after: passed.append((given[0], after)))
    with torch.no_grad():
        models["Pre-LN"](text)
    entering, leaving = zip(*passed, strict=True)
    return {"np": np, "wb": wb, "spectra": spectra, "entering": entering, "leaving": leaving}


@pytest.mark.parametrize("number", ["1.1", "1.2", "1.3", "1.4", "1.5", "1.6"])
def test_the_solution_passes(number, lesson):
    assert is_right(number, solved(number, lesson))


def test_the_models_differ_as_the_lesson_says(lesson):
    bare, normed = lesson["spectra"]["no norm"], lesson["spectra"]["Pre-LN"]
    assert (bare["near_unit_mass"] == 1).all()
    assert (normed["near_unit_mass"] < 0.5).all()
    assert (normed["expansive_mass"] > 0).all()
    assert (normed["contractive_mass"] > 0).all()
    assert float(normed["is_reliable"][0].mean()) < 0.5 < float(normed["is_reliable"][-1].mean())


class TestUpdate:
    """1.1, the size of an update."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda h, k: k[0].norm() / h[0].norm(), "update is their difference"),
            (lambda h, k: (k[0].norm() - h[0].norm()) / h[0].norm(), "subtracted two norms"),
            (lambda h, k: (k[1] - h[1]).norm() / h[1].norm(), "counted from 0"),
            (lambda h, k: (k[-1] - h[-1]).norm() / h[-1].norm(), "last block"),
            (lambda h, k: (k[0] - h[0]).norm() / k[0].norm(), "states that leave the block"),
            (lambda h, k: h[0].norm() / (k[0] - h[0]).norm(), "upside down"),
            (lambda h, k: (k[0] - h[0]).square().sum() / h[0].square().sum(), "square root"),
            (lambda h, k: (k[0] - h[0]).norm(), "update alone"),
            (lambda h, k: 100 * (k[0] - h[0]).norm() / h[0].norm(), "percent"),
            (lambda h, k: k[0] - h[0], "shape (64, 64, 32)"),
            (lambda h, k: 0.9, "too large"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        assert said in judged("1.1", mistake(lesson["entering"], lesson["leaving"]))


class TestTenBlocks:
    """1.2, the factor of ten blocks."""

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (np.hypot(0.8, 0.5), "factor of one block"),
            (0.8**10, "real part alone"),
            (1.3**10, "added real and imaginary part"),
            (10 * np.hypot(0.8, 0.5), "multiplied, not added"),
            ((0.64 + 0.25) ** 10, "left out the square root"),
            (1 - np.hypot(0.8, 0.5) ** 10, "loss of size"),
            (np.hypot(0.8, 0.5) ** 9, "nine blocks"),
            ((0.8 + 0.5j) ** 10, "complex number"),
            (1, "too large"),
        ],
    )
    def test_mistakes(self, answer, said):
        assert said in judged("1.2", answer)


class TestNearUnitMass:
    """1.3, a function."""

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda m: ((m > 0.9) & (m < 1.05)).sum() / (~np.isnan(m)).sum(), "exactly 0.90 or 1.05"),
            (lambda m: ((m >= 0.9) & (m <= 1.05)).mean(), "not used in the denominator"),
            (lambda m: ((m >= 0.9) & (m <= 1.05)).sum(), "number of modes"),
            (lambda m: 100 * ((m >= 0.9) & (m <= 1.05)).sum() / np.isfinite(m).sum(), "percent"),
            (lambda m: ((m >= 0.95) & (m <= 1.05)).sum() / np.isfinite(m).sum(), "0.95 to 1.05"),
            (lambda m: (abs(m - 1) <= 0.1).sum() / np.isfinite(m).sum(), "0.90 to 1.10"),
            (lambda m: (m >= 0.9).sum() / np.isfinite(m).sum(), "no upper limit"),
            (lambda m: (m <= 1.05).sum() / np.isfinite(m).sum(), "no lower limit"),
            (lambda m: ((m < 0.9) | (m > 1.05)).sum() / np.isfinite(m).sum(), "not near 1"),
            (np.nanmean, "mean modulus"),
            (lambda m: (m >= 0.9) & (m <= 1.05), "is right"),
            (lambda: 0.5, "raised TypeError"),
            (0.33, "without parentheses"),
        ],
    )
    def test_mistakes(self, wrong, said):
        assert said in judged("1.3", wrong)


class TestReliable:
    """1.4, the reliable modes of the first block."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda s: s["Pre-LN"]["is_reliable"].mean(), "mean over all blocks"),
            (lambda s: s["Pre-LN"]["is_reliable"][1].mean(), "counted from 0"),
            (lambda s: 1 - s["Pre-LN"]["is_reliable"][0].mean(), "not reliable"),
            (lambda s: s["no norm"]["is_reliable"][0].mean(), "model without normalization"),
            (lambda s: s["Pre-LN"]["is_reliable"][0].sum(), "number of modes"),
            (lambda s: s["Pre-LN"]["residual"][0].mean(), "mean residual"),
            (lambda s: s["Pre-LN"]["is_reliable"][0], "shape (32,)"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        assert said in judged("1.4", mistake(lesson["spectra"]))


class TestMass:
    """1.5, M of the reliable modes."""

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda s, near, keep: near.mean(), "counted all modes"),
            (lambda s, near, keep: near[keep].mean(), "all blocks together"),
            (lambda s, near, keep: (near & keep).mean(), "divided by all modes"),
            (lambda s, near, keep: keep.mean(), "fraction of modes that are reliable"),
            (lambda s, near, keep: keep[near].mean(), "reverse"),
            (lambda s, near, keep: near[0][keep[0]].mean(), "first block alone"),
            (lambda s, near, keep: near[-1][keep[-1]].mean(), "last block alone"),
            (lambda s, near, keep: sum(a[b].mean() for a, b in zip(near, keep, strict=True)), "added the blocks up"),
            (lambda s, near, keep: s["Pre-LN"]["spectral_radius"].mean(), "spectral radius"),
            (lambda s, near, keep: abs(s["Pre-LN"]["eigenvalue"].values)[keep].mean(), "averaged the moduli"),
            (lambda s, near, keep: s["no norm"]["near_unit_mass"].mean(), "model without normalization"),
            (lambda s, near, keep: 100 * np.mean([a[b].mean() for a, b in zip(near, keep, strict=True)]), "percent"),
            (lambda s, near, keep: s["Pre-LN"]["near_unit_mass"], "shape (8,)"),
            (lambda s, near, keep: s["Pre-LN"].mean(), "Select one by its name"),
        ],
    )
    def test_mistakes(self, lesson, mistake, said):
        of = lesson["spectra"]["Pre-LN"]
        modulus = abs(of["eigenvalue"].values)
        near = (modulus >= 0.90) & (modulus <= 1.05)
        assert said in judged("1.5", mistake(lesson["spectra"], near, of["is_reliable"].values))

    def test_expansive_modes_are_less_reliable(self, lesson):
        of = lesson["spectra"]["Pre-LN"]
        reliable = wb.remeasure(of, reliable_only=True)
        assert float(reliable["expansive_mass"].mean()) < 2 / 3 * float(of["expansive_mass"].mean())
        assert abs(float((reliable["near_unit_mass"] - of["near_unit_mass"]).mean())) < 0.05


@pytest.mark.parametrize(
    ("answer", "said"),
    [("stays", "only 20 states"), ("rises to 1", "line through two points"), (0, "Answer with one of")],
)
def test_few_states(answer, said):
    """1.6, the nonlinearity ratio of too few states."""
    assert said in judged("1.6", answer)
