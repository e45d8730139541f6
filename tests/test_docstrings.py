"""Every public function and class has an example in its docstring, and every example of the package gives what it says.

The examples are found in the source, so that collecting them imports nothing, and each runs without any name but those
that it makes or imports itself.
"""

import ast
import doctest
import importlib
import inspect
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb

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
    """Name -> each function and class that the stub of the package and its public modules name, but exceptions."""
    found = {}
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    for alias in (alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names):
        value = getattr(wb, alias.name)
        named = {alias.name: value}
        if inspect.ismodule(value):
            named = {f"{alias.name}.{name}": getattr(value, name) for name in getattr(value, "__all__", ())}
        found |= {f"wb.{name}": value for name, value in named.items()}
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, BaseException))
    }


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


def test_every_public_function_and_class_has_an_example():
    values = public()
    assert len(values) > 250, "The rule finds too little of what is public."
    # The docstring of a class that it inherits is no example of it.
    texts = {
        name: vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__ for name, value in values.items()
    }
    lacking = [name for name, text in texts.items() if ">>> " not in (text or "")]
    assert not lacking, f"Without an example (>>>) in the docstring: {', '.join(lacking)}."


def test_what_the_package_names_its_modules_do_not_name_again():
    """One name for one thing, classes and functions alike; exceptions are not asked about."""
    again = {id(value): name for name, value in public().items() if "." not in name.removeprefix("wb.")}
    doubled = {name: again[id(value)] for name, value in public().items() if again.get(id(value), name) != name}
    assert doubled == {}


def test_every_example_of_a_public_name_is_run():
    """The example stands in the source of a module, where it is found, and not in a text that is made at import."""
    for name, value in public().items():
        source = importlib.import_module(value.__module__)
        assert value.__module__ in MODULES, f"{name} is of {value.__module__}, where no example is found."
        assert source.__file__ == str(MODULES[value.__module__]), name


def test_every_example_of_a_public_name_begins_with_the_import():
    for name, value in public().items():
        assert ">>> import workbench as wb" in value.__doc__, f"The example of {name} lacks 'import workbench as wb'."


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
