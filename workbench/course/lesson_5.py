"""Exercises of lesson 5: from the record of a failed run to its cause."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import xarray as xr

from workbench.course.exercises import ChoiceExercise, NumberExercise, SetExercise
from workbench.diagnosis import Rules
from workbench.diagnosis.diagnose import diagnose
from workbench.io.store import open_run
from workbench.studies import samples

#: Name of a run in the lesson -> recorded run.
_RUNS = {"A": "precision", "B": "healthy", "C": "architecture", "D": "hyperparameter"}
#: Quantities of the log in which the first change is searched, the steps after the warm-up and before the failure in
#: which their usual values are read, and the multiple of these that counts as a change.
_LOGGED, _USUAL, _MULTIPLE = ("loss", "grad_norm", "learning_rate", "batch_size"), slice(20, 100), 2.0
#: The evidence of the lesson: symptoms without facts, since a probe would decide run A at once.
_SYMPTOMS = ("mechanism", "log", "configuration")


def paths() -> dict[str, Path]:
    """Return the paths of the four runs of the lesson by letter."""
    return {letter: samples.failed_run(name) for letter, name in _RUNS.items()}


@cache
def _tree(letter: str) -> xr.DataTree:
    return diagnose(paths()[letter], uses=_SYMPTOMS)


@cache
def _monitors(letter: str) -> xr.Dataset:
    return open_run(paths()[letter])["monitors"].to_dataset().load()


def _failed() -> set[str]:
    return {letter for letter in _RUNS if _tree(letter).attrs["shows_failure"]}


def _failure_step() -> int:
    return int(_tree("D").attrs["failure_step"])


def _first_changed() -> str:
    """Return the logged quantity of run D that first leaves the range of its usual values."""
    log = _monitors("D")
    is_changed = {name: log[name] > _MULTIPLE * log[name].sel(step=_USUAL).max() for name in _LOGGED}
    step = {name: int(found["step"][found][0]) if found.any() else math.inf for name, found in is_changed.items()}
    return min(step, key=lambda name: step[name])


def _weight(cause: str, symptom: str) -> float:
    evidence = _tree("C")["evidence"].to_dataset()
    is_it = (evidence["cause"].values == cause) & (evidence["symptom"].values == symptom)
    return float(evidence["weight"].values[is_it][0])


def _log_odds(symptom: str = "a_block_stands_out") -> float:
    """Return the change of the log-odds of architecture against batch in run C by a symptom."""
    return _weight("architecture", symptom) - _weight("batch", symptom)


def _n_possible(*columns: str) -> int:
    """Return the number of causes in the set of run A, from some columns of its log alone."""
    log = _monitors("A")
    tree = diagnose(log[list(columns)], uses=_SYMPTOMS) if columns else _tree("A")
    return int(tree["causes"]["is_possible"].sum())


def _probability(cause: str, *replays: str) -> float:
    """Return the probability of a cause of run A after replays that all supported the cause they were for."""
    causes, rules = _tree("A")["causes"].to_dataset(), Rules.shipped()
    found = dict(zip(causes["cause"].values.tolist(), causes["probability"].values.tolist(), strict=True))
    for replay in replays:
        found = rules.after(found, replay, supports=True)
    return found[cause]


def _odds(*replays: str, against: str = "batch") -> float:
    return _probability("precision", *replays) / _probability(against, *replays)


def _bayes_factor() -> float:
    return _odds("precision") / _odds()


EXERCISES = (
    SetExercise(
        number="5.1",
        question="Which of the runs A, B, C and D failed?",
        answer=_failed,
        members={
            "A": "Its loss first decreases. Look at its last gradient norms, and at how many steps it has.",
            "B": "Its loss decreases to the end and never rises for long. To call a healthy run failed is a false "
            "alarm: somebody would search for a cause that does not exist.",
            "C": "It has one step only, so there is no curve. Compare its first loss with that of a uniform guess, "
            "ln 10.",
            "D": "It learns for most of its steps, but a run is not healthy because it was healthy once. Look at its "
            "last steps.",
        },
        hints=(
            "A run fails if its loss or gradient norm leaves all bounds, or if its loss rises and stays high.",
            "All runs were planned for 200 steps. Compare this with the number of steps in the table.",
        ),
        solution="answer = {name for name in facts.index if facts.loc[name, 'steps'] < 200}\n",
        explanation=(
            "First decide whether a run failed at all. `wb.diagnose` does the same: 'nothing found' is one of its "
            "causes."
        ),
    ),
    NumberExercise(
        number="5.2",
        question=(
            "At which step did the failure of run D begin? Give the last step at which its loss was still as low as "
            "before."
        ),
        answer=_failure_step,
        tolerance=0,
        mistakes={
            "At this step the loss has its first peak, so the failure began before. Which step is the last with a low "
            "loss?": lambda: _failure_step() + 1,
            "At this step the run was declared diverged. That is the end of the failure; what happened earlier cannot "
            "be its consequence.": lambda: int(_monitors("D")["step"][-1]),
            "This is the step with the lowest loss. Losses of single batches are noisy: later losses are as low as "
            "this one within their noise.": lambda: int(_monitors("D")["loss"].idxmin("step")),
            "At this step the loss is low again for a moment, but it had already risen before. A failure begins "
            "with the first lasting rise.": lambda: int(
                _monitors("D")["loss"].sel(step=slice(_failure_step() + 1, None)).idxmin("step")
            ),
            "This is the end of the warm-up. The loss decreases for many steps after it.": lambda: 20,
        },
        look_at="Print the losses of the last 20 steps of run D.",
        hints=(
            "`logs['D'].tail(20)` shows the last 20 steps.",
            "The loss rises by a factor of eight from one step to the next. The failure begins with the step before.",
        ),
        solution="""\
