"""The scripts of data/ as modules: importing this one makes them importable by name."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data"
sys.path.append(str(FOLDER))
load_script = importlib.import_module
