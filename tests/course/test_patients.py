"""Practice cases: the budget, what a case shows and what it hides, and the answers that it accepts."""

import gc
import json
import pickle
import re
import types

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from tests.data_scripts import load_script
from workbench.course import case_files, cures
from workbench.course.failure_runs import SCHEDULES, SETUPS
from workbench.course.patients import BUDGETS, MEASUREMENTS
from workbench.diagnosis import CAUSES
from workbench.errors import OptionError

LEVELS = tuple(BUDGETS)
players = load_script("recorded_players")
verdict = load_script("failure_cases").verdict


@pytest.fixture(scope="module")
def data():
    with case_files.opened() as opened:
        return opened.load()


@pytest.fixture(scope="module")
def truths(data):
    return [case_files.truth_of(data.isel(patient=i)) for i in range(data.sizes["patient"])]


def of_level(data, truths, level):
    """Truths of a level by the seeds of its cases."""
    rows = np.flatnonzero(data["level"].values == level)
    return {int(data["place"].values[i]): truths[i] for i in rows}


# Cases


def test_seeds_enumerate_the_cases_of_a_level_and_then_repeat(data):
    for level in LEVELS:
        n = wb.course.n_patients(level)
        places = data["place"].values[data["level"].values == level]
        assert sorted(places.tolist()) == list(range(n))
        one, again, later = (wb.course.patient(seed, level).measure("loss") for seed in (1, 1, 1 + n))
        assert one.identical(again)
        assert one.identical(later)
        assert not one.equals(wb.course.patient(2, level).measure("loss"))
    assert wb.course.n_patients() == data.sizes["patient"]


@pytest.mark.recorded
def test_there_are_enough_cases_of_every_kind(data, truths):
    assert len(truths) >= 300
    assert min(wb.course.n_patients(level) for level in LEVELS) >= 25
    assert {cause for truth in truths for cause in truth.causes} == set(CAUSES)
    names = [truth.case.name for truth in truths]
    assert len(set(names)) == len(names)


@pytest.mark.recorded
def test_the_families_are_those_that_the_rules_have_never_seen(data, truths):
    known = {setup.family for setup in SETUPS.values() if setup.set != "locked"}
    assert not known & set(data["family"].values.tolist())
    assert all(
        SETUPS[truth.case.setup].family == family for truth, family in zip(truths, data["family"].values, strict=True)
    )


@pytest.mark.recorded
def test_the_labels_follow_from_the_recorded_results(data, truths):
    for truth, lost in zip(truths, data["lost"].values, strict=True):
        result = truth.result | {
            "diverged": not np.isfinite(lost),
            "plants": [vars(plant) for plant in truth.case.plants],
        }
        assert verdict(result, truth.control) == truth.how
        assert (truth.causes == ("nothing",)) == (truth.how == "")
        assert set(truth.causes) <= {*truth.case.causes, "nothing"}


@pytest.mark.recorded
def test_the_levels_follow_their_rules(data, truths):
    for level, truth, lost in zip(data["level"].values, truths, data["lost"].values, strict=True):
        if truth.causes == ("nothing",):
            allowed = {3, 4, 5}
        elif len(truth.causes) == 2:
            allowed = {5}
        elif lost >= 0.5:
            allowed = {1, 3}
        elif lost < 0.25 and truth.how == "learned less":
            allowed = {4, 5}
        else:
            allowed = {2, 3}
        assert int(level) in allowed


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"seed": -1}, "seed"), ({"seed": 0.5}, "seed"), ({"level": 6}, "level"), ({"level": True}, "level")],
)
def test_impossible_cases_are_refused(arguments, name):
    with pytest.raises(OptionError, check=about(name, arguments[name])):
        wb.course.patient(**{"seed": 0} | arguments)


# Measurements and the budget


