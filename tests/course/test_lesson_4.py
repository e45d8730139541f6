"""Answers to lesson 4: right ones pass, and each mistake gets the sentence that names it.

Right and wrong answers are computed here from the recorded data with other code than that of the lesson.
"""

import math
from functools import cache

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from tests.course.answers import is_right, judged
from workbench.errors import StoreError

pytestmark = pytest.mark.medium
ONSET = 220
OUTCOMES = {"loss", "largest_losses", "grad_norm"}


@pytest.fixture(scope="module")
def runs():
    return {name: wb.open_run(wb.samples.paired_run(name)) for name in ("healthy", "faulted")}


@pytest.fixture(scope="module")
def n_steps(runs):
    return {name: run["monitors"].sizes["step"] for name, run in runs.items()}


@pytest.fixture(scope="module")
def steps(runs):
    """First alarm of a mechanism, first alarm of an outcome, and divergence of the faulted run."""
    events = runs["faulted"]["events"].to_dataset().to_dataframe()
    raised = events[events["kind"] == "alarm"].groupby("source")["step"].min()
    assert events.set_index("kind")["step"]["fault"] == ONSET
    mechanism = min(step for source, step in raised.items() if source not in OUTCOMES)
    outcome = min(step for source, step in raised.items() if source in OUTCOMES)
    return mechanism, outcome, int(events.set_index("kind")["step"]["divergence"])


@pytest.fixture(scope="module")
def n_signals(runs):
    parts = runs["faulted"].children
    return sum(
        each.part in parts and each.variable in parts[each.part] and not each.threshold > 0
        for each in wb.alarms.WATCHED
    )


@pytest.fixture(scope="module")
def harmed():
    """Runs of the test set that were harmed by a fault which the settings do not reveal."""
    table = wb.samples.open("early_warning").to_dataframe().query("set == 'locked' and kind != '' and is_harmful")
    return table[~table["settings_show_it"] & table["start"].notna()]


@pytest.fixture(scope="module")
def kinds(harmed):
    """Number of harmed runs with an alarm of the loss alone, by kind of fault."""
    return harmed.groupby("kind")["loss_step"].count()


@cache
def alarms_of(name, multiple):
    """Steps at which the gradient norm exceeds the mean of its last 50 values by a multiple of their deviation."""
    norm = wb.open_run(wb.samples.paired_run(name))["monitors"]["grad_norm"].values
    past = {step: norm[step - 50 : step] for step in range(200, len(norm))}
    return [step for step, values in past.items() if norm[step] > values.mean() + multiple * values.std(ddof=1)]


class TestLeadTime:
    """4.1, from the first alarm of a mechanism to the first of an outcome."""

    def test_right(self, steps):
        mechanism, outcome, divergence = steps
        assert ONSET < mechanism < outcome < divergence
        assert outcome - mechanism > 200  # "hundreds of steps"
        assert is_right("4.1", outcome - mechanism)
        assert is_right("4.1", float(outcome - mechanism))

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda mechanism, outcome, end: mechanism - ONSET, "This is the delay"),
            (lambda mechanism, outcome, end: outcome - ONSET, "nobody could have acted before"),
            (lambda mechanism, outcome, end: end - mechanism, "ends at the divergence"),
            (lambda mechanism, outcome, end: end - ONSET, "to the divergence. Which alarm"),
            (lambda mechanism, outcome, end: mechanism - outcome, "wrong order"),
            (lambda mechanism, outcome, end: mechanism, "step of the first alarm"),
            (lambda mechanism, outcome, end: outcome, "step of the alarm of the gradient norm"),
            (lambda mechanism, outcome, end: outcome - mechanism + 1, "too large"),
            (lambda mechanism, outcome, end: (mechanism, outcome), "shape (2,)"),
        ],
    )
    def test_mistakes(self, steps, mistake, said):
        assert said in judged("4.1", mistake(*steps))


class TestFalseAlarms:
    """4.2, the rate of false alarms of the simple rule."""

    def test_right(self, n_steps):
        rate = len(alarms_of("healthy", 3)) / (n_steps["healthy"] - 200) * 1e5
        assert is_right("4.2", rate)
        assert rate > 1000  # "thousands of times"

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda n, all_steps, faulty: n, "number of alarms in this run"),
            (lambda n, all_steps, faulty: n / all_steps * 1e5, "all steps of the run"),
            (lambda n, all_steps, faulty: n / (all_steps - 200), "fraction of steps"),
            (lambda n, all_steps, faulty: n / (all_steps - 200) * 100, "percentage"),
            (lambda n, all_steps, faulty: faulty, "faulted run"),
            (lambda n, all_steps, faulty: 135.0, "normal distribution"),
            (lambda n, all_steps, faulty: 0, "too small"),
        ],
    )
    def test_mistakes(self, n_steps, mistake, said):
        faulty = len(alarms_of("faulted", 3)) / (n_steps["faulted"] - 200) * 1e5
        assert said in judged("4.2", mistake(len(alarms_of("healthy", 3)), n_steps["healthy"], faulty))


