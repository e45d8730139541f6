"""Exercises of lesson 2: what normalization and depth change."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import xarray as xr

from workbench.course.exercises import ChoiceExercise, FunctionExercise, NumberExercise
from workbench.flow import measure
from workbench.koopman.measures import depth_thirds
from workbench.models.profile import profile
from workbench.studies import samples
from workbench.tasks.sequences import text_bytes
from workbench.zoo.architecture_config import Norm
from workbench.zoo.constructors import transformer

#: The models of the notebook.
_SIZE: dict[str, Any] = {"d_model": 32, "n_layers": 12, "n_heads": 4, "vocab_size": 256, "seed": 42}
#: The rule of exercise 2.2 flags designs with a larger M.
_LIMIT = 0.5


@cache
def _untrained() -> xr.Dataset:
    """Recorded measures of the normalizations that were trained, mean over seeds."""
    fresh = samples.open("initialization/norms").sel(source="ours").mean("seed")
    return fresh.sel(architecture=samples.open("divergence_table")["architecture"].values)


def _largest_mass() -> str:
    mass = _untrained()["near_unit_mass"].sel(architecture=["Pre-LN", "Post-LN", "DeepNorm", "No-Norm"])
    return str(mass["architecture"].values[mass.values.argmax()])


@cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Whether each normalization is flagged by the rule, and whether any of its runs diverged."""
    diverged = samples.open("divergence_table")["has_diverged"].any(["learning_rate", "seed"])
    return (_untrained()["near_unit_mass"] > _LIMIT).values, diverged.values


def _flagged(*, of_diverged: bool) -> float:
    """Fraction of the normalizations that diverged that are flagged, or of the flagged ones that diverged."""
    is_flagged, has_diverged = _rule()
    return float((is_flagged & has_diverged).sum() / (has_diverged if of_diverged else is_flagged).sum())


@cache
def _spectra() -> xr.Dataset:
    text, _ = text_bytes(batch_size=64, split="validation", seed=1).batch(0)
    return profile(transformer("pre_ln", **_SIZE), text, n_snapshots=4096, progress=False)


def _third(name: str, measure: str = "near_unit_mass") -> float:
    return float(depth_thirds(_spectra())[measure].sel(third=name))


@cache
def _flow(norm: Norm) -> xr.Dataset:
    text, _ = text_bytes(batch_size=64, split="validation", seed=1).batch(0)
    return measure(transformer(norm, **_SIZE), text[:16], jacobian=False)


def _gain(norm: Norm = "pre_ln", name: str = "signal_gain") -> float:
    return float(_flow(norm)[name].prod())


def _reason() -> str:
    """Whether stream or updates change from the first to the last third of Pre-LN, by more than a fifth."""
    stream = _flow("pre_ln")["state_rms"].values[:-1]
    update = stream * np.linalg.norm(_flow("pre_ln")["branch_ratio"].values, axis=-1)
    third = len(stream) // 3
    grows = stream[-third:].mean() > 1.2 * stream[:third].mean()
    shrinks = update[-third:].mean() < update[:third].mean() / 1.2
    return "the stream grows" if grows and not shrinks else "the updates shrink" if shrinks and not grows else "both"


def _auroc(score: np.ndarray, has_diverged: np.ndarray) -> float:
    bad, good = score[has_diverged], score[~has_diverged]
    return float(np.mean((bad[:, None] > good) + (bad[:, None] == good) / 2))