def test_a_measurement_is_charged_once_and_added_to_the_record():
    patient = wb.course.patient(1, level=2)
    cost = patient.measurements["cost"]
    assert patient.spent == 0
    assert not patient.record.children
    patient.measure("optimizer")["update_ratio"][:] = 0
    assert patient.spent == cost["optimizer"]
    patient.measure("optimizer")
    assert patient.spent == cost["optimizer"]
    assert patient.remaining == patient.budget - patient.spent
    assert patient.measurements.index[patient.measurements["is_taken"]].tolist() == ["optimizer"]
    assert float(patient.record["optimizer"]["update_ratio"].max()) > 0, "what the caller changed is kept"
    assert list(patient.record.children) == ["optimizer"]


def test_the_complete_record_is_a_valid_run_that_can_be_diagnosed(data):
    patient = wb.course.patient(0, level=1)
    for name in MEASUREMENTS:
        patient.measure(name)
    record = patient.record
    wb.schema.runs.validate_monitors(record["monitors"].to_dataset())
    wb.schema.runs.validate_events(record["events"].to_dataset())
    for part in set(record.children) & set(wb.schema.PARTS):
        wb.schema.runs.validate_part(part, record[part].to_dataset())
    if "spectra" in record.children:
        wb.schema.runs.validate_spectra(record["spectra"].to_dataset())
    with case_files.opened_case(1, 0) as case:
        whole = case_files.whole_run(case)
    found, expected = wb.diagnose(record)["causes"], wb.diagnose(whole)["causes"]
    assert found["probability"].equals(expected["probability"])


def test_settings_show_the_plan_as_text_and_as_json():
    patient = wb.course.patient(1, level=1)
    settings = patient.measure("settings")
    rate = float(settings["value"].sel(setting="training.learning_rate"))
    assert rate == json.loads(patient.record.attrs["configuration"])["training"]["learning_rate"]


def test_what_costs_more_than_remains_is_refused_and_not_charged():
    patient = wb.course.patient(0, level=5)
    with pytest.raises(OptionError, check=says("are left; name the causes with finish().")):
        patient.try_cure("schedule")
    costs = patient.measurements["cost"].sort_values(ascending=False)
    for name in costs.index:
        if costs[name] > patient.remaining:
            spent = patient.spent
            with pytest.raises(OptionError, check=says("are left; name the causes with finish().")):
                patient.measure(name)
            assert patient.spent == spent
            break
        patient.measure(name)
    else:
        pytest.fail("the budget of level 5 allows everything")


def test_budgets_shrink_with_the_level():
    budgets = [wb.course.patient(0, level).budget for level in LEVELS]
    assert budgets == sorted(budgets, reverse=True)
    assert len(set(budgets)) == len(budgets)
    assert budgets[-1] < wb.course.patient(0).cure_cost + wb.course.patient(0).measurements["cost"].sum()


def test_unknown_names_are_refused():
    patient = wb.course.patient(0)
    for call, name in (
        (lambda: patient.measure("weights"), "name"),
        (lambda: patient.try_cure("nothing"), "cause"),
        (lambda: patient.finish("the weather"), "causes"),
        (lambda: patient.finish(["nothing", "data"]), "causes"),
        (lambda: patient.finish([]), "causes"),
        (lambda: patient.finish("data", "sleep"), "cure"),
    ):
        with pytest.raises(OptionError, check=about(name)):
            call()
    assert patient.spent == 0
    assert patient.score is None


# No leak


def reachable(patient):
    """Every object that belongs to a case: what its attributes hold, but no code and no modules."""
    code = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType)
    found, open_ones = {}, [vars(patient)]
    while open_ones:
        one = open_ones.pop()
        if id(one) in found or isinstance(one, code):
            continue
        found[id(one)] = one
        open_ones += gc.get_referents(one)
    return list(found.values())


