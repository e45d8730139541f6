"""The kinds of exercises, the public functions, and rules that hold for every exercise of the course."""

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.about import about
from workbench.course.exercises import (
    ChoiceExercise,
    FunctionExercise,
    NumberExercise,
    RangeExercise,
    SetExercise,
    as_number,
    exercises_of,
    find,
    lessons,
)
from workbench.errors import OptionError

COMMON = {"number": "9.1", "question": "?", "hints": ("first", "second"), "solution": "answer = 1"}
NUMBER = NumberExercise(
    **COMMON,
    answer=lambda: 0.4,
    mistakes={"Forgot one half.": lambda: 0.8, "Nearly the same.": lambda: 0.805},
    look_at="Look at the table.",
    is_fraction=True,
)
CHOICE = ChoiceExercise(**COMMON, answer=lambda: "yes", choices={"yes": "", "no": "Think again."})
SET = SetExercise(**COMMON, answer=lambda: {"a"}, members={"a": "It is red.", "b": "It is blue."})
SQUARE = FunctionExercise(
    **COMMON,
    answer=lambda: lambda x: x**2,
    cases=lambda: [(np.array([1.0, 2.0]),), (np.array([3.0]),)],
    mistakes={"You doubled it.": lambda x: 2 * x},
)
RANGE = RangeExercise(
    **COMMON, answer=lambda: (1.0, 2.0), too_small=lambda x: f"{x} is small.", too_large=lambda x: f"{x} is large."
)
KINDS = [NUMBER, CHOICE, SET, SQUARE, RANGE]
NUMBERS = [exercise.number for lesson in lessons() for exercise in exercises_of(lesson)]


@pytest.fixture(params=NUMBERS)
def exercise(request):
    return find(request.param)


class TestNumber:
    @pytest.mark.parametrize(
        "answer",
        [0.4, 0.402, np.float32(0.4), np.array([0.4]), [0.4], torch.tensor(0.4), xr.DataArray(0.4), 0.4 + 0j],
    )
    def test_right_in_any_type(self, answer):
        assert NUMBER.judge(answer) == ""

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (0.8, "Forgot one half."),
            (0.806, "Nearly the same."),
            (40, "percent"),
            (0.5, "0.5 is too large. Look at the table."),
            (0.1, "0.1 is too small. Look at the table."),
            (-0.4, "between 0 and 1"),
            (7, "between 0 and 1"),
        ],
    )
    def test_a_wrong_number_is_explained(self, answer, said):
        assert said in NUMBER.judge(answer)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ("0.4", "without quotation marks"),
            (True, "yes or no"),
            (print, "is a function"),
            ([0.4, 0.5], "shape (2,)"),
            (np.ones((3, 2)), "shape (3, 2)"),
            ({"a": 0.4}, "type dict, which has entries with names"),
            (float("nan"), "not defined"),
            (np.inf, "not defined"),
            (0.4 + 1j, "abs"),
            (object(), "type object"),
            ([], "shape (0,)"),
            (torch.ones(2, requires_grad=True), "shape (2,)"),
            ({0.4}, "type set"),
            (xr.Dataset({"a": 0.4}), "Select one by its name"),
        ],
    )
    def test_what_is_no_number_is_explained(self, answer, said):
        assert said in NUMBER.judge(answer)

    def test_a_count_has_no_tolerance(self):
        exercise = NumberExercise(**COMMON, answer=lambda: 100, look_at="Count.", tolerance=0)
        assert exercise.judge(100) == ""
        assert "100.1 is too large" in exercise.judge(100.1)

    def test_the_sign_is_explained(self):
        exercise = NumberExercise(**COMMON, answer=lambda: 5.0, look_at="Measure.")
        assert "sign" in exercise.judge(-5.0)

    def test_numbers_that_need_gradients_are_numbers(self):
        value, problem = as_number(torch.tensor(2.0, requires_grad=True))
        assert (value, problem) == (2.0, "")


class TestChoice:
    @pytest.mark.parametrize("answer", ["yes", "Yes", " yes "])
    def test_right(self, answer):
        assert CHOICE.judge(answer) == ""

    def test_wrong(self):
        assert CHOICE.judge("no") == "Think again."

    @pytest.mark.parametrize("answer", ["maybe", 1, ["yes"], print])
    def test_what_is_no_choice_gets_the_list(self, answer):
        assert "'yes' or 'no'" in CHOICE.judge(answer)


class TestSet:
    @pytest.mark.parametrize("answer", [{"a"}, ["a"], ("a", "a"), np.array(["a"])])
    def test_right(self, answer):
        assert SET.judge(answer) == ""

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (set(), "a belongs to the set and is missing. It is red."),
            ({"a", "b"}, "b does not belong to the set. It is blue."),
            ("a", "braces"),
            ({"c"}, "'c' is not one of the names 'a' or 'b'"),
            ({1}, "1 is not one of the names"),
            (3, "set of the names"),
        ],
    )
    def test_wrong(self, answer, said):
        assert said in SET.judge(answer)