def _compared(score: np.ndarray, has_diverged: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the runs that diverged as a column, and of the others as a row."""
    return score[has_diverged][:, None], score[~has_diverged]


EXERCISES = (
    ChoiceExercise(
        number="2.1",
        question=(
            "Predict: which design has the largest M before training: `'Pre-LN'`, `'Post-LN'`, `'DeepNorm'` (here "
            "alpha x + f(LN x), with alpha above 1) or `'No-Norm'`?"
        ),
        answer=_largest_mass,
        choices={
            "Pre-LN": (
                "With Pre-LN each branch receives normalized states and writes an update that is large next to the "
                "small stream of an untrained model. This moves modes away from the unit circle."
            ),
            "Post-LN": (
                "Post-LN has a large M too, since its later blocks add small updates to states of normalized size. But "
                "its first block also enlarges the small embeddings, and those modes lie far outside the circle."
            ),
            "DeepNorm": (
                "DeepNorm multiplies the stream by a constant above 1 in each block. Where does this move all modes?"
            ),
            "No-Norm": "Without normalization a small stream gives small updates.",
        },
        hints=(
            "M is large if each block passes on its states almost unchanged.",
            "Which of the four has the smallest updates if all weights and embeddings are small?",
        ),
        solution="answer = 'No-Norm'\n",
        explanation=(
            "Without normalization the updates of an untrained model are tiny, because the embeddings and the weights "
            "are small. Each block is close to the identity."
        ),
    ),
    NumberExercise(
        number="2.2",
        question=(
            "The rule *a design diverges if its M is above 0.5* flags some designs of the table. Which fraction of the "
            "flagged designs had a run that diverged?"
        ),
        answer=lambda: _flagged(of_diverged=False),
        mistakes={
            "This is the reverse: the fraction of the designs that diverged that are flagged. A rule that flags "
            "everything would reach that too. Divide by the number of flagged designs.": lambda: _flagged(
                of_diverged=True
            ),
            "This is the fraction of false alarms: flagged designs that did not diverge.": lambda: (
                1 - _flagged(of_diverged=False)
            ),
            "You divided by all designs of the table. Divide by the number of flagged ones.": lambda: float(
                (_rule()[0] & _rule()[1]).mean()
            ),
            "This is the fraction of designs that are flagged. How many of these had a run that diverged?": lambda: (
                float(_rule()[0].mean())
            ),
            "This is the number of flagged designs. The question is about a fraction of them.": lambda: float(
                _rule()[0].sum()
            ),
        },
        look_at="Count the designs with M above 0.5, then those among them with runs that diverged.",
        is_fraction=True,
        hints=(
            "Which rows of the table have an M above 0.5?",
            "How many of these rows have a number of diverged runs above 0?",
        ),
        solution="""\
flagged = table[table["M"] > 0.5]
answer = (flagged["diverged"] > 0).mean()
""",
        explanation=(
            "The rule finds the design that diverges, but most of its warnings are false. Designs with a large M that "
            "train well exist: both forms of Post-LN."
        ),
    ),
    NumberExercise(
        number="2.3",
        question=(
            "M of Pre-LN depends on the depth of the block. By how much is it larger in the last third of the blocks "
            "than in the first third? Subtract the two means."
        ),
        answer=lambda: _third("late") - _third("early"),
        mistakes={
            "You compared the last block with the first one. Single blocks scatter; take the mean of each third.": (
                lambda: float(_spectra()["near_unit_mass"][-1] - _spectra()["near_unit_mass"][0])
            ),
            "You divided the two means. The question is about their difference.": lambda: (
                _third("late") / _third("early")
            ),
            "You divided the difference by M of the first third. Give the difference itself.": lambda: (
                _third("late") / _third("early") - 1
            ),
            "You took the middle third in place of the first one.": lambda: _third("late") - _third("middle"),
            "You took the middle third in place of the last one.": lambda: _third("middle") - _third("early"),
            "This is M of the last third. Subtract M of the first third.": lambda: _third("late"),
            "This is M of the first third. Subtract it from M of the last third.": lambda: _third("early"),
            "This is the difference of the spectral radius. M is `near_unit_mass`.": lambda: (
                _third("late", "spectral_radius") - _third("early", "spectral_radius")
            ),
            "This is the difference of the expansive mass. M is `near_unit_mass`.": lambda: (
                _third("late", "expansive_mass") - _third("early", "expansive_mass")
            ),
        },
        look_at="`wb.depth_thirds` has one value for each third of the blocks: early, middle and late.",
        is_fraction=True,
        hints=(
            'The function `wb.depth_thirds(spectra["Pre-LN"])` averages over thirds of the blocks.',
            'Select a third with `.sel(third="late")`.',
        ),
        solution="""\
thirds = wb.depth_thirds(spectra["Pre-LN"])["near_unit_mass"]
answer = thirds.sel(third="late") - thirds.sel(third="early")
""",
        explanation="Later blocks of Pre-LN are closer to the identity than early ones. The next exercise asks why.",
    ),
    ChoiceExercise(
        number="2.4",
        question=(
            "Why do the eigenvalues of Pre-LN approach 1 with depth? Use the table of sizes above: `'the stream "
            "grows'`, `'the updates shrink'` or `'both'`."
        ),
        answer=_reason,
        choices={
            "the stream grows": "Compare the first and the last rows of both columns.",
            "the updates shrink": (
                "Compare the first and the last values of the column *update*: they are about as large. It is the "
                "other column that changes."
            ),
            "both": (
                "Only one of the two columns changes clearly from the first third of the blocks to the last. Small "
                "differences between neighboring blocks are scatter."
            ),
        },
        hints=(
            "The eigenvalues depend on the size of the update relative to the state to which it is added.",
            "Compare the means of the first four and the last four rows of both columns.",
        ),
        solution="answer = 'the stream grows'\n",
        explanation=(
            "Each branch receives normalized states, so that all updates of the untrained model are about equally "
            "large. They are added to a stream that grows, and change it less and less."
        ),
    ),
    NumberExercise(
        number="2.5",
        question=(
            "The signal gain of a block is the size of the states that leave it over that of those that enter. "
            "By which factor do all twelve blocks of Pre-LN together enlarge the stream?"
        ),
        answer=_gain,
        mistakes={
            "This is the mean gain of one block. Each block enlarges what the one before it passed on.": lambda: float(
                _flow("pre_ln")["signal_gain"].mean()
            ),
            "You added the gains. A gain is a factor, so the gains of successive blocks are multiplied.": lambda: float(
                _flow("pre_ln")["signal_gain"].sum()
            ),
            "You added what each block gains above 1. This neglects that each block enlarges what the earlier ones "
            "have gained: multiply the gains.": lambda: float(1 + (_flow("pre_ln")["signal_gain"] - 1).sum()),
            "This is the gradient gain. The stream of the forward pass is measured by `signal_gain`.": lambda: _gain(
                name="gradient_gain"
            ),
            "This is Post-LN, whose first block normalizes the small embeddings. Use the flow of Pre-LN.": lambda: (
                _gain("post_ln")
            ),
            "This is the model without normalization, whose stream keeps its size. Use the flow of Pre-LN.": lambda: (
                _gain("none")
            ),
            "The factor is upside down: the states that leave belong above the fraction bar.": lambda: 1 / _gain(),
            "This is the increase. The factor is 1 plus the increase.": lambda: _gain() - 1,
            "This is the gain of the first block alone.": lambda: float(_flow("pre_ln")["signal_gain"][0]),
        },
        look_at='Look at `flow["Pre-LN"]["signal_gain"]`, one factor for each block.',
        tolerance=0.01,
        hints=(
            "How do you combine factors that are applied one after another?",
            "The method `prod()` multiplies all entries.",
        ),
        solution='answer = flow["Pre-LN"]["signal_gain"].prod()\n',
        explanation=(
            "The same factor is the ratio of the sizes of the stream after the last and before the first block. "
            "With Post-LN nearly all of the growth happens in the first block."
        ),
    ),
    FunctionExercise(
        number="2.6",
        question=(
            "The AUROC of a score is the probability that a run that diverged has a larger score than a run that did "
            "not; a tie counts one half. Write it as a function of the scores and of the booleans `has_diverged`."
        ),
        answer=lambda: _auroc,
        cases=lambda: [
            (np.array([0.9, 0.8, 0.2, 0.1]), np.array([True, True, False, False])),
            (np.array([0.1, 0.7, 0.4, 0.3, 0.6]), np.array([True, False, True, False, False])),
            (np.array([0.5, 0.5, 0.5, 0.2]), np.array([True, False, False, True])),
            (np.array([3.0, 1.0, 2.0, 2.0, 5.0, 2.0]), np.array([True, False, True, False, False, True])),
        ],
        mistakes={
            "Your function counts a tie as 0. If all runs have the same score, the AUROC must be 0.5: count a tie as "
            "one half.": lambda s, d: np.mean(np.greater(*_compared(s, d))),
            "Your function counts a tie as 1. If all runs have the same score, the AUROC must be 0.5: count a tie as "
            "one half.": lambda s, d: np.mean(np.greater_equal(*_compared(s, d))),
            "Your function has the two groups interchanged: a score that is larger for runs that diverged must give "
            "1, not 0.": lambda s, d: 1 - _auroc(s, d),
            "Your function compares each score with the limit 0.5, which gives the accuracy of one rule. The AUROC "
            "needs no limit: compare each run that diverged with each that did not.": lambda s, d: np.mean(
                (s > 0.5) == d
            ),
            "Your function compares the means of the two groups. One extreme run can change a mean; the AUROC compares "
            "all pairs of runs.": lambda s, d: float(s[d].mean() > s[~d].mean()),
            "Your function returns the difference of the two means. The AUROC is a probability: compare all pairs.": (
                lambda s, d: s[d].mean() - s[~d].mean()
            ),
            "Your function returns a number of pairs. Divide it by the number of all pairs.": lambda s, d: (
                _auroc(s, d) * d.sum() * (~d).sum()
            ),
            "Your function divides by all pairs of runs. Divide by the pairs of one run that diverged and one that did "
            "not.": lambda s, d: _auroc(s, d) * d.sum() * (~d).sum() / (len(d) * (len(d) - 1) / 2),
        },
        hints=(
            "Divide the scores into two groups: `score[has_diverged]` and `score[~has_diverged]`.",
            "`bad[:, None] > good` compares each entry of one array with each entry of the other.",
            "Add half of `bad[:, None] == good`, and take the mean over all pairs.",
        ),
        solution="""\
def auroc(score, has_diverged):
    bad, good = score[has_diverged], score[~has_diverged]
    higher = bad[:, None] > good
    tied = bad[:, None] == good
    return np.mean(higher + tied / 2)

answer = auroc
""",
        explanation="An AUROC of 0.5 is chance, 1 is a perfect ranking, and 0 is a perfect ranking in reverse.",
    ),
)