def hidden_words(truth):
    """Texts that only someone who knows the truth can write."""
    words = {truth.case.name, truth.case.setup, *(f"{plant.kind} {plant.dose}" for plant in truth.case.plants)}
    return words | {*(str(plant.dose) for plant in truth.case.plants), str(truth.case)}


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_that_an_unfinished_case_holds_tells_the_truth(data, truths, level):
    secret = (case_files.Truth, type(truths[0].case), cures.Outcome)
    for seed, truth in list(of_level(data, truths, level).items())[:12]:
        patient = wb.course.patient(seed, level)
        for name in ("loss", "optimizer"):
            patient.measure(name)
        for one in reachable(patient):
            assert not isinstance(one, secret)
            if isinstance(one, str):
                assert one not in CAUSES
                assert not any(word in one for word in hidden_words(truth) if len(word) > 6)


@pytest.mark.parametrize("level", LEVELS)
def test_before_the_first_measurement_all_cases_of_a_level_are_the_same(level):
    """So that no attribute, representation, size or pickle can depend on the cause."""
    n = wb.course.n_patients(level)
    states, shown = set(), set()
    for seed in range(n):
        patient = wb.course.patient(seed, level)
        state = vars(patient) | {"seed": None, "complaint": None}
        states.add(pickle.dumps(state))
        lists = (
            patient.measurements.to_json(),
            sorted(patient.cures.items()),
            dir(patient),
            patient.record.attrs.keys(),
        )
        shown.add(str((repr(patient).replace(f"seed={seed},", ""), *lists)))
        assert patient.complaint == wb.course.patient(seed % 6, level).complaint
    assert len(states) == 1
    assert len(shown) == 1


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_a_classifier_finds_no_cause_in_what_is_free(data, truths, level):
    """Cross-validated, it is no better than with permuted causes."""
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.tree import DecisionTreeClassifier

    known = of_level(data, truths, level)
    facts, causes = [], []
    for seed, truth in sorted(known.items()):
        patient = wb.course.patient(seed, level)
        sizes = [
            len(repr(patient)),
            len(pickle.dumps(patient)),
            len(patient.complaint),
            patient.budget,
            len(dir(patient)),
        ]
        facts.append([seed, seed % 2, seed % 3, seed % 6, *sizes, len(patient.measurements), len(patient.cures)])
        causes.append("nothing" if truth.causes == ("nothing",) else truth.causes[0])
    facts, causes = np.array(facts, dtype=float), np.array(causes)
    folds = KFold(4, shuffle=True, random_state=0)

    def accuracy(labels):
        model = DecisionTreeClassifier(max_depth=3, random_state=0)
        return cross_val_score(model, facts, labels, cv=folds).mean()

    draw = np.random.default_rng(0)
    by_chance = [accuracy(draw.permutation(causes)) for _ in range(19)]
    assert accuracy(causes) <= max(by_chance)


@pytest.mark.recorded
def test_settings_name_no_fault_and_no_seed(data):
    keys = {}
    for setup, text in zip(data["setup"].values, data["configuration"].values, strict=True):
        found = json.loads(text)
        names = [list(found[part]) for part in found]
        assert keys.setdefault(setup, names) == names, "a missing setting tells the cause"
        assert set(found) == {"model", "task", "training"}
        assert found["training"]["optimizer"] == "AdamW"
        assert found["training"]["schedule"] in ("constant", "cosine", "linear", "custom")
        for word in ("fault", "seed", "partial", "router_rate", "coarse", *(f.__name__ for f in SCHEDULES.values())):
            assert not re.search(rf"\b{word}", text.decode())


# Answers


def healthy_and_failed(data, truths):
    """Level and seed of a healthy and of a failed case, for each of the levels that have both."""
    for level in (3, 4, 5):
        known = of_level(data, truths, level)
        sound = next(seed for seed, truth in known.items() if not truth.how)
        failed = next(seed for seed, truth in known.items() if truth.how)
        yield level, sound, failed


