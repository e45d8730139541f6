"""Exceptions carry what was wrong as data, wherever they are raised."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import about
from workbench import errors
from workbench.errors import OptionError, StoreError

PACKAGE = Path(wb.__file__).parent
CLASSES = frozenset(errors.__all__)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3),
        ("text", "text"),
        (None, None),
        (Path("a/b"), Path("a/b")),
        (np.float64(0.5), 0.5),
        (torch.tensor(2), 2),
        (torch.ones(2, 3), "Tensor of shape (2, 3)"),
        (torch.nn.Linear(2, 2), "Linear"),
        ([1, torch.ones(1)], (1, "Tensor of shape (1,)")),
        ({"a": {2, 1}}, {"a": (1, 2)}),
        (range(3), "range"),
        (int, "int"),
    ],
)
def test_a_value_is_kept_as_plain_data(value, kept):
    error = OptionError("No.", name="value", value=value)
    assert error.value == kept
    assert type(error.value) is type(kept)


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
def test_an_exception_survives_pickling(kind):
    error = kind.of("rate", lambda: 0, ("a", "b"), remedy="pass one of them")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))
    assert (again.name, again.value, again.expected) == ("rate", "function", ("a", "b"))


def test_the_standard_sentence():
    assert str(OptionError.of("rate", -1.0, "positive", remedy="pass 1e-3")) == (
        "rate must be positive, got -1.0; pass 1e-3."
    )
    assert str(OptionError.of("norm", "x", ("pre_ln", None))) == "norm must be one of 'pre_ln', None, got 'x'."
    assert str(OptionError.of("model", torch.nn.Linear(1, 1), "a path")) == "model must be a path, got Linear."


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\u202eb", "a\0b", "\ud800"])
def test_a_message_is_one_printable_sentence(name):
    error = StoreError.of(name, name, name)
    assert str(error).isprintable()
    assert str(error).isascii()
    assert (error.name, error.value) == (name, name)


def test_a_place_leaves_the_fields_as_they_are():
    error = OptionError.of("rate", -1.0, "positive").within("plan.toml")
    assert str(error) == "plan.toml: rate must be positive, got -1.0."
    assert (error.name, error.value, error.expected) == ("rate", -1.0, "positive")


def test_an_assertion_about_an_exception_can_fail():
    error = OptionError.of("rate", -1.0, "positive")
    assert about("rate", -1.0, "positive")(error)
    assert not about("loss")(error)
    assert not about("rate", 1.0)(error)
    assert not about("rate")(ValueError("rate"))
    with pytest.raises(BaseException, match="found"), pytest.raises(OptionError, check=about("loss")):
        raise error
