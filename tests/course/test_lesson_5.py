"""Answers to lesson 5: right ones pass, and each mistake gets the sentence that names it.

Right and wrong answers are computed here from the records and diagnoses with other code than that of the lesson.
"""

import math

import numpy as np
import pytest

import workbench as wb
from tests.course.answers import is_right, judged
from workbench.course.lesson_5 import paths
from workbench.diagnosis import Rules

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def logs():
    return {
        name: wb.open_run(path)["monitors"]
        .to_dataset()
        .to_dataframe()[["loss", "grad_norm", "learning_rate", "batch_size"]]
        for name, path in paths().items()
    }


@pytest.fixture(scope="module")
def trees():
    return {name: wb.diagnose(path, uses=("mechanism", "log", "configuration")) for name, path in paths().items()}


@pytest.fixture(scope="module")
def weight(trees):
    rows = trees["C"]["evidence"].to_dataset().to_dataframe().set_index(["symptom", "cause"])["weight"]
    return lambda cause, symptom="a_block_stands_out": float(rows[symptom, cause])


@pytest.fixture(scope="module")
def sizes(logs, trees):
    found = {"all": int(trees["A"]["causes"]["is_possible"].sum())}
    for n in (2, 4):
        log = logs["A"].iloc[:, :n].to_xarray()
        found[n] = int(wb.diagnose(log)["causes"]["is_possible"].sum())
    return found


@pytest.fixture(scope="module")
def probability(trees):
    """Probabilities of the causes of run A before and after replays that helped, by Bayes' rule."""
    rules = Rules.shipped()
    causes = trees["A"]["causes"].to_dataset()
    before = dict(zip(causes["cause"].values.tolist(), causes["probability"].values.tolist(), strict=True))

    def after(change):
        joint = {cause: p * rules.answer(change, cause) for cause, p in before.items()}
        return {cause: p / sum(joint.values()) for cause, p in joint.items()}

    return {"before": before, "exact": after("precision"), "rate": after("learning_rate")}


class TestFailed:
    """5.1, which runs failed."""

    def test_right(self, logs):
        failed = {name for name, log in logs.items() if log["loss"].max() > 50 or log["grad_norm"].max() > 500}
        assert len(failed) == 3
        assert is_right("5.1", failed)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ({"A", "B", "C", "D"}, "call a healthy run failed"),
            ({"C", "D"}, "its last gradient norms"),
            ({"A", "D"}, "uniform guess"),
            ({"A", "C"}, "because it was healthy once"),
            ("B", "braces"),
            ({"E"}, "not one of the names"),
        ],
    )
    def test_mistakes(self, answer, said):
        assert said in judged("5.1", answer)


class TestBegin:
    """5.2, the step at which the failure of run D began."""

    def test_right(self, logs):
        loss = logs["D"]["loss"].tolist()
        usual = max(loss[20:100])
        first_high = next(step for step in range(20, len(loss)) if loss[step] > 2 * usual)
        assert is_right("5.2", first_high - 1)

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda log: log["loss"].gt(5).idxmax(), "first peak"),
            (lambda log: log.index[-1], "declared diverged"),
            (lambda log: log["loss"].idxmin(), "lowest loss"),
            (lambda log: log["loss"].loc[111:].idxmin(), "low again for a moment"),
            (lambda log: 20, "end of the warm-up"),
            (lambda log: 100, "too small"),
            (lambda log: log["loss"].tail(20), "shape (20,)"),
        ],
    )
    def test_mistakes(self, logs, mistake, said):
        assert said in judged("5.2", mistake(logs["D"]))


class TestCauseAndSymptom:
    """5.3, the quantity that changed first."""

    def test_right(self, logs):
        log = logs["D"]
        first = {
            name: (log[name] / log[name].loc[90:109].median()).gt(4).idxmax() for name in ("loss", "learning_rate")
        }
        assert first["learning_rate"] < first["loss"]
        assert is_right("5.3", "learning_rate")

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ("loss", "symptom that is to be explained"),
            ("grad_norm", "look like a cause"),
            ("batch_size", "the same at all steps"),
            ("precision", "Answer with one of"),
        ],
    )
    def test_mistakes(self, answer, said):
        assert said in judged("5.3", answer)


