"""Practice cases of wiring: what they show, what they cost, and how answers are scored."""

import pytest

import workbench as wb
from workbench.course.miswirings import MISWIRED
from workbench.course.wiring_cases import cases
from workbench.errors import OptionError


def seed_of(fault):
    return next(seed for seed, (name, _) in enumerate(cases()) if name == fault)


def test_there_are_many_and_some_are_sound():
    faults = [fault for fault, _ in cases()]
    assert len(faults) >= 60
    assert {*faults} == {"", *MISWIRED}
    assert len({kind for _, kind in cases()}) > 5


def test_the_right_answer_has_all_points_but_those_of_tests():
    case = wb.course.wiring_case(seed_of("gradients never cleared"))
    assert str(case.test("causal").status) in ("passed", "could not be tested", "not applicable")
    found = case.test("gradients_cleared")
    assert case.test("gradients_cleared") is found
    assert (str(found.status), found.where, found.remedy, case.spent) == ("failed", "", "", 2)
    score = case.finish("gradients_cleared", "clear")
    assert score.are_causes_right
    assert score.does_cure_work
    assert score.points == pytest.approx(80 + 20 * 4 / 6, abs=0.1)
    assert score.points == pytest.approx(score.parts["points"].sum(), abs=0.1)
    assert "`pass` instead of `self.optimizer.zero_grad()`" in score.sentence
    assert score.evidence.set_index("kind")["sentence"]["mended"].startswith("With the sound line: The gradients of")
    with pytest.raises(OptionError, match="finished"):
        case.test("descends")


def test_a_wrong_answer_says_what_was_right():
    score = wb.course.wiring_case(seed_of("gradients never cleared")).finish("causal", "loss")
    assert score.points == 0
    assert "'gradients_cleared' is right, not 'causal'" in score.sentence
    assert "The place is 'clear'" in score.sentence


def test_a_sound_training_is_to_be_left_alone():
    case = wb.course.wiring_case(seed_of(""))
    assert case.finish("nothing").points == 100
    other = wb.course.wiring_case(seed_of(""))
    assert other.finish("causal", "clear").points == 0


def test_the_budget_ends():
    case = wb.course.wiring_case(seed_of(""))
    for id in case.contracts[: case.budget]:
        case.test(id)
    with pytest.raises(OptionError, match="spent"):
        case.test(case.contracts[case.budget])


def test_nothing_that_is_shown_names_the_fault():
    sound, faulty = (wb.course.miswired(fault) for fault in ("", "no causal mask"))
    assert repr(sound.model) == repr(faulty.model)
    case = wb.course.wiring_case(seed_of("no causal mask"))
    assert repr(case) == f"WiringCase(seed={case.seed})"
    assert MISWIRED["no causal mask"].where in case.steps
    assert len(case.curve()) == 60
