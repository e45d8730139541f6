"""Lesson 4: early warning. Its data, and its exercises with the mistakes that are explained."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from workbench.callbacks import alarms
from workbench.callbacks.alarms import Alarms
from workbench.course.exercises import Exercise, FunctionExercise, NumberExercise, SetExercise
from workbench.io.store import open_run
from workbench.studies import early_warning, samples

if TYPE_CHECKING:
    import pandas as pd

#: The simple rule of the lesson: an alarm if the gradient norm exceeds the mean of the last _N_PAST steps by this
#: multiple of their standard deviation, from step _FIRST on.
_N_PAST, _MULTIPLE, _FIRST = 50, 3.0, 200
#: False alarms that all signals together may raise, and the number of steps that this refers to.
_FALSE_ALARMS, _PER_STEPS = 1.0, 100_000


def simple_alarms(signal: pd.Series, multiple: float) -> pd.Index:
    """Return the steps, from 200 on, at which a signal exceeds the mean of its last 50 values by far."""
    past = signal.shift().rolling(_N_PAST)
    is_high = signal > past.mean() + multiple * past.std()
    return signal.index[is_high & (signal.index >= _FIRST)]


@cache
def _run(name: str) -> xr.DataTree:
    return open_run(samples.paired_run(name)).load()


@cache
def _onset() -> int:
    events = _run("faulted")["events"].to_dataset()
    return int(events["step"].values[events["kind"].values == "fault"][0])


@cache
def _lead_time() -> alarms.LeadTime:
    run = _run("faulted")
    last = int(run["monitors"].to_dataset()["step"].values[-1])
    return alarms.lead_time(alarms.recorded_alarms(run), divergence=last, since=_onset())


def _first_alarms() -> tuple[int, int, int]:
    """Return the steps of the first alarm of a mechanism, the first of loss or gradient norm, and the divergence."""
    found = _lead_time()
    assert found.mechanism is not None
    assert found.outcome is not None
    assert found.divergence is not None
    return found.mechanism.step, found.outcome.step, found.divergence


@cache
def _norm(name: str) -> pd.Series:
    return _run(name)["monitors"]["grad_norm"].to_series()


def _false_rate(name: str = "healthy", *, n_steps: int | None = None) -> float:
    n_steps = int((_norm(name).index >= _FIRST).sum()) if n_steps is None else n_steps
    return len(simple_alarms(_norm(name), _MULTIPLE)) / n_steps * _PER_STEPS


def _delay_without_false_alarms() -> float:
    """Return the delay of the simple rule, with the smallest whole multiple at which the healthy run has no alarm."""
    return _delay(_smallest_multiple())


@cache
def _smallest_multiple() -> int:
    healthy = _norm("healthy")
    return next(multiple for multiple in range(1, 100) if not len(simple_alarms(healthy, multiple)))


def _delay(multiple: float, *, since: int = 0) -> float:
    """Return the steps from the onset to the first alarm of the simple rule in the faulted run at or after a step."""
    raised = simple_alarms(_norm("faulted"), multiple)
    return float(raised[raised >= since][0] - _onset())


@cache
def _n_signals() -> int:
    """Return the number of signals of the faulted run that share the rate of false alarms."""
    watching = Alarms()
    alarms.replay(_run("faulted"), watching)
    shares = {each.name for each in alarms.WATCHED if math.isnan(each.threshold)}
    return len(watching.scores().keys() & shares)


def _evidence(rate: float, *, n_signals: int) -> float:
    return alarms.Calibration({}, n_steps=0).threshold("loss", rate, n_signals=n_signals)


@cache
def _test_set() -> xr.Dataset:
    return early_warning.of_set(samples.open("early_warning"), "locked")


def _blind_kinds() -> set[str]:
    kinds = early_warning.by_kind(_test_set())
    is_blind = (kinds["n_harmful"] > 0) & kinds["delay_of_loss"].isnull()
    return set(kinds["kind"].values[is_blind.values].tolist())


def _loss_alone(*, among: str = "harmful", by: str = "soon", detector: str = "loss alone") -> float:
    """Return the fraction of runs with a fault for which a detector raises an alarm."""
    runs = _test_set()
    delay = early_warning.delays(runs, detector=detector).values
    counts = early_warning.harmful(runs).values if among == "harmful" else runs["start"].notnull().values
    raised = delay <= early_warning.SOON if by == "soon" else np.isfinite(delay)
    return float(raised[counts].mean())


def fault_probability(sensitivity: float, n_faults: float, n_false: float) -> float:
    """Return the probability that a fault is behind an alarm; both counts are for one number of steps."""
    n_true = sensitivity * n_faults
    return n_true / (n_true + n_false)


EXERCISES: tuple[Exercise, ...] = (
    NumberExercise(
        number="4.1",
        question=(
            "The *lead time* is the number of steps from the first alarm of a mechanism to the first alarm of loss or "
            "gradient norm, or to the divergence, whichever comes first. How long is it in the faulted run?"
        ),
        answer=lambda: _lead_time().steps,
        tolerance=0,
        mistakes={
            "This is the delay: the steps from the onset of the fault to the first alarm. The lead time begins at that "
            "alarm.": lambda: _first_alarms()[0] - _onset(),
            "These are the steps from the onset of the fault to the alarm of the gradient norm. A lead time begins "
            "at the first alarm, since nobody could have acted before it.": lambda: _first_alarms()[1] - _onset(),
            "This lead time ends at the divergence, but the gradient norm raised an alarm before. A lead time ends at "
            "the first of both.": lambda: _first_alarms()[2] - _first_alarms()[0],
            "These are the steps from the onset of the fault to the divergence. Which alarm came first, and which "
            "signal of those that everybody watches was the next?": lambda: _first_alarms()[2] - _onset(),
            "The size is right, but you subtracted in the wrong order: a lead time is positive if the mechanism was "
            "first.": lambda: _first_alarms()[0] - _first_alarms()[1],
            "This is the step of the first alarm. A lead time is a number of steps between two alarms.": lambda: float(
                _first_alarms()[0]
            ),
            "This is the step of the alarm of the gradient norm. Subtract the step of the first alarm.": lambda: float(
                _first_alarms()[1]
            ),
        },
        look_at="In the table above, subtract the step of the first alarm from that of the second one.",
        hints=(
            "The table of alarms has one alarm of a mechanism and one of the gradient norm.",
            "`wb.alarms.lead_time(raised, divergence=..., since=...)` computes it; its attribute is `steps`.",
        ),
        solution="""\