class TestPriceOfAThreshold:
    """4.3, the delay of the simple rule without false alarms."""

    def smallest(self):
        multiple = 3
        while alarms_of("healthy", multiple):
            multiple += 1
        return multiple

    def test_right(self):
        first = alarms_of("faulted", self.smallest())[0]
        assert first - ONSET > 200  # "hundreds of steps later than the probe"
        assert is_right("4.3", first - ONSET)

    def test_mistakes(self):
        faulted, multiple = alarms_of("faulted", 3), self.smallest()
        before, both, after = (min(step for step in faulted if step >= ONSET + k) for k in (-100, 0, 1))
        assert before < ONSET
        assert both in alarms_of("healthy", 3)
        assert after not in alarms_of("healthy", 3)
        assert "false alarm and not an early one" in judged("4.3", before - ONSET)
        assert "healthy run raises this alarm as well" in judged("4.3", both - ONSET)
        assert "raises many false ones" in judged("4.3", after - ONSET)
        assert alarms_of("healthy", multiple - 3)
        early = alarms_of("faulted", multiple - 3)[0]
        assert "still has alarms" in judged("4.3", early - ONSET)
        right = alarms_of("faulted", multiple)[0]
        assert "Subtract the onset" in judged("4.3", right)
        assert "This is the multiple" in judged("4.3", multiple)
        assert "too small" in judged("4.3", right - ONSET - 1)


class TestManySignals:
    """4.4, the evidence that one of many signals must reach."""

    def test_right(self, n_signals):
        assert n_signals > 10
        assert is_right("4.4", 5 + math.log10(n_signals))
        assert is_right("4.4", round(5 + math.log10(n_signals), 2))

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda n: 5, "if there were one signal"),
            (lambda n: 5 - math.log10(n), "multiplied the p value"),
            (lambda n: 1e-5 / n, "This is the p value"),
            (lambda n: math.log(1e5 * n), "natural logarithm"),
            (lambda n: math.log10(1e-5 / n), "change the sign"),
            (lambda n: math.log10(579 * n), "steps of this run"),
            (lambda n: -math.log10(0.05), "5 % level"),
            (lambda n: 12.0, "too large"),
        ],
    )
    def test_mistakes(self, n_signals, mistake, said):
        assert said in judged("4.4", mistake(n_signals))


class TestBlindKinds:
    """4.5, the kinds of faults to which the loss is blind."""

    def test_right(self, kinds):
        assert is_right("4.5", set(kinds.index[kinds == 0]))

    @pytest.mark.parametrize(
        ("extra", "said"),
        [
            ("bucket", "'Late' and 'never' are different"),
            ("stale", "in the end it does raise alarms"),
            ("labels", "computed from the labels"),
            ("tokens", "predictions of the same batch"),
            ("moments", "one large update"),
            ("weights", "changes the predictions at once"),
        ],
    )
    def test_too_many(self, kinds, extra, said):
        assert kinds[extra] > 0
        assert said in judged("4.5", {*kinds.index[kinds == 0], extra})

    @pytest.mark.parametrize("missing", ["attention", "attention output", "bucket of a rank", "reduction"])
    def test_too_few(self, kinds, missing):
        assert f"{missing} belongs to the set" in judged("4.5", set(kinds.index[kinds == 0]) - {missing})

    def test_every_kind_has_a_sentence(self, kinds):
        from workbench.course.exercises import find

        sentences = find("4.5").members
        assert set(sentences) == set(kinds.index)
        assert len(set(sentences.values())) == len(sentences)


class TestFaultProbability:
    """4.6, Bayes' rule with rates."""

    def test_right(self):
        assert is_right("4.6", lambda s, f, n: 1 / (1 + n / (s * f)))

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda s, f, n: s, "This is the sensitivity"),
            (lambda s, f, n: n / (n + s * f), "Subtract it from 1"),
            (lambda s, f, n: s * f / n, "These are the odds"),
            (lambda s, f, n: f / (f + n), "every fault as an alarm"),
            (lambda s, f, n: s * f / (f + n), "divided by faults and false alarms"),
            (lambda s, f, n: s / (s + n), "how rare faults are"),
            (lambda s, f, n: 100 / (1 + n / (s * f)), "percent"),
            (lambda s, f: s * f, "raised TypeError"),
            (0.09, "without parentheses"),
        ],
    )
    def test_mistakes(self, wrong, said):
        assert said in judged("4.6", wrong)

    def test_the_example_of_the_text(self, harmed):
        sensitivity = np.mean(harmed["first_step"] - harmed["start"] <= 50)
        assert sensitivity > 0.9  # "nearly all faults"
        true = 0.1 * sensitivity
        assert 0.08 < true / (true + 1) < 0.12  # "nine alarms in ten are false"


class TestData:
    def test_the_runs_differ_only_from_the_onset_on(self, runs):
        for name in ("learning_rate", "loss", "grad_norm"):
            healthy, faulted = (run["monitors"][name].values for run in runs.values())
            assert np.array_equal(healthy[:ONSET], faulted[:ONSET])
        assert not np.array_equal(healthy[ONSET : ONSET + 20], faulted[ONSET : ONSET + 20])

    def test_an_unknown_run_is_named(self):
        with pytest.raises(StoreError, check=about("name", "broken")):
            wb.samples.paired_run("broken")

    @pytest.mark.recorded
    def test_a_new_recording_begins_alike(self, runs):
        """The first steps of a new run agree with the recorded ones, up to the rounding of other machines."""
        model = wb.zoo.transformer(
            norm="pre_ln", d_model=32, n_layers=2, n_heads=4, vocab_size=16, max_length=8, seed=1
        )
        task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=32, seed=1)
        fault = wb.faults.low_precision_attention(n_bits=6)
        options = {"betas": (0.9, 0.95), "fused": True}
        losses = [
            record.loss
            for record in wb.train(
                model, task, n_steps=21, learning_rate=0.016, warmup=50, clip_norm=1.0, seed=1, faults=[fault],
                optimizer_options=options,
            )
        ]  # fmt: skip
        assert losses == pytest.approx(runs["healthy"]["monitors"]["loss"].values[:21].tolist(), abs=0.002)
