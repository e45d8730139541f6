"""Import the scripts of data/ as modules."""

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "data"


def load_script(name):
    """Import a script without running its main function."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@contextmanager
def script_with_others(name):
    """Import a script that imports other scripts of data/; all are removed from sys.modules afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        try:
            yield importlib.import_module(name)
        finally:
            for other in FOLDER.glob("*.py"):
                sys.modules.pop(other.stem, None)
