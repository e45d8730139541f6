"""The exercises of the course: how each kind judges an answer, and all of them by number."""

from __future__ import annotations

import copy
import html
import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from workbench.errors import OptionError, as_data
from workbench.formatting import listed


@dataclass(frozen=True, kw_only=True)
class Exercise(ABC):
    """One exercise of a lesson. Each subclass is for one kind of answer.

    Nothing is computed before an answer is judged, so that lessons load fast.
    """

    number: str
    question: str
    answer: Callable[[], Any]
    hints: tuple[str, ...]
    solution: str
    explanation: str = ""

    #: What an answer is, as in "the answer is a number".
    wanted: ClassVar[str]

    def judge(self, answer: object) -> str:
        """Return an empty text if an answer is right, otherwise what is wrong with it and what to look at."""
        if self.is_missing(answer):
            return f"Replace the three dots by {self.wanted}, and run the cell again."
        return self._judge(answer)

    def is_missing(self, answer: object) -> bool:
        """Whether the cell of an answer still holds the three dots of the notebook."""
        return _is_blank(answer)

    @abstractmethod
    def _judge(self, answer: object) -> str:
        """Return an empty text if an answer that is not missing is right, otherwise what is wrong."""


def _is_blank(value: object) -> bool:
    return value is None or value is Ellipsis


@dataclass(frozen=True, kw_only=True)
class NumberExercise(Exercise):
    """An exercise whose answer is one number.

    Args:
        mistakes: Sentence that explains a mistake -> computes the number that this mistake gives. If several numbers
            are the same as an answer, the sentence of the nearest one is used.
        look_at: What to look at if the answer is wrong and no mistake is recognized; a sentence.
        tolerance: Relative difference up to which two numbers are the same; 0 for counts.
        is_fraction: Whether the answer is a fraction of 1, so that percent is recognized as a mistake.
    """

    mistakes: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    look_at: str
    tolerance: float = 0.02
    is_fraction: bool = False

    wanted: ClassVar[str] = "a number"

    def _judge(self, answer: object) -> str:
        value, problem = as_number(answer)
        if problem:
            return problem
        right = float(self.answer())
        if self._is_same(value, right):
            return ""
        mistaken = {sentence: float(compute()) for sentence, compute in self.mistakes.items()}
        nearest = min(mistaken, key=lambda sentence: abs(mistaken[sentence] - value), default="")
        if nearest and self._is_same(value, mistaken[nearest]):
            return nearest
        if self.is_fraction and not 0 <= value <= 1:
            if self._is_same(value / 100, right):
                return "The number is right in percent. Give it as a fraction of 1: divide it by 100."
            return f"A fraction is between 0 and 1, but your answer is {value:.4g}. {self.look_at}"
        if self.tolerance and self._is_same(value, -right):
            return "The size is right, but the sign is not. Which of the two numbers did you subtract?"
        size = "large" if value > right else "small"
        return f"{value:.4g} is too {size}. {self.look_at}"

    def _is_same(self, value: float, other: float) -> bool:
        return math.isclose(value, other, rel_tol=self.tolerance, abs_tol=self.tolerance * 1e-3)


def as_number(answer: object) -> tuple[float, str]:
    """Return an answer as a number and an empty text, or NaN and a sentence on why it is no number."""
    if isinstance(answer, str):
        return math.nan, f"Your answer is the text '{answer}'. Give a number, without quotation marks."
    if isinstance(answer, bool | np.bool_):
        return math.nan, f"Your answer is {answer}, which says yes or no. Give a number."
    if callable(answer):
        return math.nan, "Your answer is a function. Call it, and give the number that it returns."
    shape = getattr(answer, "shape", None)
    if isinstance(answer, list | tuple):
        shape = (len(answer),)
    if isinstance(answer, Mapping):
        kind = type(answer).__name__
        return math.nan, f"Your answer is of the type {kind}, which has entries with names. Select one by its name."
    if shape is not None and math.prod(shape) != 1:
        return math.nan, (
            f"Your answer has the shape {tuple(shape)}, but one number is asked for. "
            "Select one entry, or reduce it with a function such as mean, max or sum."
        )
    try:
        # A tensor that requires a gradient is no array, but has an item.
        value = answer.item() if hasattr(answer, "item") else np.asarray(answer).reshape(()).item()
    except (TypeError, ValueError, RuntimeError):
        value = None
    if isinstance(value, complex):
        if value.imag:
            return math.nan, "Your answer is a complex number. The modulus of a complex number is abs(number)."
        value = value.real
    if not isinstance(value, Real):
        return math.nan, f"Your answer is of the type {type(answer).__name__}. Give a number."
    if not math.isfinite(value):
        return math.nan, f"Your answer is {value}, so one of the numbers in it is not defined. Check which one."
    return float(value), ""


