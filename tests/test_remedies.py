"""Every option that a sentence proposes is one of the call that it concerns.

The calls are read from the syntax trees. An option such as ``overwrite=`` that an exception proposes must be an
argument of every public function from which the exception can reach the user, unless the sentence names the call, as
in ``wb.train(..., checkpoint_every=)``, which must then have the option.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import nn

import workbench as wb
from workbench import errors, widgets

PACKAGE = Path(wb.__file__).parent
#: An option that a sentence proposes, and a call in a sentence with its arguments.
OPTION, CALL = re.compile(r"(?<![\w.])(?<!without )([a-z_]+)=(?!=)"), re.compile(r"([\w.]+)\(([^()]*)\)")
#: Calls of other packages that sentences name.
FOREIGN = frozenset(
    {"FSDP", "tokenizer", "expand_dims", "isel", "module.to_empty", "flow.isel", ".isel", "spectra.isel"}
)
#: Sentence and option -> the call that has the option, where the sentence describes it.
ELSEWHERE = {
    ("workbench.plots.figure_files.save", "backend"): "the function that drew the figure",
    ("workbench.models.streaming.StreamingChoice.is_streamed", "strict"): "the call that had this option",
    ("workbench.callbacks.train.gather", "store"): "wb.train, which alone takes a recorder by this name",
}
#: A call of these without this argument writes nothing, and so never raises a sentence about what it writes.
RECORDS = {"workbench.training.loop.Training": "recording", "workbench.callbacks.train.train": "store"}
#: Methods of everybody's objects, whose calls say nothing about the functions of the same name.
COMMON = frozenset(name for kind in (nn.Module, list, dict, str, set, Path, ast.AST) for name in dir(kind))


def _texts(node, assigned):
    """The texts of an expression, and those that are assigned to the names in it."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.Name):
            for value in assigned.get(each.id, ()):
                yield from _texts(value, {})


@dataclass
class Definition:
    """A function, or a class with the arguments of its constructor."""

    module: str
    owner: str
    arguments: list[str]
    body: ast.AST | None
    calls: list[tuple[Definition, ast.Call | None]] = field(default_factory=list)
    place: str = ""