def test_a_healthy_run_that_is_left_alone_has_all_points_without_any_measurement(data, truths):
    for level, sound, _ in healthy_and_failed(data, truths):
        score = wb.course.patient(sound, level).finish("nothing")
        assert score.points == 100
        assert score.are_causes_right
        assert score.does_cure_work
        assert score.causes == ("nothing",)


def test_nothing_is_no_answer_to_a_failed_run(data, truths):
    for level, _, failed in healthy_and_failed(data, truths):
        score = wb.course.patient(failed, level).finish("nothing", None)
        truth = of_level(data, truths, level)[failed]
        assert score.points == 0
        assert score.causes == truth.causes
        assert "The run failed" in score.sentence
        assert all(CAUSES[cause].title in score.sentence for cause in truth.causes)
        assert set(score.evidence["kind"]) >= {"injected", "loss", "for"}


def test_a_cure_for_a_healthy_run_costs_points_and_is_explained(data, truths):
    level, sound, _ = next(healthy_and_failed(data, truths))
    score = wb.course.patient(sound, level).finish("learning_rate", "learning_rate", progress=False)
    assert score.points == 0
    assert not score.does_cure_work
    assert "Nothing was wrong" in score.sentence
    assert "needed no cure" in score.sentence


def test_a_finished_case_is_closed():
    patient = wb.course.patient(0)
    score = patient.finish("nothing")
    assert patient.score is score
    for call in (lambda: patient.measure("loss"), lambda: patient.try_cure("data"), lambda: patient.finish("data")):
        with pytest.raises(OptionError, check=says("This case is finished; open another one with")):
            call()


def with_cause(data, truths, kind):
    """Level and seed of a case of levels 1 to 4 with one fault, of the given kind."""
    for level in (1, 2, 3, 4):
        for seed, truth in of_level(data, truths, level).items():
            if [plant.kind for plant in truth.case.plants] == [kind]:
                return level, seed, truth
    raise AssertionError(f"no case of kind {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eps", "coarse weights", "batch size"])
def test_the_cure_of_the_cause_recovers_the_lost_progress(data, truths, kind):
    level, seed, truth = with_cause(data, truths, kind)
    patient = wb.course.patient(seed, level)
    spent = patient.spent
    found = patient.try_cure(truth.causes[0], progress=False)
    assert patient.spent == spent + patient.cure_cost
    assert found["loss"].sizes == found["cured_loss"].sizes == {"step": 200}
    score = patient.finish(truth.causes, truth.causes[0])
    assert score.does_cure_work
    assert score.recovered > 0.5
    assert score.points > 80 * (1 - 0.2)
    assert float(found["cured_held_out_loss"]) < truth.result["final_loss"] or truth.how == "diverged"


@pytest.mark.medium
def test_a_cure_that_is_stopped_costs_nothing_and_leaves_the_case_open():
    class StoppedError(Exception):
        pass

    def stop(_):
        raise StoppedError

    patient = wb.course.patient(0)
    for call in (
        lambda: patient.try_cure("batch", progress=stop),
        lambda: patient.finish("batch", "batch", progress=stop),
    ):
        with pytest.raises(StoppedError):
            call()
    assert patient.spent == 0
    assert patient.score is None


# Programs


def test_a_program_is_scored_and_one_that_raises_loses_only_that_case():
    def player(patient):
        patient.measure("loss")
        if patient.seed == 1:
            raise RuntimeError("no idea")
        return ("the weather", None) if patient.seed == 2 else ("nothing", None)

    found = wb.course.play(player, level=3, seeds=range(5), progress=False)
    assert found["points"].sizes == {"case": 5}
    assert found["seed"].values.tolist() == list(range(5))
    assert found["problem"].values[1] == "RuntimeError: no idea"
    assert "causes must be" in str(found["problem"].values[2])
    assert (found["problem"].values[[0, 3, 4]] == "").all()
    assert (found["points"].values[[1, 2]] == 0).all()
    alone = [wb.course.patient(seed, 3) for seed in (0, 3, 4)]
    for patient in alone:
        patient.measure("loss")
    assert found["points"].values[[0, 3, 4]].tolist() == [patient.finish("nothing").points for patient in alone]


