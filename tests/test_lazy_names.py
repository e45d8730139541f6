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


def test_a_name_that_is_almost_right_is_named(package):
    with pytest.raises(AttributeError, match=r"^No lazily attribute Duble; did you mean lazily\.double\?$"):
        _ = package.Duble


def test_names_of_an_optional_part_load_and_are_not_listed(package):
    load, names, listed = attach_stub("lazily", package.__file__, optional="broken")
    assert names() == listed == ["double", "first"]
    with pytest.raises(ImportError, match="never used"):
        load("other")


def test_widgets_are_names_of_the_package():
    import workbench as wb
    from workbench import widgets

    assert all(getattr(wb, name) is getattr(widgets, name) for name in dir(widgets))
    assert not {"widgets", *dir(widgets)} & set(dir(wb))  # without the extra "lab", they cannot be loaded


def test_the_version_is_that_of_the_installed_package():
    import importlib.metadata

    import workbench as wb

    assert wb.__version__ == importlib.metadata.version("stability-workbench")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("savefig", "plots.save"), ("to_netcdf", "export_netcdf"), ("load", "open_run"), ("fit", "train"),
        ("SpectrumExplorr", "SpectrumExplorer"),
    ],
)  # fmt: skip
def test_names_from_other_libraries_lead_to_names_that_exist(name, meant):
    from operator import attrgetter

    import workbench as wb

    with pytest.raises(AttributeError, match=rf"did you mean wb\.{meant}\?"):
        getattr(wb, name)
    assert attrgetter(meant)(wb)


def test_the_stub_determines_the_names():
    import workbench

    load, names, listed = attach_stub("workbench", workbench.__file__, optional="widgets")
    assert set(listed) == set(workbench.__all__)
    assert names() == listed
    assert load("WorkbenchError") is workbench.errors.WorkbenchError