raised = wb.alarms.recorded_alarms(runs["faulted"])
last = int(runs["faulted"]["monitors"]["step"][-1])
answer = wb.alarms.lead_time(raised, divergence=last, since=onset).steps
""",
        explanation=(
            "The probe saw the fault itself, hundreds of steps before the gradient norm grew enough for an alarm. In "
            "these steps the run can still be stopped, and continued from a checkpoint with a sound kernel."
        ),
    ),
    NumberExercise(
        number="4.2",
        question=(
            "How many false alarms does the simple rule raise in 100,000 healthy steps, with three standard deviations "
            "on the gradient norm? Estimate it from the healthy run, whose evaluated steps begin at step 200."
        ),
        answer=_false_rate,
        mistakes={
            "This is the number of alarms in this run. Divide it by the number of evaluated steps, and multiply by "
            "100,000.": lambda: len(simple_alarms(_norm("healthy"), _MULTIPLE)),
            "You divided by all steps of the run. The rule is silent before step 200, so those steps do not "
            "count.": lambda: _false_rate(n_steps=len(_norm("healthy"))),
            "This is the fraction of steps with a false alarm. Multiply it by 100,000.": lambda: (
                _false_rate() / _PER_STEPS
            ),
            "This is the percentage of steps with a false alarm. The question asks for 100,000 steps, not for "
            "100.": lambda: _false_rate() / 1000,
            "You counted the alarms of the faulted run. Only an alarm without a fault is false.": lambda: _false_rate(
                "faulted"
            ),
            "This is what independent values from a normal distribution would give. Count the alarms of the "
            "recorded run: gradient norms have a heavier tail.": lambda: _PER_STEPS * math.erfc(3 / math.sqrt(2)) / 2,
        },
        look_at="Count the alarms of `simple_alarms(norm['healthy'], 3)` and divide by the steps from 200 on.",
        hints=(
            "A rate is a number of alarms, divided by a number of steps.",
            "The healthy run has `(norm['healthy'].index >= 200).sum()` evaluated steps.",
        ),
        solution="""\