def test_playing_covers_all_levels_and_can_be_stopped():
    found = wb.course.play(players.always_nothing, seeds=[0, 3], progress=False)
    assert found["level"].values.tolist() == [level for level in LEVELS for _ in range(2)]

    class StoppedError(Exception):
        pass

    seen = []

    def stop(message):
        seen.append(message)
        if len(seen) == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        wb.course.play(players.always_nothing, level=1, seeds=range(50), progress=stop)


@pytest.mark.medium
@pytest.mark.parametrize("name", players.RECORDED)
def test_the_players_know_their_names_and_stay_within_the_budget(name):
    player = players.RECORDED[name]()
    for level in (1, 5):
        patient = wb.course.patient(0, level)
        cause, cure = player(patient)
        assert cause in CAUSES
        assert cure == (None if cause == "nothing" else cause)
        assert patient.remaining >= 0


@pytest.mark.slow
def test_the_diagnosis_measures_until_it_is_sure():
    n_sure = 0
    for seed in range(8):
        patient = wb.course.patient(seed, 2)
        cause, _ = players.with_diagnose(patient)
        taken = patient.measurements
        causes = wb.diagnose(patient.record)["causes"].to_dataset()
        assert cause == causes["cause"].values[0]
        left = taken["cost"][~taken["is_taken"]]
        if causes["probability"].values[0] < 0.8:
            assert (left > patient.remaining).all()
        else:
            n_sure += 1
            assert taken["cost"][taken["is_taken"]].max() <= left.min()
    assert n_sure


def test_the_board_is_the_mean_of_the_recorded_scores(data):
    board = wb.course.board()
    points, level = data["board_points"], data["level"].values
    for (at, player), row in board.iterrows():
        chosen = points.sel(player=player).values[level == at] if at != "all" else points.sel(player=player).values
        assert row["n"] == len(chosen)
        assert row["points"] == pytest.approx(chosen.mean())
        assert row["points_low"] <= row["points"] <= row["points_high"]
        assert 0 <= row["causes_right"] <= 1
    assert set(board.index.get_level_values("player")) == set(players.RECORDED)


@pytest.mark.recorded
def test_nothing_is_right_on_the_board_as_often_as_runs_are_healthy(truths):
    row = wb.course.board().loc[("all", "always nothing")]
    assert row["causes_right"] == pytest.approx(np.mean([not truth.how for truth in truths]))
    assert row["points"] == pytest.approx(100 * row["causes_right"])


@pytest.mark.recorded
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_recorded_scores_of_the_diagnosis_are_found_again(data):
    level, seeds = 1, range(3)
    found = wb.course.play(players.with_diagnose, level=level, seeds=seeds, progress=False)
    recorded = data["board_points"].sel(player="wb.diagnose").values
    for seed, points in zip(seeds, found["points"].values, strict=True):
        row = int(np.flatnonzero((data["level"].values == level) & (data["place"].values == seed))[0])
        assert points == pytest.approx(recorded[row], abs=2)


@pytest.mark.recorded
@pytest.mark.slow
def test_whole_records_are_seldom_diagnosed_wrongly_with_confidence(data, truths):
    """Facts may not establish a cause that is a consequence, such as experts without tokens."""
    n_right = n_sure = 0
    for row, truth in enumerate(truths):
        tree = wb.diagnose(case_files.whole_run(data.isel(patient=row)))
        cause, probability = (tree["causes"][name].values[0] for name in ("cause", "probability"))
        if not truth.how:
            assert tree.attrs["state"] == "nothing found"
            continue
        n_right += cause in truth.causes
        n_sure += cause not in (*truth.causes, "nothing", "unknown") and probability >= 0.8
    assert n_right >= 200
    assert n_sure <= 3