class TestFunction:
    def test_right(self):
        assert SQUARE.judge(lambda x: x * x) == ""

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (4.0, "without parentheses"),
            (lambda x: x + x, "You doubled it."),
            (lambda x: x**3, "returns [1., 8.], but [1., 4.] is right"),
            (lambda x: x.nothing, "raised AttributeError"),
            (lambda: 1, "raised TypeError"),
            (lambda x: 1 / 0, "raised ZeroDivisionError"),
            (lambda x: "text", "returns 'text'"),
            (lambda x: float((x**2)[0]), "but [1., 4.] is right"),
            (lambda x: None if len(x) == 1 else x**2, "returns None"),
        ],
    )
    def test_wrong(self, answer, said):
        assert said in SQUARE.judge(answer)

    def test_a_function_that_changes_its_argument_does_not_change_the_cases(self):
        def in_place(x):
            x *= x
            return x

        assert SQUARE.judge(in_place) == ""
        assert SQUARE.judge(in_place) == ""


class TestRange:
    @pytest.mark.parametrize(
        ("answer", "said"), [(1.5, ""), (1, ""), (2, ""), (0.5, "0.5 is small."), (3, "3.0 is large.")]
    )
    def test_numbers(self, answer, said):
        assert RANGE.judge(answer) == said

    def test_what_is_no_number(self):
        assert "quotation marks" in RANGE.judge("1.5")


@pytest.mark.parametrize("exercise", KINDS, ids=lambda exercise: type(exercise).__name__)
@pytest.mark.parametrize("blank", [..., None], ids=str)
def test_a_missing_answer_is_no_mistake(exercise, blank):
    assert exercise.is_missing(blank)
    assert "three dots" in exercise.judge(blank)


def test_a_function_without_a_body_is_missing():
    assert SQUARE.is_missing(lambda x: ...)
    assert "three dots" in SQUARE.judge(lambda x: ...)


class TestCheck:
    def test_a_right_answer(self):
        feedback = wb.course.check("1.2", find("1.2").answer())
        assert feedback.is_right
        assert repr(feedback).startswith("1.2: Right. ")

    def test_a_wrong_answer(self):
        feedback = wb.course.check("1.2", 123.0)
        assert not feedback.is_right
        assert repr(feedback).startswith("1.2: Not yet right. 123 is too large.")

    def test_a_missing_answer_is_kindly_named(self):
        feedback = wb.course.check("1.2", ...)
        assert not feedback.is_right
        assert repr(feedback).startswith("1.2: No answer yet. Replace the three dots")

    def test_html_shows_code_and_escapes_the_rest(self):
        assert "&lt;b&gt;" in wb.course.check("1.2", "<b>")._repr_html_()
        assert "<code>" in wb.course.check("3.4", 99.0)._repr_html_()

    @pytest.mark.parametrize("number", ["9.9", "", None, 2.9])
    def test_an_unknown_number_lists_the_exercises(self, number):
        with pytest.raises(OptionError, check=about("number", number)) as caught:
            wb.course.check(number, 1)
        assert caught.value.expected[0] == "1.1"
        assert "2.3" in str(caught.value)

    def test_a_number_without_quotation_marks_is_understood(self):
        assert wb.course.check(1.2, ...).number == "1.2"


class TestHintsAndSolutions:
    def test_hints_name_the_next_one(self):
        first, last = wb.course.hint("1.2"), wb.course.hint("1.2", 3)
        assert first.startswith("Hint 1 of 3: ")
        assert 'hint("1.2", 2)' in first
        assert "hint(" not in last

    @pytest.mark.parametrize("place", [0, 4, -1])
    def test_there_are_only_so_many_hints(self, place):
        with pytest.raises(OptionError, check=about("place", place)):
            wb.course.hint("1.2", place)

    def test_a_solution_is_code_in_markdown(self):
        shown = wb.course.solution("1.2")
        assert shown._repr_markdown_().startswith("```python\nanswer = ")
        assert repr(shown) == shown


class TestEveryExercise:
    def test_the_numbers_of_a_lesson_are_in_order(self):
        for lesson in lessons():
            numbers = [exercise.number for exercise in exercises_of(lesson)]
            assert numbers == [f"{lesson}.{place}" for place in range(1, len(numbers) + 1)]
            assert 4 <= len(numbers) <= 6

    def test_texts(self, exercise):
        assert exercise.hints
        assert exercise.explanation.endswith(".")
        assert all(hint.endswith((".", "?", "`")) for hint in exercise.hints)
        compile(exercise.solution, exercise.number, "exec")
        assert "answer = " in exercise.solution

    @pytest.mark.medium
    def test_an_answer_of_an_impossible_type_is_explained(self, exercise):
        impossible = [object(), {}, [], "nonsense", lambda: 1 / 0, np.array([[1, 2]]), 1j, True, b"", xr.Dataset()]
        for answer in impossible:
            said = exercise.judge(answer)
            assert said.strip().endswith((".", "'", "}")), said
            assert "object at" not in said