n_alarms = len(simple_alarms(norm["healthy"], 3))
n_steps = (norm["healthy"].index >= 200).sum()
answer = n_alarms / n_steps * 100_000
""",
        explanation=(
            "Three standard deviations sound strict, but a rule that is evaluated at every step of one signal is wrong "
            "thousands of times in 100,000 steps. People soon ignore such alarms."
        ),
    ),
    NumberExercise(
        number="4.3",
        question=(
            "Find the smallest whole multiple at which the simple rule raises no alarm in the healthy run. How many "
            "steps after the onset of the fault does the rule with this multiple raise its first alarm in the faulted "
            "run?"
        ),
        answer=_delay_without_false_alarms,
        tolerance=0,
        mistakes={
            "With three standard deviations the first alarm comes before the onset of the fault. It is a false "
            "alarm and not an early one.": lambda: _delay(_MULTIPLE),
            "With three standard deviations the healthy run raises this alarm as well, so the fault is not its "
            "cause.": lambda: _delay(_MULTIPLE, since=_onset()),
            "This alarm follows the fault, but with three standard deviations the rule also raises many false ones. "
            "Increase the multiple until the healthy run has none.": lambda: _delay(_MULTIPLE, since=_onset() + 1),
            "With this multiple the healthy run still has alarms. Increase it until there is none.": lambda: _delay(
                _smallest_multiple() - 3
            ),
            "This is the step of the alarm. Subtract the onset of the fault.": lambda: (
                _delay_without_false_alarms() + _onset()
            ),
            "This is the multiple. The question asks for the delay of the alarm.": lambda: float(_smallest_multiple()),
        },
        look_at="Try `len(simple_alarms(norm['healthy'], k))` for k = 3, 4, 5, ... until it is 0.",
        hints=(
            "First look only at the healthy run.",
            "The delay is the first step of `simple_alarms(norm['faulted'], k)` minus `onset`.",
        ),
        solution="""\
