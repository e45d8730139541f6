"""The door of public calls: what the annotations say is what is admitted, and each refusal is one sentence."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about
from tests.wrong_arguments import callables
from workbench.errors import AnatomyError, CallError, OptionError
from workbench.option_checks import check_fields, checked
from workbench.option_kinds import (
    Bound,
    Fraction,
    Measured,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Remedy,
    above,
    at_most,
    evaluated,
    n_dims,
    one_of,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import nn
    from unheard_of import Thing

Half = Annotated[float, above(0), at_most(0.5)]


_ARRAY = np.zeros(1)
_DATA = xr.Dataset()
_MODEL = torch.nn.Linear(1, 1)
_TABLE = np.zeros((1, 1))


@checked
def many(
    *,
    flag: bool = False,
    count: PositiveInt | None = None,
    size: PositiveFloat = 1.0,
    any_number: float = 0.0,
    limit: Bound = math.inf,
    measured: Measured = 0.0,
    share: Fraction = 1.0,
    half: Half = 0.5,
    text: str = "",
    path: str | Path | None = None,
    kind: Literal["a", "b"] = "a",
    choice: Annotated[str, one_of(("a", "b"))] = "a",
    names: Sequence[str] = (),
    numbers: Collection[int] = (),
    pair: tuple[float, float] = (0.0, 0.0),
    table: Mapping[str, int] | None = None,
    each: Iterable[int] = (),
    call: Callable[[int], int] | None = None,
    array: ArrayLike = 0.0,
    own_array: np.ndarray = _ARRAY,
    tensor: torch.Tensor | None = None,
    module: nn.Module | None = None,
    thing: Thing | None = None,
    data: xr.Dataset = _DATA,
    model: wb.Subject | nn.Module = _MODEL,
    unknown: Absent = None,  # noqa: F821  # type: ignore[name-defined]
    anything: Any = None,
):
    return locals()


RIGHT = [
    ("flag", [True, np.True_]),
    ("count", [1, np.int64(3), torch.tensor(2), None]),
    ("size", [1, 0.5, np.float32(2), torch.tensor(0.5)]),
    ("any_number", [-1, math.inf]),
    ("limit", [3, math.inf]),
    ("measured", [math.nan, -math.inf]),
    ("share", [1, 0.1]),
    ("half", [0.25]),
    ("path", ["x", Path("x"), None]),
    ("kind", ["b"]),
    ("choice", ["b"]),
    ("names", [["x"], ("x", "y"), np.array(["x"])]),
    ("numbers", [[1], {1, 2}, range(3), np.arange(2)]),
    ("pair", [(1, 2), [0.5, math.nan]]),
    ("table", [{"x": 1}, {}]),
    ("each", [[1], iter([1]), (i for i in range(2))]),
    ("call", [len, lambda x: x]),
    ("array", [1.0, [1, 2], np.ones(2), torch.ones(2)]),
    ("own_array", [[1, 2], np.ones(2)]),
    ("tensor", [torch.ones(1)]),
    ("module", [torch.nn.Linear(1, 1)]),
    ("unknown", [3, "x"]),
    ("anything", [object()]),
]
WRONG = [
    ("flag", ["False", 1, 0, None, "no", [], np.int64(1)], (True, False)),
    ("count", [0, -1, 1.0, True, "1", math.nan, 10**30, [1]], "an integer of at least 1"),
    ("size", [0, -1.0, math.nan, math.inf, "1e-3", True, None, b"", [1.0], 1j], "a finite number above 0"),
    ("any_number", [math.nan, "x", False, None], "a number"),
    ("limit", [0, math.nan, "inf"], "a number above 0"),
    ("measured", ["nan", None, True], "a number"),
    ("share", [0, 1.1], "a finite number above 0 and at most 1"),
    ("half", [0.6], "a finite number above 0 and at most 0.5"),
    ("text", [None, 3, b"x"], "text"),
    ("path", [3, b"x", []], "text or a pathlib.Path"),
    ("kind", ["c", None, 1, ["a"]], ("a", "b")),
    ("choice", ["c", None, 1, np.ones(2)], ("a", "b")),
    ("names", ["x", 3, {"x": 1}, {"x"}, None, object()], "a sequence of elements, each text"),
    ("numbers", ["1", 3, np.ones((2, 2)), torch.ones(2)], "a sequence of elements, each an integer"),
    ("pair", [(1,), (1, 2, 3), 1.0, "ab"], "a sequence of 2 elements, each a number"),
    ("table", [[], "x", 3], "a mapping"),
    ("data", [{}, [], 3], "an xarray Dataset"),
    ("model", [torch.ones(1), [], None], "an nn.Module or a subject"),
    ("each", [3, "x"], "an iterable of elements, each an integer"),
    ("call", [3, "print", lambda: 0, lambda x, y: 0], "a function of 1 argument"),
    ("array", ["x", None, {}, object(), [object()], len], "an array of numbers"),
    ("own_array", ["x", ["y"], 3], "an array of numbers"),
    ("tensor", [[1.0], np.ones(1), 3], "a torch tensor"),
    ("module", [3, torch.ones(1), torch.nn.Linear], "a torch.nn.Module"),
    ("thing", [3, "x", object()], "a Thing"),
]


def kind_of(value):
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT for value in values], ids=kind_of)
def test_what_the_annotation_says_is_admitted(name, value):
    found = many(**{name: value})[name]
    assert found is value or np.array_equal(found, value, equal_nan=isinstance(found, float))


@pytest.mark.parametrize(
    ("name", "value", "expected"), [(name, value, end) for name, values, end in WRONG for value in values], ids=kind_of
)
def test_anything_else_is_one_sentence(name, value, expected):
    with pytest.raises((OptionError, AnatomyError)) as found:
        many(**{name: value})
    assert found.value.name == name
    is_huge = isinstance(value, int) and value > 2**64
    assert found.value.expected == ("a number of 64 bits" if is_huge else expected)
    assert str(found.value).startswith((f"{name} must be ", "The model is "))
    assert str(found.value).endswith(".")


@pytest.mark.parametrize(("name", "value", "part"), [("names", ["x", 3], 3), ("table", {"x": 1.5}, 1.5)])
def test_a_wrong_element_is_named(name, value, part):
    with pytest.raises(OptionError, check=about(name, part)):
        many(**{name: value})


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))
def test_the_door_admits_a_positive_integer_and_nothing_else(value):
    is_right = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**64
    try:
        assert many(count=value)["count"] is value
        assert is_right or value is None
    except OptionError:
        assert not is_right


def test_scalars_of_arrays_become_numbers():
    found = many(size=np.float32(0.5), count=torch.tensor(3), flag=np.False_)
    assert [type(found[name]) for name in ("size", "count", "flag")] == [float, int, bool]


def test_a_remedy_ends_the_sentence():
    @checked
    def call(x: Annotated[int, Remedy("pass 3")]):
        return x

    with pytest.raises(OptionError, match=r"^x must be an integer, got 'y'; pass 3\.$"):
        call("y")


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        (lambda: wb.train(0, 0, lr=1e-3), "lr", "use learning_rate"),
        (lambda: wb.train(0, 0, max_steps=3), "max_steps", "use n_steps"),
        (lambda: wb.train(0, 0, n_steps=1, weight_decay=0.1), "weight_decay", "pass optimizer_options="),
        (lambda: wb.tasks.as_task([], bs=3), "bs", "use batch_size"),
        (lambda: wb.zoo.transformer(hidden_size=3), "hidden_size", "use d_model"),
        (lambda: wb.KSS(strenght=1.0), "strenght", "use strength"),
        (lambda: wb.TrainingPlan(n_steps=1, lr=1.0), "lr", "use learning_rate"),
        (lambda: wb.train(0, 0), "n_steps", "Number of optimizer steps"),
        (lambda: wb.find_rate(0, 0), "n_steps", "find_rate needs the argument n_steps"),
        (lambda: wb.TrainingPlan(), "n_steps", "TrainingPlan needs the argument n_steps"),
        (lambda: wb.train(0, 0, 5), "n_steps", "train takes model, task by position, got 3 values; name the others"),
        (lambda: wb.train(0, 0, model=0, n_steps=1), "model", "by its position and by its name"),
    ],
)
def test_a_call_that_does_not_fit_is_one_sentence(call, name, words):
    with pytest.raises(CallError, match=words, check=about(name)):
        call()


def test_a_call_that_does_not_fit_is_a_type_error_too():
    with pytest.raises(TypeError):
        wb.train()
    with pytest.raises(ValueError):
        wb.train()


def test_functions_keep_what_they_are():
    assert wb.train.__name__ == "train"
    assert pickle.loads(pickle.dumps(wb.train)) is wb.train
    assert pickle.loads(pickle.dumps(wb.koopman.mass_fractions)) is wb.koopman.mass_fractions
    assert list(inspect.signature(wb.train).parameters)[:2] == ["model", "task"]
    assert "Train a model" in wb.train.__doc__


@dataclass
class Options:
    count: PositiveInt = 1

    def __post_init__(self):
        check_fields(self)


@dataclass
class More(Options):
    share: Fraction = 1.0


def test_fields_of_a_subclass_are_checked():
    assert More(2, np.float64(0.5)) == More(2, 0.5)
    for wrong in ({"count": 0}, {"share": 2.0}):
        with pytest.raises(OptionError, check=about(*wrong)):
            More(**wrong)


@checked
class Holder:
    """A class with methods."""

    def __init__(self, n: NonNegativeInt) -> None:
        self.n = n

    def plus(self, n: int) -> int:
        return self.n + n

    @classmethod
    def of(cls, n: int) -> Holder:
        return cls(n)

    @staticmethod
    def twice(n: int) -> int:
        return 2 * n


def test_constructor_and_methods_of_a_class_are_checked():
    assert Holder.of(2).plus(1) + Holder.twice(1) == 5
    for call in (lambda: Holder(-1), lambda: Holder(1).plus(0.5), lambda: Holder.of("1"), lambda: Holder.twice(None)):
        with pytest.raises(OptionError, check=about("n")):
            call()


def test_every_annotation_of_a_public_call_can_be_read():
    """An annotation that cannot be evaluated admits everything in silence."""
    unread = []
    for name, (owner, _, function) in callables().items():
        function = inspect.unwrap(function)
        modules = {function.__module__, *(each.__module__ for each in getattr(owner, "__mro__", ()))} - {"builtins"}
        for argument, text in function.__annotations__.items():
            if not {"Any", "Run"} & set(re.findall(r"\w+", str(text))) and all(
                evaluated(text, module) is Any for module in modules
            ):
                unread.append(f"{name}({argument}: {text})")
    assert unread == []


def test_calls_inside_of_the_package_pass_only_explicit_doors():
    """A published function is checked where users call it; modules of the package call it directly."""
    inner = {"__name__": "workbench.inner", "mass_fractions": wb.koopman.mass_fractions, "plan": wb.TrainingPlan}
    with pytest.raises(AttributeError):
        exec("mass_fractions(1.0, 3)", inner)
    with pytest.raises(OptionError, check=about("thresholds", 3)):
        wb.koopman.mass_fractions([1.0], 3)
    with pytest.raises(OptionError, check=about("n_steps", 0)):
        exec("plan(n_steps=0)", inner)


def test_setters_are_checked_where_users_call_them():
    alarms = wb.Alarms()
    with pytest.raises(OptionError, check=about("false_alarms", 0)):
        alarms.false_alarms = 0
    alarms.false_alarms = 2
    assert alarms.false_alarms == 2
    fault = wb.faults.large_rate()
    with pytest.raises(OptionError, check=about("enabled", "False")):
        fault.enabled = "False"


def test_results_that_users_create_hold_what_their_annotations_say():
    assert math.isnan(wb.rates.Estimate(math.nan, -math.inf, math.inf).value)
    with pytest.raises(OptionError, check=about("value", "x")):
        wb.rates.Estimate("x", 0.0, 1.0)


@checked
def shaped(*, loss: Annotated[np.ndarray, n_dims(2)] = _TABLE, pair: tuple[str, int] = ("a", 1)):
    return loss, pair


def test_dimensions_of_arrays_and_places_of_tuples_are_checked():
    assert shaped(loss=torch.ones(1, 2))[0].tolist() == [[1.0, 1.0]]
    for name, value in [("loss", [1.0]), ("pair", (1, "a")), ("pair", ("a", 1, 2))]:
        with pytest.raises(OptionError, check=about(name)):
            shaped(**{name: value})


def test_names_that_are_imported_for_type_checkers_are_read_in_full():
    with pytest.raises(OptionError, check=about("measures", 3)):
        wb.plots.comparison_table(xr.Dataset(), measures=[3])


def test_a_negative_seed_is_one_for_numpy_too():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=8)
    (record,) = wb.train(model, [[1, 2, 3]], n_steps=1, seed=-1, penalties=[wb.baselines.RandomL2(0.1)])
    assert math.isfinite(record.loss)
