"""Every public name has an example in its docstring, and every example of the package gives the result that it shows.

Public are the names of the package, of its public modules and of the widgets.
The examples are found in the source, so that collecting them imports nothing. Each runs in an empty namespace.
"""

import ast
import doctest
import importlib
import inspect
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from workbench import widgets

PACKAGE = Path(wb.__file__).parent
#: Modules whose examples take several seconds.
SLOW = frozenset(f"workbench.{name}" for name in ("assessment.assess", "reports.make_report"))
#: Packages whose examples draw.
RENDER = ("workbench.plots.", "workbench.reports.")


def modules_with_examples():
    """Dotted name -> path of every module of the package that has ``>>>`` in a docstring."""
    # `widgets` is a link, which not every Python follows by itself.
    paths = {*PACKAGE.rglob("*.py"), *(PACKAGE / "widgets").rglob("*.py")}
    outside = PACKAGE / "data"
    found = {}
    for path in sorted(paths):
        if not path.is_relative_to(outside) and ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            found[".".join(part for part in ("workbench", *parts) if part != "__init__")] = path
    return found


def examples_of(name, path):
    """The doctests of a module, in the order of its text, each with no globals."""
    parser, found = doctest.DocTestParser(), []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and ">>> " in text:
                label = name if isinstance(node, ast.Module) else f"{name}.{node.name}"
                found.append(parser.get_doctest(text, {}, label, str(path), node.body[0].lineno - 1))
    return found


def public():
    """Name -> each module, class and function in ``dir()`` of the package, its public modules and its widgets."""
    found = {}
    for name in dir(wb):
        value = getattr(wb, name)
        found[f"wb.{name}"] = value
        if inspect.ismodule(value):
            found |= {f"wb.{name}.{inner}": getattr(value, inner) for inner in dir(value) if not inner.startswith("_")}
    found |= {f"widgets.{name}": getattr(widgets, name) for name in dir(widgets)}
    found = {name: value for name, value in found.items() if inspect.ismodule(value) or callable(value)}
    return {name: value for name, value in found.items() if module_of(value).startswith("workbench")}


def own(value):
    """The docstring of an object itself, not one that it inherits."""
    return (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""


def module_of(value):
    """Name of the module that defines a public name; not one of the package for a type of Python, such as a union."""
    return value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") or ""


def see_also(text):
    """Names in the section "See Also" of a docstring, each between single backticks at the beginning of its line."""
    _, heading, section = inspect.cleandoc(text).partition("\nSee Also:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    return re.findall(r"^ {4}`([\w.]+)`", section, re.MULTILINE) if heading else []


MODULES = modules_with_examples()


def marked(name):
    marks = [pytest.mark.medium] + [pytest.mark.render] * name.startswith(RENDER) + [pytest.mark.slow] * (name in SLOW)
    return pytest.param(name, marks=marks, id=name)


@pytest.fixture
def _undisturbed(tmp_path, monkeypatch):
    """A folder of its own to work in; random states and warnings as before afterwards."""
    monkeypatch.chdir(tmp_path)
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        yield
    random.setstate(state)
    np.random.set_state(numpy_state)  # noqa: NPY002


@pytest.mark.usefixtures("_undisturbed")
@pytest.mark.parametrize("name", [marked(name) for name in MODULES])
def test_examples_give_what_they_say(name, tmp_path, monkeypatch):
    runner, said = doctest.DocTestRunner(), []
    examples = examples_of(name, MODULES[name])
    assert examples, f"{name} has '>>> ' outside of docstrings alone."
    for number, example in enumerate(examples):
        folder = tmp_path / str(number)  # two examples of a module may write files of one name
        folder.mkdir()
        monkeypatch.chdir(folder)
        runner.run(example, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_every_public_name_has_an_example():
    values = public()
    assert len(values) > 200, "The rule finds too few public names."
    lacking = sorted(name for name, value in values.items() if ">>> " not in own(value))
    assert not lacking, f"Without an example (>>>) in the docstring: {', '.join(lacking)}."


def test_every_public_name_says_what_else_to_see():
    lacking = sorted(name for name, value in public().items() if not see_also(own(value)))
    assert not lacking, f"Without 'See Also' in the docstring: {', '.join(lacking)}."


def test_what_else_to_see_exists():
    for name, value in public().items():
        for other in see_also(own(value)):
            assert other.startswith("workbench."), f"{name} names {other}; write its full name, workbench.{other}."
            found = wb
            for part in other.split(".")[1:]:
                found = widgets if part == "widgets" else getattr(found, part)


def test_what_the_package_names_its_modules_do_not_name_again():
    """Each object has one public name; only the base class of the exceptions has two."""
    again = {id(value): name for name, value in public().items() if "." not in name.removeprefix("wb.")}
    doubled = {name: again[id(value)] for name, value in public().items() if again.get(id(value), name) != name}
    assert doubled == {"wb.errors.WorkbenchError": "wb.WorkbenchError"}


def test_every_example_of_a_public_name_is_run():
    """The example stands in the source of a module, where it is found, and not in a text that is made at import."""
    for name, value in public().items():
        source = importlib.import_module(module_of(value))
        assert source.__name__ in MODULES, f"{name} is defined in {source.__name__}, where no example is found."
        assert source.__file__ == str(MODULES[source.__name__]), name


def test_every_example_of_a_public_name_begins_with_the_import():
    for name, value in public().items():
        begins = ">>> import workbench as wb" in own(value) or ">>> from workbench.widgets import" in own(value)
        assert begins, f"The example of {name} does not begin with 'import workbench as wb'."


def test_only_modules_that_have_examples_are_marked():
    assert MODULES.keys() >= SLOW


def test_an_example_that_is_wrong_fails(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text('def one():\n    """One.\n\n    Example:\n        >>> 1 + 1\n        3\n    """\n')
    (example,) = examples_of("wrong", wrong)
    assert doctest.DocTestRunner().run(example, out=lambda text: None).failed == 1


def test_an_example_sees_no_name_of_its_module(tmp_path):
    hidden = tmp_path / "hidden.py"
    hidden.write_text('def one():\n    """One.\n\n    Example:\n        >>> one()\n    """\n')
    (example,) = examples_of("hidden", hidden)
    assert doctest.DocTestRunner().run(example, out=lambda text: None).failed == 1