class Calls:
    """Which function of the package calls which."""

    def __init__(self, sources):
        self.found, self._imports, self._by_name = {}, {}, defaultdict(list)
        self._bases = {}
        for module, text in sources.items():
            tree = ast.parse(text)
            imports = self._imports[module] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    base = module if node.level else ""  # only the stub of a package imports relatively
                    source = ".".join(filter(None, [base, node.module]))
                    imports |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
            self._add(tree, module, module, "")
        for place, one in self.found.items():
            one.place = place
        for place, bases in self._bases.items():  # a class without a constructor has that of its base
            if f"{place}.__init__" not in self.found:
                for base in (self._place(self.found[place].module, name) for name in bases):
                    if base in self.found:
                        self.found[base].calls.append((self.found[place], None))
                        self.found[place].arguments += self.found[base].arguments
        for one in list(self.found.values()):
            for call in [] if one.body is None else (n for n in ast.walk(one.body) if isinstance(n, ast.Call)):
                if (called := self._called(one, call.func)) is not None:
                    called.calls.append((one, call))
            if one.place.endswith((".__init__", ".__post_init__")):
                one.calls.append((self.found[one.owner], None))

    def _add(self, node, module, prefix, owner):
        for child in getattr(node, "body", ()):
            place = f"{prefix}.{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                given = child.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                self.found[place] = Definition(module, owner, names, child)
                self._by_name[child.name].append(place)
            elif isinstance(child, ast.ClassDef):
                self._add(child, module, place, place)
                fields = [each.target.id for each in child.body if isinstance(each, ast.AnnAssign)]
                init = self.found.get(f"{place}.__init__")
                self.found[place] = Definition(module, place, init.arguments if init else fields, None)
                self._bases[place] = [each.id for each in child.bases if isinstance(each, ast.Name)]

    def _place(self, module, name):
        """Where a name of a module is defined, through any number of imports; empty if not in the package."""
        place = f"{module}.{name}"
        while place and place not in self.found:
            module, _, name = place.rpartition(".")
            following = self._imports.get(module, {}).get(name, "")
            place = following if following != place else ""
        return place

    def _called(self, one, function):
        if isinstance(function, ast.Name):
            return self.found.get(self._place(one.module, function.id))
        if not isinstance(function, ast.Attribute):
            return None
        if ast.unparse(function) == "super().__init__":
            bases = (self._place(one.module, name) for name in self._bases[one.owner])
            return next((self.found[base] for base in bases if base in self.found), None)
        base = function.value.id if isinstance(function.value, ast.Name) else ""
        if base in ("self", "cls"):
            return self.found.get(f"{one.owner}.{function.attr}")
        places = self._by_name[function.attr]
        return self.found[places[0]] if len(places) == 1 and function.attr not in COMMON else None

    def sentences(self):
        """The definition in which each exception is created, and its text."""
        for one in self.found.values():
            assigned = defaultdict(list)
            for node in [] if one.body is None else ast.walk(one.body):
                if isinstance(node, ast.Assign | ast.AugAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in (each for each in targets if isinstance(each, ast.Name)):
                        assigned[target.id].append(node.value)
            for call in [] if one.body is None else (n for n in ast.walk(one.body) if isinstance(n, ast.Call)):
                name = {getattr(call.func, "attr", ""), getattr(call.func, "id", "")}
                name.add(getattr(getattr(call.func, "value", None), "id", ""))
                if name & set(errors.__all__):
                    parts = [*call.args, *(each.value for each in call.keywords if each.arg == "remedy")]
                    yield one, "; ".join("".join(_texts(part, assigned)) for part in parts)

    def proposals(self):
        """Definition, sentence, the call that the sentence names (or "") and option, for each option proposed."""
        for one, sentence in self.sentences():
            _, _, remedy = sentence.partition(";")  # before it stands what was wrong
            while found := CALL.search(remedy):  # the innermost call first
                for option in OPTION.findall(found[2]):
                    yield one, sentence, found[1], option
                remedy = remedy.replace(found[0], "")
            for option in OPTION.findall(remedy):
                yield one, sentence, "", option

    def lacking(self, start, option, public):
        """Public names without an option through which an exception of ``start`` can reach the user."""
        waiting, seen, found = [start], set(), set()
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            has = option in one.arguments
            if not has and one.place in public:
                found.add(public[one.place])
            for caller, call in one.calls:
                given = [each for each in call.keywords if each.arg in (option, None)] if call is not None else []
                if one.place in RECORDS and not any(each.arg == RECORDS[one.place] for each in call.keywords):
                    continue
                if has and given and not isinstance(given[0].value, ast.Name):
                    continue  # the caller decides, so that the sentence is not raised or not meant for its own caller
                waiting.append(caller)
        return found


def sources():
    found = {}
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "widgets").rglob("*.py")}):
        if not path.is_relative_to(PACKAGE / "data"):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            stub = path.with_suffix(".pyi")
            text = path.read_text() + (stub.read_text() if stub.exists() else "")
            found[".".join(("workbench", *(part for part in parts if part != "__init__")))] = text
    return found


def public_names():
    """Place of each public function and class -> its public name."""
    found = {}
    for name in dir(wb):
        value = getattr(wb, name)
        inner = dir(value) if isinstance(value, types.ModuleType) else ()
        for label, each in {name: value, **{f"{name}.{one}": getattr(value, one) for one in inner}}.items():
            if inspect.isfunction(each) or inspect.isclass(each):
                found.setdefault(f"{each.__module__}.{each.__qualname__}", f"wb.{label}")
    return found


@pytest.fixture(scope="module")
def calls():
    return Calls(sources())


def test_a_call_that_a_sentence_names_has_the_option(calls):
    known = {name.rpartition(".")[2]: one for place, name in public_names().items() if (one := calls.found.get(place))}
    known |= {name: getattr(widgets, name) for name in dir(widgets)}
    n = 0
    for _, sentence, call, option in calls.proposals():
        if call and call not in FOREIGN:
            n += 1
            one = known[call.rpartition(".")[2]]
            arguments = one.arguments if isinstance(one, Definition) else inspect.signature(one).parameters
            assert option in arguments, sentence
    assert n > 15


def test_every_call_that_can_raise_a_sentence_has_the_option_that_it_proposes(calls):
    public, lacking, n = public_names(), [], 0
    for one, sentence, call, option in calls.proposals():
        if not call and (one.place, option) not in ELSEWHERE:
            n += 1
            found = calls.lacking(one, option, public)
            lacking += [f"{name} lacks {option}=: {sentence}" for name in found]
    assert n > 30
    assert not lacking, "\n".join(lacking)


def test_a_call_without_the_option_is_found():
    text = """
def check(path, overwrite):
    advice = "it exists; pass overwrite=True"
    raise StoreError(f"{advice}.")

def record(path, overwrite=False):
    check(path, overwrite=overwrite)

def watch(path):
    record(path)

def replace(path):
    record(path, overwrite=True)
"""
    calls = Calls({"package": text})
    ((one, _, _, option),) = calls.proposals()
    public = {f"package.{name}": name for name in ("check", "record", "watch", "replace")}
    assert calls.lacking(one, option, public) == {"watch"}