class TestEvidence:
    """5.4, the factor by which a symptom changes odds."""

    def test_right(self, weight, trees):
        """The factor is that of the probabilities with the symptom and with its usual strength."""
        rules = Rules.shipped()
        place = rules.symptoms.index("a_block_stands_out")
        strengths = dict(zip(rules.symptoms, rules.usual.tolist(), strict=True))
        without = rules.probabilities(strengths)
        causes = [rules.causes.index(name) for name in ("architecture", "batch")]
        rise = weight("architecture") / float(rules.weight[causes[0], place])  # strength above the usual one
        present = rules.probabilities(strengths | {"a_block_stands_out": float(rules.usual[place]) + rise})
        factor = present["architecture"] / present["batch"] / (without["architecture"] / without["batch"])
        assert is_right("5.4", factor)

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda w: w("architecture") - w("batch"), "its exponential"),
            (lambda w: math.exp(w("architecture")), "architecture alone"),
            (lambda w: math.exp(w("architecture") + w("batch")), "added the two weights"),
            (lambda w: w("architecture"), "weight of architecture"),
            (lambda w: 10 ** (w("architecture") - w("batch")), "10 to the power"),
            (lambda w: 2 ** (w("architecture") - w("batch")), "2 to the power"),
            (lambda w: math.exp(w("batch") - w("architecture")), "other order"),
            (lambda w: w("architecture") / w("batch"), "divided the weights"),
            (lambda w: math.exp(w("architecture", "block_blows_up") - w("batch", "block_blows_up")), "block_blows_up"),
            (lambda w: 100.0, "too large"),
        ],
    )
    def test_mistakes(self, weight, mistake, said):
        assert said in judged("5.4", mistake(weight))


class TestSet:
    """5.5, the set of causes from two columns."""

    def test_right(self, sizes):
        assert sizes["all"] < sizes[4] < sizes[2] < 10
        assert is_right("5.5", sizes[2])

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda n: n["all"], "whole record"),
            (lambda n: 1, "first cause alone"),
            (lambda n: 10, "with the excluded ones"),
            (lambda n: n[4], "learning rate and batch size"),
            (lambda n: 10 - n[2], "number of causes that are excluded"),
            (lambda n: n[2] - 3, "too small"),
        ],
    )
    def test_mistakes(self, sizes, mistake, said):
        assert said in judged("5.5", mistake(sizes))


class TestReplay:
    """5.6, the factor by which a replay changes odds."""

    def test_right(self, probability):
        rules = Rules.shipped()
        row = rules.answers[rules.causes.index("precision")]
        assert is_right("5.6", row[rules.causes.index("precision")] / row[rules.causes.index("batch")])
        before, after = ({c: p for c, p in probability[at].items() if c != "unknown"} for at in ("before", "exact"))
        assert (max(before, key=before.get), max(after, key=after.get)) == ("batch", "precision")

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            (lambda b, e, r: e["precision"] / e["batch"], "odds after the replay"),
            (lambda b, e, r: b["precision"] / b["batch"], "odds before the replay"),
            (lambda b, e, r: e["precision"] / b["precision"], "ratio of the probabilities"),
            (lambda b, e, r: e["precision"], "probability of precision after"),
            (lambda b, e, r: b["precision"] / b["batch"] / (e["precision"] / e["batch"]), "upside down"),
            (
                lambda b, e, r: r["precision"] / r["batch"] / (b["precision"] / b["batch"]),
                "quarter of the learning rate",
            ),
            (
                lambda b, e, r: e["precision"] / e["learning_rate"] / (b["precision"] / b["learning_rate"]),
                "about `batch`",
            ),
            (
                lambda b, e, r: e["precision"] / (1 - e["precision"]) / (b["precision"] / (1 - b["precision"])),
                "all other causes together",
            ),
            (lambda b, e, r: 1e6, "too large"),
        ],
    )
    def test_mistakes(self, probability, mistake, said):
        found = judged("5.6", mistake(probability["before"], probability["exact"], probability["rate"]))
        assert said in found


@pytest.mark.slow
def test_both_replays_help_as_the_lesson_says(trees):
    """Both changes prevent the failure, but only exact arithmetic leaves one known cause."""
    path = paths()["A"]
    model = wb.open_checkpoint(next(path.with_suffix(".checkpoints").glob("step-*"))).model
    task = wb.tasks.associative_recall(length=5, vocab_size=10, n_pairs=2, batch_size=32, seed=33)
    machine = [wb.faults.low_precision_attention(n_bits=8, start=30)]
    n_possible = {}
    for cause in ("precision", "learning_rate"):
        done = wb.run_experiment(trees["A"], cause, model=model, task=task, faults=machine, progress=False)
        row = done["experiments"].to_dataset().set_index(experiment="cause").sel(experiment=cause)
        assert bool(row["supports"])
        n_possible[cause] = int(done["causes"]["is_possible"].drop_sel(cause="unknown").sum())
    assert n_possible["precision"] == 1 < n_possible["learning_rate"]


def test_half_of_the_runs_called_failed_are_healthy_if_nine_in_ten_are():
    study = wb.samples.open("failures")
    test = study.isel(run=(study["set"] == "locked").values)
    first = test["ranked_cause"].values[test["probability"].sel(view="mechanism").argmax("ranked_cause").values]
    is_healthy = test["is_cause"].sel(ranked_cause="nothing").values
    called_failed = first != "nothing"
    of_healthy, of_failed = np.mean(called_failed[is_healthy]), np.mean(called_failed[~is_healthy])
    assert of_healthy > 0.1  # "more than one healthy run in ten"
    assert 0.4 < 0.9 * of_healthy / (0.9 * of_healthy + 0.1 * of_failed) < 0.6
