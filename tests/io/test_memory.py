"""How much memory is free, in a container and outside of one."""

import psutil
import pytest

from workbench.io import memory


def test_outside_of_a_container(monkeypatch):
    monkeypatch.setattr(memory, "_LIMITS", (("/nowhere/max", "/nowhere/current"),))
    assert memory.free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.3)


@pytest.mark.parametrize(("limit", "usage", "free"), [("3000", "1000", 2000), ("1000", "3000", 0), ("max", "5", None)])
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, limit, usage, free):
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text(usage)
    monkeypatch.setattr(memory, "_LIMITS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    found = memory.free_memory()
    assert found == free if free is not None else found > 1e6
