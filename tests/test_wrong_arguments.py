"""Wrong arguments of public calls are refused with a sentence of the workbench, not an exception from its depth."""

from collections import Counter

import pytest

from tests.wrong_arguments import WRONG, is_raw, outcomes

#: Fraction of the calls that may end in an exception of another library.
LIMIT = 0.01


def check(found, n_least):
    raw = Counter((name, argument, kind) for name, argument, _, kind in found if is_raw(kind))
    assert len(found) > n_least, "The examples supply too few calls."
    assert raw.total() <= LIMIT * len(found), f"{raw.total()} of {len(found)}: {raw.most_common(30)}"


@pytest.mark.medium
def test_wrong_arguments_of_small_packages_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    modules = ("workbench.koopman", "workbench.training", "workbench.tasks", "workbench.zoo.constructors")
    check(list(outcomes(modules, ("None", "'x'", "-1", "nan", "True", "[]", "object"))), 1500)


@pytest.mark.slow
def test_wrong_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(list(outcomes(wrong=tuple(WRONG))), 15000)