loss = logs["D"]["loss"]
is_high = loss > 2 * loss.loc[20:100].max()
answer = is_high.idxmax() - 1
""",
        explanation=(
            "A failure often begins long before a run is stopped. A cause acts before the failure begins, so that this "
            "step limits where to look for it."
        ),
    ),
    ChoiceExercise(
        number="5.3",
        question=(
            "Which quantity in the log of run D changed first: `'loss'`, `'grad_norm'`, `'learning_rate'` or "
            "`'batch_size'`?"
        ),
        answer=_first_changed,
        choices={
            "loss": "The loss shows that the run failed. It is the symptom that is to be explained, and another "
            "quantity changed one step before it.",
            "grad_norm": "Large gradients look like a cause, but they come in the same step as the large loss, from "
            "which they are computed. Look for a change one step earlier.",
            "learning_rate": "A setting that changes before the loss can be the cause.",
            "batch_size": "The batch size is the same at all steps, so it cannot explain a change.",
        },
        hints=(
            "The log has one row for each step. Read the rows around the step of exercise 5.2.",
            "The loss of a step is computed before the update of this step, so an update shows in the next row.",
        ),
        solution="""\
log = logs["D"]
is_changed = log > 2 * log.loc[20:100].max()
answer = is_changed.idxmax()[is_changed.any()].idxmin()
""",
        explanation=(
            "The learning rate jumped, its update damaged the parameters, and the next loss was high. Loss and "
            "gradient norm are symptoms: nearly every cause ends in them."
        ),
    ),
    NumberExercise(
        number="5.4",
        question=(
            "By which factor does the symptom `a_block_stands_out` change the odds of `architecture` against `batch` "
            "in run C?"
        ),
        answer=lambda: math.exp(_log_odds()),
        mistakes={
            "This is the change of the log-odds, in nats. The factor of the odds is its exponential.": _log_odds,
            "You used the weight of architecture alone. The symptom is also some evidence for batch: subtract its "
            "weight first.": lambda: math.exp(_weight("architecture", "a_block_stands_out")),
            "You added the two weights. The symptom is evidence for both causes, so only the difference "
            "decides between them.": lambda: math.exp(
                _weight("architecture", "a_block_stands_out") + _weight("batch", "a_block_stands_out")
            ),
            "This is the weight of architecture. The question is about a factor of odds, against another "
            "cause.": lambda: _weight("architecture", "a_block_stands_out"),
            "This is 10 to the power of the log-odds. The weights are natural logarithms.": lambda: 10 ** _log_odds(),
            "This is 2 to the power of the log-odds. The weights are natural logarithms.": lambda: 2 ** _log_odds(),
            "These are the odds of batch against architecture. Subtract in the other order.": lambda: math.exp(
                -_log_odds()
            ),
            "You divided the weights. Logarithms are subtracted where odds are divided.": lambda: (
                _weight("architecture", "a_block_stands_out") / _weight("batch", "a_block_stands_out")
            ),
            "This is the symptom `block_blows_up`. Read the row of `a_block_stands_out`.": lambda: math.exp(
                _log_odds("block_blows_up")
            ),
        },
        look_at="Read the weights of `a_block_stands_out` for both causes in `weights`, and subtract them.",
        hints=(
            "The weights are contributions to log-odds. The difference of two of them is the change of the log-odds "
            "of one cause against the other.",
            "`np.exp` of the difference is the factor of the odds.",
        ),
        solution="""\
