import sys

import pytest

from workbench.lazy_names import attach_stub


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, one of which fails when it is imported."""
    folder = tmp_path / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from workbench.lazy_names import attach_stub\n"
        "__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)\n"
    )
    (folder / "__init__.pyi").write_text(
        "from . import first as first\nfrom .first import double as double\nfrom .broken import thing as other\n"
    )
    (folder / "first.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "broken.py").write_text("raise ImportError('never used')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("lazily")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


def test_a_name_loads_only_its_module_when_it_is_first_used(package):
    assert "lazily.first" not in sys.modules
    assert package.double(4) == 8
    assert package.first is sys.modules["lazily.first"]
    assert "lazily.broken" not in sys.modules
    with pytest.raises(ImportError, match="never used"):
        _ = package.other


def test_all_names_are_listed_before_they_are_loaded(package):
    assert dir(package) == package.__all__ == ["double", "first", "other"]


def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="No lazily attribute absent"):
        _ = package.absent


def test_the_stub_determines_the_names():
    import workbench

    load, names, listed = attach_stub("workbench", workbench.__file__)
    assert set(listed) == set(workbench.__all__)
    assert names() == listed
    assert load("WorkbenchError") is workbench.errors.WorkbenchError
