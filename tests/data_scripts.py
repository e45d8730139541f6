"""The scripts of data/ as modules."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data"


def load_script(name):
    """A script by its name, without running it as one."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
