"""Wrong arguments for every public call: the examples of the docstrings supply valid calls, one argument is replaced.

``python -m tests.wrong_arguments [MODULE ...]`` prints, for the public names of modules such as ``workbench.koopman``,
how many calls ended in an exception that is not of the workbench, and which.

Many methods have no example. ``WRONG_ARGUMENTS=calls.tsv pytest -p tests.wrong_arguments tests/callbacks`` takes the
first valid call of each public name in the tests instead, in a fork of the process, so that the tests continue.
"""

import contextlib
import functools
import inspect
import io
import os
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter

import numpy as np
import torch
import xarray as xr

import workbench as wb
from tests.test_docstrings import MODULES, examples_of, module_of, public
from workbench.option_checks import _is_inside

WRONG = {
    "None": None, "'x'": "x", "-1": -1, "0": 0, "1.5": 1.5, "nan": float("nan"), "inf": float("inf"), "True": True,
    "[]": [], "{}": {}, "()": (), "object": object(), "lambda": lambda: None, "b''": b"", "array": np.array([[0.5]]),
    "tensor": torch.ones(2), "huge": 10**30, "'False'": "False",
    "Dataset": xr.Dataset(),
}  # fmt: skip
#: Longest time of one call; a wrong argument is refused before work begins.
SECONDS = 2.0


class TooLongError(BaseException):
    """A call began to work."""


def _too_long(*_):
    raise TooLongError


def callables(modules=("workbench",)):
    """Name -> owner, attribute and function of every public function, constructor and method."""
    found = {}
    for name, value in public().items():
        if inspect.ismodule(value) or not module_of(value).startswith(tuple(modules)):
            continue
        if not inspect.isclass(value):
            owner = wb
            for part in name.split(".")[1:-1]:
                owner = getattr(owner, part)
            if not name.startswith("widgets"):
                found[name] = owner, name.split(".")[-1], value
        elif not issubclass(value, BaseException):
            names = [each for each in dir(value) if not each.startswith("_")]
            for each in ("__init__", *names):
                if each == "forward":  # of a module of torch, which torch calls and compiles
                    continue
                inner = inspect.getattr_static(value, each, None)
                inner = getattr(inner, "__func__", inner)
                if inspect.isfunction(inner) and inner.__module__.startswith("workbench"):
                    found[name if each == "__init__" else f"{name}.{each}"] = value, each, inner
                elif each == "__init__" and "__init__" in vars(value):
                    found[name] = value, each, vars(value)[each]
    return found


@contextlib.contextmanager
def quiet():
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def recorded_calls(modules=("workbench",)):
    """Name of a callable -> function and arguments of a valid call in an example."""
    calls, restored, wanted = {}, [], callables(modules)

    def recording(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if name not in calls and active:
                calls[name] = function, args, kwargs
            return result

        return call

    active = []
    for name, (owner, attribute, function) in wanted.items():
        static = inspect.getattr_static(owner, attribute)
        wrapped = recording(name, function)
        own = not inspect.isclass(owner) or attribute in vars(owner)
        restored.append((owner, attribute, static, own))
        with contextlib.suppress(AttributeError, TypeError):
            setattr(
                owner, attribute, type(static)(wrapped) if isinstance(static, staticmethod | classmethod) else wrapped
            )
    homes = {module_of(value) for value in public().values()}
    for module in sorted(homes & MODULES.keys()):
        if not module.startswith(tuple(modules)):
            continue
        for example in examples_of(module, MODULES[module]):
            active.append(1)
            names = {"__name__": "__main__"}
            with quiet(), contextlib.suppress(Exception):
                for part in example.examples:
                    exec(compile(part.source, example.name, "exec"), names)
            active.clear()
    for owner, attribute, static, own in restored:
        with contextlib.suppress(AttributeError, TypeError):
            setattr(owner, attribute, static) if own else delattr(owner, attribute)
    return calls


def outcome(function, args, kwargs):
    """ "accepted", "refused" (an exception of the workbench), "long" or the name of another exception."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with quiet():
            result = function(*args, **kwargs)
            if inspect.isgenerator(result):
                next(result, None)
                result.close()
    except wb.WorkbenchError:
        return "refused"
    except TooLongError:
        return "long"
    except StopIteration:
        return "accepted"
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "accepted"


def trials(name, function, args, kwargs, wrong=tuple(WRONG)):
    """Yield (name, argument, wrong value, outcome) of the calls that replace one argument of a valid call."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for label in wrong:
            value = WRONG[label]
            if value is None and parameter.default is None:
                continue
            given = inspect.BoundArguments(signature, dict(bound.arguments))
            given.arguments[parameter.name] = value
            order = [each for each in signature.parameters if each in given.arguments]
            given.arguments = {each: given.arguments[each] for each in order}
            yield name, parameter.name, label, outcome(function, given.args, given.kwargs)


def outcomes(modules=("workbench",), wrong=tuple(WRONG)):
    """Yield (name, argument, wrong value, outcome) of every call in an example."""
    for name, (function, args, kwargs) in recorded_calls(modules).items():
        yield from trials(name, function, args, kwargs, wrong)


def in_a_fork(name, function, args, kwargs, file):
    """Call a function; if the call is valid, try wrong arguments in a fork from before it."""
    waits, tells = os.pipe()
    child = os.fork()
    if not child:
        os.close(tells)
        with contextlib.suppress(BaseException):
            if os.read(waits, 1):
                for row in trials(name, function, args, kwargs):
                    print(*row, sep="\t", file=file, flush=True)
        os._exit(0)
    os.close(waits)
    try:
        result = function(*args, **kwargs)
        os.write(tells, b"1")
        return result
    finally:
        os.close(tells)
        os.waitpid(child, 0)


def tried_in_tests(name, function, file):
    done = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if _is_inside(sys._getframe(1).f_globals.get("__name__", "")):
            inside = {"__name__": "workbench.inner", "function": function}  # the door asks who calls
            return eval("function(*args, **kwargs)", inside, {"args": args, "kwargs": kwargs})
        if done:
            return function(*args, **kwargs)
        result = in_a_fork(name, function, args, kwargs, file)
        done.append(name)
        return result

    return call


def pytest_configure(config):
    """With ``-p tests.wrong_arguments``: try wrong arguments at the first valid call of each public name."""
    if "WRONG_ARGUMENTS" not in os.environ:
        return
    file = open(os.environ["WRONG_ARGUMENTS"], "a")  # noqa: SIM115  (until the process ends)
    for name, (owner, attribute, _) in callables().items():
        static = inspect.getattr_static(owner, attribute)
        inner = getattr(static, "__func__", static)
        call = tried_in_tests(name, inner, file)
        with contextlib.suppress(AttributeError, TypeError):
            setattr(owner, attribute, call if inner is static else type(static)(call))


def is_raw(found):
    return found not in ("accepted", "refused", "long")


def main(modules):
    torch.set_num_threads(1)
    real = os.dup(1)
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    random.seed(0)
    totals = Counter()
    with os.fdopen(real, "w") as out:
        for name, argument, label, found in outcomes(modules or ("workbench",)):
            totals["raw" if is_raw(found) else found] += 1
            print(name, argument, label, found, sep="\t", file=out, flush=True)
        print("total", sum(totals.values()), dict(totals), file=out)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
