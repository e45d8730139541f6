"""The comparison as a table: the same numbers, rounded."""

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, SchemaError
from workbench.plots import comparison_table


def test_numbers_are_those_of_the_comparison(comparison):
    table = comparison_table(comparison, digits=12)
    assert table.index.tolist() == ["Pre-LN", "none", "bare"]
    for source in ("ours", "published"):
        expected = comparison.near_unit_mass.sel(source=source)
        np.testing.assert_allclose(table["near-unit mass M", source], expected, rtol=1e-11)
    assert table["step of divergence", ""].tolist()[1] == 12
    assert table["step", ""].isna().tolist() == [False, False, True]


def test_ours_and_published_are_adjacent_and_empty_columns_are_omitted(comparison):
    names = comparison_table(comparison).columns.tolist()
    assert names[:3] == [("step", ""), ("expansive mass", "ours"), ("expansive mass", "published")]
    assert ("eigenvector condition", "published") not in names
    assert ("eigenvector condition", "ours") in names
    assert names[-1] == ("best accuracy", "")


def test_significant_digits(comparison):
    values = comparison_table(comparison, measures=["eigenvector_condition"], digits=2)["eigenvector condition", "ours"]
    assert all(float(f"{value:.1e}") == value for value in values)


def test_a_comparison_without_any_value(runs):
    silent = runs["bare"].copy(deep=True)
    silent["is_informative"][:] = False
    table = comparison_table(wb.compare({"a": silent}))
    assert table.shape == (1, 0)


def test_invalid_input_is_rejected(comparison, calm):
    with pytest.raises(SchemaError, check=says("The dataset has no variables by architecture and source;")):
        comparison_table(calm)
    with pytest.raises(SchemaError, check=about("measures", "loss")):
        comparison_table(comparison, measures=["loss"])
    with pytest.raises(OptionError, check=about("digits", 0)):
        comparison_table(comparison, digits=0)