@dataclass(frozen=True, kw_only=True)
class RangeExercise(Exercise):
    """An exercise whose answer is any number in a range; `answer` returns the smallest and the largest right one."""

    too_small: Callable[[float], str]
    too_large: Callable[[float], str]

    wanted: ClassVar[str] = "a number"

    def _judge(self, answer: object) -> str:
        value, problem = as_number(answer)
        if problem:
            return problem
        low, high = self.answer()
        return self.too_small(value) if value < low else self.too_large(value) if value > high else ""


@dataclass(frozen=True, kw_only=True)
class ChoiceExercise(Exercise):
    """An exercise whose answer is one of several choices."""

    choices: Mapping[str, str]

    wanted: ClassVar[str] = "one of the choices, in quotation marks"

    def _judge(self, answer: object) -> str:
        names = {name.casefold(): name for name in self.choices}
        name = names.get(answer.strip().casefold()) if isinstance(answer, str) else None
        if name is None:
            return f"Answer with one of {_quoted(self.choices)}, not with {_shown(answer)}."
        return "" if name == self.answer() else self.choices[name]


@dataclass(frozen=True, kw_only=True)
class SetExercise(Exercise):
    """An exercise whose answer is the set of those names that fulfill a condition."""

    members: Mapping[str, str]

    wanted: ClassVar[str] = "a set of names, such as {'first', 'second'}"

    def _judge(self, answer: object) -> str:
        if isinstance(answer, str):
            return f"Your answer is a text. Put the name into braces: {{{answer!r}}}."
        if not isinstance(answer, Iterable):
            return f"Answer with a set of the names {_quoted(self.members)}, not with {_shown(answer)}."
        given = list(answer)
        unknown = [name for name in given if not isinstance(name, str) or name not in self.members]
        if unknown:
            return f"{_shown(unknown[0])} is not one of the names {_quoted(self.members)}."
        right = set(self.answer())
        for name, sentence in self.members.items():
            if (name in given) != (name in right):
                verdict = "belongs to the set and is missing" if name in right else "does not belong to the set"
                return f"{name} {verdict}. {sentence}"
        return ""


@dataclass(frozen=True, kw_only=True)
class FunctionExercise(Exercise):
    """An exercise whose answer is a function, run on hidden cases; `answer` returns the right one."""

    cases: Callable[[], Iterable[tuple[Any, ...]]]
    mistakes: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    tolerance: float = 1e-6

    wanted: ClassVar[str] = "the body of your function, with a return"

    def is_missing(self, answer: object) -> bool:
        """Whether the function still returns nothing in any case, as in the notebook."""
        if not callable(answer):
            return _is_blank(answer)
        try:
            return all(_is_blank(answer(*copy.deepcopy(case))) for case in self.cases())
        except Exception:  # noqa: BLE001  # code of the learner; the error is explained when the answer is judged
            return False

    def _judge(self, answer: object) -> str:
        if not callable(answer):
            return f"Pass the function itself, without parentheses; you passed {_shown(answer)}."
        right, cases = self.answer(), list(self.cases())
        given = []
        for case in cases:
            try:
                given.append(answer(*copy.deepcopy(case)))
            except Exception as error:  # noqa: BLE001  # code of the learner may raise anything
                return f"With {_arguments(case)} your function raised {type(error).__name__}: {error}."
        expected = [right(*copy.deepcopy(case)) for case in cases]
        failed = [place for place, pair in enumerate(zip(given, expected, strict=True)) if not self._is_same(*pair)]
        if not failed:
            return ""
        for sentence, mistaken in self.mistakes.items():
            if all(
                self._is_same(each, mistaken(*copy.deepcopy(case))) for each, case in zip(given, cases, strict=True)
            ):
                return sentence
        case, got, wanted = cases[failed[0]], given[failed[0]], expected[failed[0]]
        return f"With {_arguments(case)} your function returns {_shown(got)}, but {_shown(wanted)} is right."

    def _is_same(self, given: object, expected: object) -> bool:
        """Whether two results are the same: numbers and arrays within the tolerance, everything else exactly."""
        if _is_blank(given):
            return False
        try:
            a, b = np.asarray(given), np.asarray(expected)
            if a.dtype.kind in "biufc" and b.dtype.kind in "biufc":
                return a.shape == b.shape and bool(np.allclose(a, b, rtol=self.tolerance, atol=1e-12, equal_nan=True))
            return type(given) is type(expected) and bool(given == expected)
        except (TypeError, ValueError, RuntimeError):
            return False


def _quoted(names: Iterable[str]) -> str:
    return listed((f"'{name}'" for name in names), "or")