row = weights.loc["a_block_stands_out"]
answer = np.exp(row["architecture"] - row["batch"])
""",
        explanation=(
            "One symptom is rarely evidence for one cause alone. A ranking adds up the evidence of all symptoms, and "
            "what is missing in a record adds nothing."
        ),
    ),
    NumberExercise(
        number="5.5",
        question=(
            "How many causes does the set of run A hold if only `loss` and `grad_norm` were logged? Diagnose the two "
            "columns alone."
        ),
        answer=lambda: _n_possible("loss", "grad_norm"),
        tolerance=0,
        mistakes={
            "This is the set from the whole record. Pass a dataset with the two columns to `wb.diagnose`.": lambda: (
                _n_possible()
            ),
            "This is the first cause alone. A set holds all causes that are not excluded.": lambda: 1,
            "These are all causes of the table, with the excluded ones. Count those with `is_possible`.": lambda: len(
                _tree("A")["causes"]["cause"]
            ),
            "This is the set if learning rate and batch size were logged as well. Pass two columns.": lambda: (
                _n_possible("loss", "grad_norm", "learning_rate", "batch_size")
            ),
            "This is the number of causes that are excluded. Count the others.": lambda: (
                len(_tree("A")["causes"]["cause"]) - _n_possible("loss", "grad_norm")
            ),
        },
        look_at="Diagnose `monitors[['loss', 'grad_norm']]` and add up `is_possible` of its causes.",
        hints=(
            "`wb.diagnose` accepts a dataset with a few columns in place of a path.",
            "`is_possible` of the table `causes` is True for the causes in the set.",
        ),
        solution="""\
few = wb.diagnose(monitors[["loss", "grad_norm"]], uses=symptoms)
answer = int(few["causes"]["is_possible"].sum())
""",
        explanation=(
            "The two curves exclude little, since most causes look alike in them. A larger set is the right answer to "
            "less data, and it takes more replays to decide."
        ),
    ),
    NumberExercise(
        number="5.6",
        question=(
            "The replay with exact arithmetic succeeded. By which factor did this raise the odds of precision against "
            "a batch that is too small? Compare the columns of `probabilities`."
        ),
        answer=_bayes_factor,
        mistakes={
            "These are the odds after the replay. The factor is their ratio to the odds before it.": lambda: _odds(
                "precision"
            ),
            "These are the odds before the replay. How large are they after it?": lambda: _odds(),
            "This is the ratio of the probabilities of precision after and before. Odds compare two causes.": lambda: (
                _probability("precision", "precision") / _probability("precision")
            ),
            "This is the probability of precision after the replay. Compare odds, before and after.": lambda: (
                _probability("precision", "precision")
            ),
            "The factor is upside down: odds after divided by odds before.": lambda: 1 / _bayes_factor(),
            "This is the factor of the replay with a quarter of the learning rate. Compare with the replay with exact "
            "arithmetic.": lambda: _odds("learning_rate") / _odds(),
            "You compared precision with a learning rate that is too high. The question is about `batch`.": lambda: (
                _odds("precision", against="learning_rate") / _odds(against="learning_rate")
            ),
            "You compared precision with all other causes together. Use the probability of `learning_rate`.": lambda: (
                _probability("precision", "precision")
                / (1 - _probability("precision", "precision"))
                / (_probability("precision") / (1 - _probability("precision")))
            ),
        },
        look_at="Divide `precision` by `batch` in both columns, and then one ratio by the other.",
        hints=(
            "Odds of one cause against another are the ratio of their probabilities.",
            "Divide the odds in the column `exact arithmetic` by the odds in the column `before`.",
        ),
        solution="""\
odds = probabilities.loc["precision"] / probabilities.loc["batch"]
answer = odds["exact arithmetic"] / odds["before"]
""",
        explanation=(
            "This is the ratio of two frequencies: how often exact arithmetic helped recorded runs with a precision "
            "fault, and how often it helped runs with too small a batch. A change that helps against many causes, such "
            "as a larger batch, decides little."
        ),
    ),
)