k = next(k for k in range(3, 100) if len(simple_alarms(norm["healthy"], k)) == 0)
answer = simple_alarms(norm["faulted"], k)[0] - onset
""",
        explanation=(
            "A threshold is a trade: without false alarms, this rule is hundreds of steps later than the probe. One "
            "signal is not enough; a better signal is worth more than a better threshold."
        ),
    ),
    NumberExercise(
        number="4.4",
        question=(
            "All watched signals together may raise one false alarm in 100,000 steps. Which evidence (-log10 of a p "
            "value) must one signal reach at one step, if p values are exact and every signal gets the same part? The "
            "number of signals is `n_signals`."
        ),
        answer=lambda: _evidence(_FALSE_ALARMS, n_signals=_n_signals()),
        tolerance=0.004,
        mistakes={
            "This is the threshold if there were one signal. With this threshold each signal raises one false alarm in "
            "100,000 steps, so all together raise as many as there are signals.": lambda: _evidence(
                _FALSE_ALARMS, n_signals=1
            ),
            "You multiplied the p value by the number of signals. Each signal gets only a part of the one false "
            "alarm, so divide.": lambda: -math.log10(_n_signals() / _PER_STEPS),
            "This is the p value. The evidence is -log10 of it.": lambda: 1 / _PER_STEPS / _n_signals(),
            "This is the natural logarithm. Evidence is in powers of ten: use log10.": lambda: math.log(
                _PER_STEPS * _n_signals()
            ),
            "This is the logarithm of the p value. Evidence is larger for a smaller p value: change the "
            "sign.": lambda: -_evidence(_FALSE_ALARMS, n_signals=_n_signals()),
            "You divided by the steps of this run. The one false alarm is accepted in 100,000 steps.": lambda: (
                math.log10(len(_norm("faulted")) * _n_signals())
            ),
            "This is the threshold for the 5 % level. It is exceeded at one step in twenty.": lambda: -math.log10(0.05),
        },
        look_at="The p value of one signal at one step is 1 / 100,000, divided by the number of signals.",
        hints=(
            "If no signal may be wrong more than once in 100,000 steps, the p value at one step is 1e-5. There are "
            "several signals.",
            "The p value is 1e-5 / n_signals.",
        ),
        solution="answer = -np.log10(1 / 100_000 / n_signals)\n",
        explanation=(
            "Many signals need a higher threshold each. The shipped thresholds are higher still, because no signal of "
            "a real run has exact p values; they were set on recorded healthy runs."
        ),
    ),
    SetExercise(
        number="4.5",
        question=(
            "For which of these kinds of faults does the loss alone raise no alarm in any harmed run of the test set? "
            "Choose from `kinds`."
        ),
        answer=_blind_kinds,
        members={
            "attention": "The errors of this fault are in the gradients; the loss of the batch itself is exact.",
            "attention output": "The backward pass uses a rounded output of attention, but the loss does not.",
            "bucket": "The loss alone is late here, but not blind. 'Late' and 'never' are different findings.",
            "bucket of a rank": "The other ranks still send all gradients, so that the run learns on, a little worse.",
            "labels": "The loss is computed from the labels, so it measures this fault directly.",
            "moments": "Damaged second moments cause one large update, and the loss jumps after it.",
            "reduction": "Rounded sums of gradients slow down the learning without any jump of the loss.",
            "stale": "The loss alone is late here, but in the end it does raise alarms.",
            "tokens": "Wrong tokens make the predictions of the same batch worse, so the loss is not blind.",
            "weights": "A damaged matrix changes the predictions at once, so the loss alone sees it.",
        },
        hints=("A delay is NaN if no run had an alarm.", "Look at the rows of `kinds` whose `delay_of_loss` is NaN."),
        solution="answer = set(kinds.index[kinds['delay_of_loss'].isna()])\n",
        explanation=(
            "Faults in the arithmetic and in the communication change gradients, and gradients change the loss only "
            "later. The loss is an outcome: it is late by construction, except for faults in the data and parameters."
        ),
    ),
    FunctionExercise(
        number="4.6",
        question=(
            "An alarm rings. Write a function that returns the probability that a fault is behind it: the expected "
            "number of true alarms, divided by that of all alarms. `sensitivity` is the fraction of faults that raise "
            "an alarm; `n_faults` and `n_false` are the faults and the false alarms in 100,000 steps."
        ),
        answer=lambda: fault_probability,
        cases=lambda: ((_loss_alone(detector="all alarms"), 0.1, 1.0), (0.5, 2.0, 3.0), (1.0, 4.0, 0.25)),
        tolerance=1e-3,
        mistakes={
            "This is the sensitivity: the probability of an alarm if there is a fault. The question is the reverse, "
            "the probability of a fault if there is an alarm.": lambda s, f, n: s,
            "This is the probability that the alarm is false. Subtract it from 1.": lambda s, f, n: (
                1 - fault_probability(s, f, n)
            ),
            "These are the odds, true alarms over false ones. Divide by all alarms, true and false.": lambda s, f, n: (
                s * f / n
            ),
            "You counted every fault as an alarm. Only a fraction `sensitivity` of them raises one.": lambda s, f, n: (
                f / (f + n)
            ),
            "You divided by faults and false alarms. Divide by the number of all alarms.": lambda s, f, n: (
                s * f / (f + n)
            ),
            "You forgot how rare faults are: `n_faults` is missing in the number of true alarms.": lambda s, f, n: (
                s / (s + n)
            ),
            "The number is right in percent. Return a fraction of 1.": lambda s, f, n: 100 * fault_probability(s, f, n),
        },
        hints=(
            "In 100,000 steps, how many true alarms and how many false ones do you expect?",
            "True alarms: `sensitivity * n_faults`. All alarms: true ones and `n_false`.",
        ),
        solution="""\
def fault_probability(sensitivity, n_faults, n_false):
    n_true = sensitivity * n_faults
    return n_true / (n_true + n_false)

answer = fault_probability
""",
        explanation=(
            "With the numbers above, nine alarms in ten are false. Where faults are rarer than false alarms, most "
            "alarms are false, even those of a detector that misses no fault. The rarer the fault, the more an alarm "
            "needs a second measurement, such as a probe or a replay."
        ),
    ),
)