def _shown(value: object) -> str:
    """Return a short text of a value for a sentence."""
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic | list | tuple) else None
    if array is not None and array.dtype.kind in "iufc" and array.size <= 8:
        return np.array2string(array, precision=4, separator=", ")
    if isinstance(value, Real) and not isinstance(value, bool | Integral):
        return f"{float(value):.4g}"
    return "a function" if callable(value) else repr(as_data(value))


def _arguments(case: tuple[Any, ...]) -> str:
    return f"the {'arguments' if len(case) > 1 else 'argument'} {listed(_shown(each) for each in case)}"


#: Kinds of feedback: heading, and color of the bar in notebooks, which is visible in light and dark themes.
_RIGHT, _WRONG, _MISSING = ("Right", "#2a9d57"), ("Not yet right", "#d1602a"), ("No answer yet", "#7f8790")


def check(number: object, answer: object) -> Feedback:
    """Check the answer to an exercise of the course, and explain what is wrong with it.

    The right answer is computed from recorded data or a small model, which takes up to a few seconds.

    Args:
        number: Lesson and exercise, such as "2.3".
        answer: The answer: a number, a choice, a set of names, or a function, as the exercise says.

    Returns:
        `is_right` and `message`; notebooks and terminals show it as text. An answer that is missing (``...``) or of an
        impossible type is explained as well and raises nothing.

    Raises:
        OptionError: If there is no exercise of this number; `expected` lists the numbers.

    Example:
        >>> import workbench as wb
        >>> wb.course.check("1.1", ...).is_right
        False

    See Also:
        `workbench.course.hint`: If an answer is not right.
        `workbench.course.solution`: Code that answers an exercise.
    """
    exercise = find(number)
    message = exercise.judge(answer)
    kind = _MISSING if exercise.is_missing(answer) else _WRONG if message else _RIGHT
    return Feedback(exercise.number, not message, message or exercise.explanation, *kind)


def hint(number: object, place: int = 1) -> Note:
    """Return a hint for an exercise of the course; later hints say more.

    Args:
        number: Lesson and exercise, such as "2.3".
        place: 1 for the first hint, 2 for the second one, and so on.

    Returns:
        A text that a notebook shows as Markdown.

    Raises:
        OptionError: If there is no exercise of this number, or no such hint.

    Example:
        >>> import workbench as wb
        >>> wb.course.hint("1.1").startswith("Hint 1 of ")
        True

    See Also:
        `workbench.course.check`: Checks an answer.
    """
    hints = find(number).hints
    if place not in range(1, len(hints) + 1):
        raise OptionError.of("place", place, f"from 1 to {len(hints)}, the number of hints of exercise {number}")
    more = f' The next one: `wb.course.hint("{number}", {place + 1})`.' if place < len(hints) else ""
    return Note(f"Hint {place} of {len(hints)}: {hints[place - 1]}{more}")


def solution(number: object) -> Note:
    """Return the code of a solution of an exercise of the course.

    Args:
        number: Lesson and exercise, such as "2.3".

    Returns:
        A text that a notebook shows as Markdown. The code runs after the code cells of the lesson.

    Raises:
        OptionError: If there is no exercise of this number.

    Example:
        >>> import workbench as wb
        >>> "answer" in wb.course.solution("1.1")
        True

    See Also:
        `workbench.course.check`: Checks an answer.
        `workbench.course.hint`: Says less than the solution.
    """
    exercise = find(number)
    return Note(f"```python\n{exercise.solution.strip()}\n```\n\n{exercise.explanation}".strip())


@dataclass(frozen=True)
class Feedback:
    """What `check` says about an answer."""

    number: str
    is_right: bool
    message: str
    heading: str
    color: str

    def __repr__(self) -> str:
        return f"{self.number}: {self.heading}. {self.message}".strip()

    def _repr_html_(self) -> str:
        # Text between backticks is code, as in Markdown.
        message = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(self.message, quote=False))
        return (
            f'<div style="border-left: 4px solid {self.color}; padding: 2px 0 2px 12px">'
            f"<b>{self.number}: {self.heading}.</b> {message}</div>"
        )


class Note(str):
    """A text that a notebook shows as Markdown, and a terminal without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)


def lessons() -> tuple[int, ...]:
    """Return the numbers of the lessons that have exercises."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(int(name.removeprefix("lesson_")) for name in names if re.fullmatch(r"lesson_\d+", name)))


def exercises_of(lesson: int) -> tuple[Exercise, ...]:
    """Return the exercises of a lesson, in their order."""
    found: tuple[Exercise, ...] = importlib.import_module(f"workbench.course.lesson_{lesson}").EXERCISES
    return found


def find(number: object) -> Exercise:
    """Return the exercise of a number."""
    every = {exercise.number: exercise for lesson in lessons() for exercise in exercises_of(lesson)}
    # A learner may well write the number without quotation marks.
    exercise = every.get(str(number).strip())
    if exercise is None:
        raise OptionError.of("number", number, tuple(every))
    return exercise
