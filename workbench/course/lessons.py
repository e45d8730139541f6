"""The exercises of all lessons by number: check an answer, give a hint, show the solution."""

from __future__ import annotations

import html
import importlib
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import OptionError

if TYPE_CHECKING:
    from workbench.course.exercises import Exercise

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
